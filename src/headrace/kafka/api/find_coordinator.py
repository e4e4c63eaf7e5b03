"""FindCoordinator, versions 0 to 6. 1: kinds of coordinators; 3: flexible; 4: many keys in one request.

The coordinator of a group is the leader of the group's partition of __consumer_offsets, that of a transactional id the
leader of its partition of __transaction_state, that of a share partition (6, asked by brokers) the leader of its
partition of __share_group_state. Each topic is created when it is first asked for.
"""

from __future__ import annotations

from typing import Final

from headrace.cluster.names import OFFSETS_TOPIC, SHARE_STATE_TOPIC, TRANSACTIONS_TOPIC, group_name_fault
from headrace.coordinators.state_log import partition_of
from headrace.errors import ErrorCode, HeadraceError
from headrace.kafka.connection import Request
from headrace.queues.state_records import is_coordinator_key
from headrace.wire.message import Message

GROUP: Final = 0
TRANSACTION: Final = 1
SHARE: Final = 2
TOPICS: Final = {GROUP: OFFSETS_TOPIC, TRANSACTION: TRANSACTIONS_TOPIC, SHARE: SHARE_STATE_TOPIC}
NOUNS: Final = {GROUP: "group", TRANSACTION: "transactional id", SHARE: "share partition"}
MANY_KEYS_FROM: Final = 4


def handle(request: Request) -> Message | None:
    kind = request.body.key_type if request.version >= 1 else GROUP
    topic = TOPICS.get(kind)
    if topic is None or topic in request.services.view.image.topics:
        return _response(request)
    request.reply_later(_create_then_answer(request, topic))
    return None


async def _create_then_answer(request: Request, topic: str) -> Message:
    try:
        await request.services.auto_topic_creation.ensure(topic)
    except HeadraceError as error:
        return _response(request, str(error))
    return _response(request)


def _response(request: Request, failure: str | None = None) -> Message:
    many = request.version >= MANY_KEYS_FROM
    kind = request.body.key_type if request.version >= 1 else GROUP
    keys = request.body.coordinator_keys if many else [request.body.key]
    found = [_coordinator(request, kind, key, failure) for key in keys]
    if many:
        return Message(throttle_time_ms=0, coordinators=found)
    return Message(throttle_time_ms=0, **vars(found[0]))


def _coordinator(request: Request, kind: int, key: str, failure: str | None) -> Message:
    topic = TOPICS.get(kind)
    if topic is None:
        reason = f"coordinators of kind {kind} are not served; groups (0), transactions (1), share partitions (2) are"
        return _none(key, ErrorCode.INVALID_REQUEST, reason)
    if failure is not None:
        return _none(key, ErrorCode.COORDINATOR_NOT_AVAILABLE, failure)
    fault = group_name_fault(key) if kind == GROUP else None
    if fault is not None:
        return _none(key, ErrorCode.INVALID_GROUP_ID, fault)
    if not key:
        return _none(key, ErrorCode.INVALID_REQUEST, f"a {NOUNS[kind]} has at least one character")
    if kind == SHARE and not is_coordinator_key(key):
        return _none(key, ErrorCode.INVALID_REQUEST, "a share partition is written as group:topic id:partition")
    image = request.services.view.image
    states = image.topics[topic].partitions
    broker = image.brokers.get(states[partition_of(key, len(states))].leader)
    if broker is None or request.connection.listener not in broker.listeners:
        reason = f"the partition of this {NOUNS[kind]} has no leader now"
        return _none(key, ErrorCode.COORDINATOR_NOT_AVAILABLE, reason)
    end = broker.listeners[request.connection.listener]
    return Message(
        key=key, node_id=broker.id, host=end.host, port=end.port, error_code=ErrorCode.NONE, error_message=None
    )


def _none(key: str, code: int, reason: str) -> Message:
    return Message(key=key, node_id=-1, host="", port=-1, error_code=code, error_message=reason)
