"""LeaveGroup, versions 0 to 5. 3: many members, by member id or instance id; 4: flexible; 5: a reason."""

from __future__ import annotations

from typing import Final

from headrace.groups.messages import Leaver, LeaveReply
from headrace.kafka.connection import Request
from headrace.wire.message import Message

MANY_FROM: Final = 3


def handle(request: Request) -> Message:
    body = request.body
    if request.version >= MANY_FROM:
        leavers = tuple(Leaver(member.member_id, member.group_instance_id) for member in body.members)
    else:
        leavers = (Leaver(body.member_id),)
    return _response(request, request.services.groups.leave(body.group_id, leavers))


def _response(request: Request, reply: LeaveReply) -> Message:
    code = reply.error_code
    if request.version < MANY_FROM and not code and reply.members:
        code = reply.members[0].error_code
    return Message(
        throttle_time_ms=0,
        error_code=code,
        members=[
            Message(
                member_id=member.member_id, group_instance_id=member.group_instance_id, error_code=member.error_code
            )
            for member in reply.members
        ],
    )
