"""ShareAcknowledge, versions 1 to 2. 2: renews locks (KIP-1222), and tells how long they last.

What a member of a share group says of records that it has acquired: accepted, released to others, rejected, or not done
yet. Answered when that is kept. Epoch -1 ends its share session, and what it has not acknowledged goes to others.
"""

from __future__ import annotations

from headrace.errors import ErrorCode, HeadraceError, InvalidShareSessionEpoch
from headrace.kafka.connection import Request
from headrace.kafka.share_acknowledgements import Codes, Whereabouts, acknowledgements_of, by_topic, member_of
from headrace.kafka.share_sessions import FINAL_EPOCH, INITIAL_EPOCH
from headrace.wire.message import Message


def handle(request: Request) -> Message | None:
    services, epoch = request.services, request.body.share_session_epoch
    try:
        key = member_of(request)
        if epoch == INITIAL_EPOCH:
            raise InvalidShareSessionEpoch("a share session begins with a fetch")
        session = services.share_sessions.resume(request.connection, key, epoch)
    except HeadraceError as error:
        services.metrics.error("ShareAcknowledge", error.kafka_code)
        return Message(error_code=error.kafka_code, error_message=str(error), responses=[], node_endpoints=[])
    taken, refused = acknowledgements_of(request)
    services.share_partitions.acknowledge(
        key.group, key.member, taken, lambda codes: request.reply(_answer(request, {**codes, **refused}))
    )
    if epoch == FINAL_EPOCH:
        services.share_sessions.close(session)
    return None


def _answer(request: Request, codes: Codes) -> Message:
    where = Whereabouts(request)
    rows = {}
    for place, heard in codes.items():
        code = where.code(place, heard)
        leader_id, leader_epoch = where.leader(place, code)
        rows[place] = Message(
            partition_index=place[1],
            error_code=code,
            error_message=None,
            current_leader=Message(leader_id=leader_id, leader_epoch=leader_epoch),
        )
    return Message(
        error_code=ErrorCode.NONE,
        acquisition_lock_timeout_ms=request.services.share_group_config(request.body.group_id).lock_ms,
        responses=[Message(topic_id=topic_id, partitions=partitions) for topic_id, partitions in by_topic(rows)],
        node_endpoints=[
            Message(node_id=node, host=host, port=port, rack=rack) for node, host, port, rack in where.endpoints()
        ],
    )
