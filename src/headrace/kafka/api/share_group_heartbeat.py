"""ShareGroupHeartbeat, version 1.

The whole membership of share groups (KIP-932): joining, going on, leaving. Answered at once when nothing changes, else
when the change is committed to __consumer_offsets, and for who joins, when there are partitions to be told.
"""

from __future__ import annotations

from typing import Final

from headrace.errors import ErrorCode
from headrace.groups.consumer_messages import JOINING, LEAVING, ConsumerReply, ShareHeartbeat
from headrace.kafka.api import consumer_group_heartbeat
from headrace.kafka.connection import Request

MEMBER_BYTES_MAX: Final = 255
"""Of a member's id: it is kept beside everything that the member acquires."""


def handle(request: Request) -> None:
    body = request.body
    fault = _fault(request)
    if fault is not None:
        request.reply(consumer_group_heartbeat.response(ConsumerReply(ErrorCode.INVALID_REQUEST, fault)))
        return
    request.services.groups.share.heartbeat(
        body.group_id,
        ShareHeartbeat(
            body.member_id,
            body.member_epoch,
            rack=body.rack_id,
            topics=None if body.subscribed_topic_names is None else tuple(body.subscribed_topic_names),
            client_id=request.client_id or "",
            client_host=f"/{request.connection.peer.host}",
        ),
        lambda reply: request.reply(consumer_group_heartbeat.response(reply)),
    )


def _fault(request: Request) -> str | None:
    """What makes no sense, whatever the group says."""
    body = request.body
    if "" in (body.group_id, body.member_id, body.rack_id):
        return "group, member and rack must not be empty"
    if len(body.member_id.encode()) > MEMBER_BYTES_MAX:
        return f"the id of a member has at most {MEMBER_BYTES_MAX} bytes"
    if body.member_epoch < LEAVING:
        return f"{body.member_epoch} is no member epoch"
    if body.member_epoch == JOINING and not body.subscribed_topic_names:
        return "who joins must subscribe to topics"
    return None
