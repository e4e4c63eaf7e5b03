"""ConsumerGroupHeartbeat, versions 0 to 1. 1: the member makes its id itself; regular expressions.

The whole membership of the consumer protocol (KIP-848): joining, going on, leaving. Answered at once when nothing
changes, else when the change is committed to __consumer_offsets.
"""

from __future__ import annotations

from typing import Final

from headrace.errors import ErrorCode
from headrace.groups.consumer_messages import JOINING, LEAVING_STATIC, UNCHANGED, ConsumerHeartbeat, ConsumerReply
from headrace.kafka.connection import Request
from headrace.wire.message import Message

OWN_ID_FROM: Final = 1


def handle(request: Request) -> None:
    body = request.body
    fault = _fault(request)
    if fault is not None:
        request.reply(response(ConsumerReply(ErrorCode.INVALID_REQUEST, fault)))
        return
    owned = body.topic_partitions
    request.services.groups.consumer_heartbeat(
        body.group_id,
        ConsumerHeartbeat(
            body.member_id,
            body.member_epoch,
            body.instance_id,
            body.rack_id,
            body.rebalance_timeout_ms,
            None if body.subscribed_topic_names is None else tuple(body.subscribed_topic_names),
            body.subscribed_topic_regex if request.version >= OWN_ID_FROM else None,
            body.server_assignor,
            None
            if owned is None
            else {bytes(one.topic_id): frozenset(one.partitions) for one in owned if one.partitions},
            request.client_id or "",
            f"/{request.connection.peer.host}",
        ),
        lambda reply: request.reply(response(reply)),
    )


def _fault(request: Request) -> str | None:
    """What makes no sense, whatever the group says."""
    body = request.body
    if "" in (body.group_id, body.instance_id, body.rack_id):
        return "group, instance and rack must not be empty"
    if not body.member_id and (body.member_epoch != JOINING or request.version >= OWN_ID_FROM):
        return "a member must have an id"
    if body.member_epoch < LEAVING_STATIC:
        return f"{body.member_epoch} is no member epoch"
    if body.member_epoch == LEAVING_STATIC and body.instance_id is None:
        return "only a static member leaves for a while"
    if body.member_epoch != JOINING:
        return None
    if body.rebalance_timeout_ms == UNCHANGED:
        return "who joins must tell its rebalance timeout"
    if body.topic_partitions is None or body.topic_partitions:
        return "who joins must own no partitions, and say so"
    by_pattern = request.version >= OWN_ID_FROM and body.subscribed_topic_regex is not None
    if body.subscribed_topic_names is None and not by_pattern:
        return "who joins must subscribe to topics, or by a regular expression"
    return None


def response(reply: ConsumerReply) -> Message:
    assignment = None
    if reply.assignment is not None:
        topics = [
            Message(topic_id=topic_id, partitions=sorted(indexes)) for topic_id, indexes in reply.assignment.items()
        ]
        assignment = Message(topic_partitions=topics)
    return Message(
        throttle_time_ms=0,
        error_code=reply.error_code,
        error_message=reply.error_message,
        member_id=reply.member_id,
        member_epoch=reply.member_epoch,
        heartbeat_interval_ms=reply.heartbeat_interval_ms,
        assignment=assignment,
    )
