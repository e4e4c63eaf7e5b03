"""AddOffsetsToTxn, versions 0 to 4. 2: PRODUCER_FENCED; 3: flexible; 4: as 3.

The offsets of a group that a producer is about to commit in its transaction lie in one partition of __consumer_offsets:
that partition is added to the transaction. The topic is created when it is first asked for.
"""

from __future__ import annotations

from typing import Final

from headrace.cluster.names import OFFSETS_TOPIC, group_name_fault
from headrace.coordinators.state_log import partition_of
from headrace.errors import ErrorCode, HeadraceError
from headrace.kafka.connection import Request
from headrace.transactions.messages import AddRequest
from headrace.wire.message import Message

FENCED_FROM: Final = 2


def handle(request: Request) -> Message | None:
    if group_name_fault(request.body.group_id) is not None:
        return _response(request, ErrorCode.INVALID_GROUP_ID)
    if OFFSETS_TOPIC not in request.services.view.image.topics:
        request.services.spawn(_create_then_add(request))
    else:
        _add(request)
    return None


async def _create_then_add(request: Request) -> None:
    try:
        await request.services.auto_topic_creation.ensure(OFFSETS_TOPIC)
    except HeadraceError:
        request.reply(_response(request, ErrorCode.COORDINATOR_NOT_AVAILABLE))
    else:
        _add(request)


def _add(request: Request) -> None:
    body, services = request.body, request.services
    count = len(services.view.image.topics[OFFSETS_TOPIC].partitions)
    places = frozenset({(OFFSETS_TOPIC, partition_of(body.group_id, count))})
    services.transactions.add(
        body.transactional_id,
        AddRequest(body.producer_id, body.producer_epoch, places),
        lambda code: request.reply(_response(request, code)),
    )


def _response(request: Request, code: int) -> Message:
    if code == ErrorCode.PRODUCER_FENCED and request.version < FENCED_FROM:
        code = ErrorCode.INVALID_PRODUCER_EPOCH
    return Message(throttle_time_ms=0, error_code=code)
