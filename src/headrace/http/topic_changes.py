"""Topics made, altered and deleted, as the Kafka APIs for it do it: on any broker of the cluster, or a registry.

    POST   /topics          {"name": "orders", "partitions": 3, "replicas": 2, "settings": {"durability": "disk"}}
                            or with "assignments": [[1, 2], [2, 1]], the replicas of each partition, instead of counts;
                            all but the name is optional. ?dry_run=true only says what would be made
    PATCH  /topics/{topic}  {"settings": {"retention.ms": 60000, "durability": null}}: null takes the topic's own value
                            away; or {"partitions": 6}, the new total. One of the two in a request
    DELETE /topics/{topic}  with all its records

Values of settings are text, numbers, truth values, or lists of text. Answered when this broker knows of the change.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.cluster import config
from headrace.cluster.config import ConfigChange
from headrace.cluster.topics import DEFAULT, TOPIC_PARTITIONS_MAX, CreateTopic, EnlargeTopic
from headrace.errors import InvalidRequest
from headrace.http import documents
from headrace.http.description import (
    DONE,
    TEXT,
    Answer,
    Body,
    Operation,
    Parameter,
    choice,
    closed,
    list_of,
    map_of,
    nullable,
    number,
)
from headrace.http.exchange import Exchange
from headrace.http.message import Response, json_response
from headrace.http.topics import TOPIC, known_topic, shown_topic
from headrace.settings.topic_name import TOPIC_NAME_MAX
from headrace.settings.values import text_of

CREATE_FIELDS: Final = ("name", "partitions", "replicas", "settings", "assignments")
ALTER_FIELDS: Final = ("settings", "partitions")
COUNT_MAX: Final = (1 << 31) - 1
TRUTHS: Final = {"true": True, "false": False}

_SETTING: Final = {
    "anyOf": [TEXT, {"type": "number"}, {"type": "boolean"}, list_of(TEXT), {"type": "null"}],
}
_SETTINGS: Final = {"anyOf": [map_of(_SETTING), {"type": "null"}]}
_PARTITIONS: Final = nullable(number(1, TOPIC_PARTITIONS_MAX))
CREATE: Final = Operation(
    "Make a topic",
    {
        200: Answer.json("The topic that would be made.", TOPIC),
        201: Answer.json("The topic that was made.", TOPIC),
    },
    (Parameter("dry_run", "Only say what would be made.", choice(*TRUTHS)),),
    Body.json(
        closed(
            {"name": {"type": "string", "pattern": f"^[a-zA-Z0-9._-]{{1,{TOPIC_NAME_MAX}}}$"}},
            {
                "partitions": _PARTITIONS,
                "replicas": nullable(number(1, COUNT_MAX)),
                "settings": _SETTINGS,
                "assignments": nullable(list_of(list_of(number(0, COUNT_MAX)), maxItems=TOPIC_PARTITIONS_MAX)),
            },
            title="NewTopic",
        )
    ),
    (403, 409, 415, 503, 504),
)
ALTER: Final = Operation(
    "Alter settings of a topic, or add partitions to it",
    {200: Answer.json("The topic as it is now.", TOPIC)},
    body=Body.json(
        {
            "title": "TopicChange",
            "anyOf": [
                closed({"settings": map_of(_SETTING)}, {"partitions": {"type": "null"}}),
                closed({"partitions": number(1, TOPIC_PARTITIONS_MAX)}, {"settings": {"type": "null"}}),
            ],
        }
    ),
    errors=(403, 404, 415, 503, 504),
)
DELETE: Final = Operation(
    "Delete a topic with all its records",
    {200: Answer.json("It is deleted.", closed({"name": TEXT, "deleted": DONE}))},
    errors=(404, 503, 504),
)


def create_topic(exchange: Exchange) -> None:
    dry_run = exchange.request.query.get("dry_run", "false")
    if dry_run not in TRUTHS:
        raise InvalidRequest(f"query parameter dry_run: {dry_run[:40]!r} is neither true nor false")
    exchange.answer_later(_create(exchange, _wanted(exchange), validate_only=TRUTHS[dry_run]))


async def _create(exchange: Exchange, wanted: CreateTopic, *, validate_only: bool) -> Response:
    topic = await exchange.services.topics.create(wanted, validate_only=validate_only)
    return json_response(shown_topic(exchange.services, topic), 200 if validate_only else 201)


def _wanted(exchange: Exchange) -> CreateTopic:
    fields = documents.read_object(exchange.request, CREATE_FIELDS)
    overrides = {name: _setting_text(name, value) for name, value in _settings(fields).items() if value is not None}
    return CreateTopic(
        documents.text("name", documents.required(fields, "name")),
        _count(fields, "partitions"),
        _count(fields, "replicas"),
        overrides,
        _assignments(fields.get("assignments", [])),
    )


def _count(fields: dict[str, Any], name: str) -> int:
    return documents.number(name, fields[name], 0, COUNT_MAX) if name in fields else DEFAULT


def _assignments(given: Any) -> dict[int, list[int]]:
    if not isinstance(given, list) or not all(isinstance(brokers, list) for brokers in given):
        raise InvalidRequest("assignments are the numbers of the brokers of each partition, such as [[1, 2], [2, 1]]")
    if len(given) > TOPIC_PARTITIONS_MAX:
        raise InvalidRequest(f"{len(given)} assignments; a topic has at most {TOPIC_PARTITIONS_MAX} partitions")
    return {
        index: [documents.number("a broker in assignments", broker, 0, COUNT_MAX) for broker in brokers]
        for index, brokers in enumerate(given)
    }


def alter_topic(exchange: Exchange) -> None:
    name = exchange.request.parameters["topic"]
    fields = documents.read_object(exchange.request, ALTER_FIELDS)
    if len(fields) != 1:
        raise InvalidRequest("give settings or partitions: each is a change of its own")
    if "partitions" in fields:
        partitions = documents.number("partitions", fields["partitions"], 0, COUNT_MAX)
        exchange.answer_later(_enlarge(exchange, EnlargeTopic(name, partitions)))
        return
    changes = [
        ConfigChange(setting, config.Operation.DELETE)
        if value is None
        else ConfigChange(setting, config.Operation.SET, _setting_text(setting, value))
        for setting, value in _settings(fields).items()
    ]
    exchange.answer_later(_alter(exchange, name, changes))


async def _enlarge(exchange: Exchange, wanted: EnlargeTopic) -> Response:
    await exchange.services.topics.enlarge(wanted)
    return _altered(exchange, wanted.name)


async def _alter(exchange: Exchange, name: str, changes: list[ConfigChange]) -> Response:
    await exchange.services.configs.alter_topic(name, changes)
    return _altered(exchange, name)


def _altered(exchange: Exchange, name: str) -> Response:
    return json_response(shown_topic(exchange.services, known_topic(exchange.services, name)))


def _settings(fields: dict[str, Any]) -> dict[str, Any]:
    given = fields.get("settings", {})
    if not isinstance(given, dict):
        raise InvalidRequest('settings is not an object such as {"durability": "disk"}')
    return given


def _setting_text(name: str, value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = text_of(tuple(value))
    elif isinstance(value, bool | int | float):
        value = text_of(value)
    return documents.text(f"setting {name[:40]}", value)


def delete_topic(exchange: Exchange) -> None:
    exchange.answer_later(_delete(exchange, exchange.request.parameters["topic"]))


async def _delete(exchange: Exchange, name: str) -> Response:
    await exchange.services.topics.delete(name)
    return json_response({"name": name, "deleted": True})
