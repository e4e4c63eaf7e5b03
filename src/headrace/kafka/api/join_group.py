"""JoinGroup, versions 0 to 9. 1: rebalance time; 4: member id first; 5: static; 6: flexible; 9: assignment skipped.

The answer waits until all members have joined.
"""

from __future__ import annotations

from typing import Final

from headrace.groups.messages import JoinReply, JoinRequest
from headrace.kafka.connection import Request
from headrace.wire.message import Message

REBALANCE_TIMEOUT_FROM: Final = 1
MEMBER_ID_FIRST_FROM: Final = 4
PROTOCOL_NAME_NULLABLE_FROM: Final = 7
SKIP_ASSIGNMENT_FROM: Final = 9


def handle(request: Request) -> None:
    body, version = request.body, request.version
    request.services.groups.join(
        body.group_id,
        JoinRequest(
            member_id=body.member_id,
            group_instance_id=body.group_instance_id,
            client_id=request.client_id or "",
            client_host=f"/{request.connection.peer.host}",
            session_timeout_ms=body.session_timeout_ms,
            rebalance_timeout_ms=body.rebalance_timeout_ms
            if version >= REBALANCE_TIMEOUT_FROM
            else body.session_timeout_ms,
            protocol_type=body.protocol_type,
            protocols=tuple((protocol.name, bytes(protocol.metadata)) for protocol in body.protocols),
            require_known_member_id=version >= MEMBER_ID_FIRST_FROM,
            supports_skipping_assignment=version >= SKIP_ASSIGNMENT_FROM,
        ),
        lambda reply: request.reply(_response(reply, version)),
    )


def _response(reply: JoinReply, version: int) -> Message:
    name = reply.protocol_name
    return Message(
        throttle_time_ms=0,
        error_code=reply.error_code,
        generation_id=reply.generation_id,
        protocol_type=reply.protocol_type,
        protocol_name=name if name is not None or version >= PROTOCOL_NAME_NULLABLE_FROM else "",
        leader=reply.leader,
        skip_assignment=reply.skip_assignment,
        member_id=reply.member_id,
        members=[
            Message(member_id=member.member_id, group_instance_id=member.group_instance_id, metadata=member.metadata)
            for member in reply.members
        ],
    )
