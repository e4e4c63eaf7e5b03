"""DescribeConfigs, versions 1 to 4. 3: types and documentation; 4: flexible.

A broker's settings are told by our names and by those that Kafka gives them (`kafka.broker_names`). Where a value was
given when the broker started (`flag`, `environment NAME`, `file PATH`) is told as a synonym's name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.cluster.config import DYNAMIC, effective
from headrace.errors import ErrorCode, HeadraceError, InvalidRequest, UnknownPartition
from headrace.kafka import broker_names
from headrace.kafka.connection import Request
from headrace.settings.values import BROKER_BY_NAME, GROUP_BY_NAME, TOPIC_SETTINGS, Setting, text_of
from headrace.wire.message import Message

TOPIC: Final = 2
BROKER: Final = 4
GROUP: Final = 32
SOURCE_TOPIC: Final = 1
SOURCE_BROKER: Final = 2
SOURCE_CLUSTER: Final = 3
SOURCE_STATIC: Final = 4
SOURCE_DEFAULT: Final = 5
SOURCE_GROUP: Final = 8
_SOURCES: Final = {
    "default": SOURCE_DEFAULT,
    "cluster": SOURCE_CLUSTER,
    "broker": SOURCE_BROKER,
    "topic": SOURCE_TOPIC,
    "group": SOURCE_GROUP,
}
"""Any other is where it was given when the broker started: a flag, a variable of the environment, a file."""
_TYPES: Final = {"bool": 1, "str": 2, "choice": 2, "int": 5, "float": 6, "list": 7, "secret": 9}

Row = tuple[Setting, str, str, bool]
"""(setting, value, source, read only)"""


def handle(request: Request) -> Message:
    return Message(throttle_time_ms=0, results=[_resource(request, asked) for asked in request.body.resources])


def _resource(request: Request, asked: Message) -> Message:
    rows: list[Row] = []
    code, reason = ErrorCode.NONE, None
    try:
        if asked.resource_type == TOPIC:
            rows = list(_topic(request, asked.resource_name))
        elif asked.resource_type == BROKER:
            rows = list(_broker(request, asked.resource_name))
        elif asked.resource_type == GROUP:
            rows = list(_group(request, asked.resource_name))
        else:
            kinds = "only topics, brokers and groups"
            raise InvalidRequest(f"resource type {asked.resource_type} has no settings here, {kinds}")
    except HeadraceError as error:
        code, reason = error.kafka_code, str(error)
    wanted = asked.configuration_keys
    configs = [_config(row, request.body) for row in rows if not wanted or row[0].name in wanted]
    return Message(
        error_code=code,
        error_message=reason,
        resource_type=asked.resource_type,
        resource_name=asked.resource_name,
        configs=configs,
    )


def _topic(request: Request, name: str) -> Iterable[Row]:
    services = request.services
    topic = services.view.image.topics.get(name)
    if topic is None:
        raise UnknownPartition(f"there is no topic {name!r}")
    current = effective(services.settings, services.view.image, services.broker_id)
    for setting in TOPIC_SETTINGS:
        if setting.name in topic.overrides:
            yield setting, topic.overrides[setting.name], "topic", False
        else:
            known = "log." + setting.name
            yield setting, text_of(current.values[known]), current.sources[known], False


def _broker(request: Request, name: str) -> Iterable[Row]:
    services = request.services
    if name not in ("", str(services.broker_id)):
        raise InvalidRequest(f"only broker {name} itself knows its settings: ask there")
    current = effective(services.settings, services.view.image, services.broker_id)
    for setting in BROKER_BY_NAME.values():
        source = current.sources[setting.name]
        if name or source == "cluster":
            yield setting, text_of(current.values[setting.name]), source, setting.name not in DYNAMIC
    for setting, known in broker_names.aliased():
        source = current.sources[known]
        if name or source == "cluster":
            yield setting, text_of(current.values[known]), source, known not in DYNAMIC
    if name:
        for setting, value, known in broker_names.derived(current, services.view.image, services.broker_id):
            source = current.sources[known] if known else "default"
            yield setting, value, source, True


def _group(request: Request, name: str) -> Iterable[Row]:
    if not name:
        raise InvalidRequest("settings of a group need its name")
    given = request.services.view.image.group_configs.get(name, {})
    for setting in GROUP_BY_NAME.values():
        value = given.get(setting.name, text_of(setting.default))
        yield setting, value, "group" if setting.name in given else "default", False


def _config(row: Row, asked: Message) -> Message:
    setting, value, given, read_only = row
    source = _SOURCES.get(given, SOURCE_STATIC)
    synonyms = [Message(name=setting.name, value=value, source=source)]
    if source == SOURCE_STATIC:  # the protocol has one number for all of them
        synonyms.append(Message(name=given, value=value, source=source))
    if source != SOURCE_DEFAULT:
        synonyms.append(Message(name=setting.name, value=text_of(setting.default), source=SOURCE_DEFAULT))
    return Message(
        name=setting.name,
        value=value,
        read_only=read_only,
        config_source=source,
        is_sensitive=setting.kind == "secret",
        synonyms=synonyms if asked.include_synonyms else [],
        config_type=_TYPES[setting.kind],
        documentation=setting.meaning if asked.include_documentation else None,
    )
