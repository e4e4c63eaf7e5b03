"""AlterConfigs, versions 0 to 2 (2: flexible), and IncrementalAlterConfigs, versions 0 to 1 (1: flexible).

AlterConfigs replaces everything a resource has; IncrementalAlterConfigs sets, deletes, appends to and subtracts from
single settings. A broker resource without a name means all brokers; its settings can be named as Kafka names them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.cluster.config import Alteration, ConfigChange, Operation
from headrace.errors import ErrorCode, HeadraceError, InvalidRequest
from headrace.kafka import broker_names
from headrace.kafka.api.describe_configs import BROKER, GROUP, TOPIC
from headrace.kafka.connection import Request
from headrace.wire.message import Message

OPERATIONS: Final = frozenset(Operation)

Read = Callable[[Message, Callable[[str], str]], Alteration]
"""What a resource of a request asks for, its settings named as ours are."""


def handle(request: Request) -> None:
    request.reply_later(_each(request, _full))


def handle_incremental(request: Request) -> None:
    request.reply_later(_each(request, _changes))


async def _each(request: Request, read: Read) -> Message:
    responses = []
    for asked in request.body.resources:
        code, reason = ErrorCode.NONE, None
        try:
            await _alter(request, asked, read)
        except HeadraceError as error:
            code, reason = error.kafka_code, str(error)
        responses.append(
            Message(
                error_code=code,
                error_message=reason,
                resource_type=asked.resource_type,
                resource_name=asked.resource_name,
            )
        )
    return Message(throttle_time_ms=0, responses=responses)


async def _alter(request: Request, asked: Message, read: Read) -> None:
    is_broker = asked.resource_type not in (TOPIC, GROUP)
    alteration = read(asked, broker_names.ours if is_broker else str)
    configs, only = request.services.configs, request.body.validate_only
    if is_broker:
        await configs.alter_broker(_broker(asked), alteration, validate_only=only)
    elif asked.resource_type == TOPIC:
        await configs.alter_topic(asked.resource_name, alteration, validate_only=only)
    else:
        await configs.alter_group(asked.resource_name, alteration, validate_only=only)


def _full(asked: Message, named: Callable[[str], str]) -> Alteration:
    return {named(config.name): config.value for config in asked.configs if config.value is not None}


def _changes(asked: Message, named: Callable[[str], str]) -> Alteration:
    changes = []
    for config in asked.configs:
        if config.config_operation not in OPERATIONS:
            raise InvalidRequest(f"setting {config.name}: operation {config.config_operation} is not known")
        changes.append(ConfigChange(named(config.name), Operation(config.config_operation), config.value))
    return changes


def _broker(asked: Message) -> int | None:
    if asked.resource_type != BROKER:
        kinds = "only topics, brokers and groups"
        raise InvalidRequest(f"resource type {asked.resource_type} has no settings here, {kinds}")
    if not asked.resource_name:
        return None
    if not asked.resource_name.isdecimal():
        raise InvalidRequest(f"{asked.resource_name!r} is not the number of a broker")
    return int(asked.resource_name)
