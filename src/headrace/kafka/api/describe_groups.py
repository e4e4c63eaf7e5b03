"""DescribeGroups, versions 0 to 6. 3: authorized operations; 4: static members; 5: flexible; 6: a group that
is not there is an error."""

from __future__ import annotations

from typing import Final

from headrace.errors import ErrorCode
from headrace.groups.messages import DescribedGroup
from headrace.kafka import authorized
from headrace.kafka.connection import Request
from headrace.wire.message import Message

AUTHORIZED_FROM: Final = 3
NOT_FOUND_FROM: Final = 6
DEAD: Final = "Dead"
CLASSIC: Final = "classic"
"""Groups of the consumer protocol are described by ConsumerGroupDescribe, and are not there to be described here."""


def handle(request: Request) -> Message:
    groups = [_group(request, request.services.groups.describe(group)) for group in request.body.groups]
    return Message(throttle_time_ms=0, groups=groups)


def _group(request: Request, group: DescribedGroup) -> Message:
    code, reason = group.error_code, None
    if group.group_type != CLASSIC:
        group = DescribedGroup(ErrorCode.NONE, group.group_id, DEAD)
    if code == ErrorCode.GROUP_ID_NOT_FOUND or (not code and group.group_state == DEAD):
        code = ErrorCode.GROUP_ID_NOT_FOUND if request.version >= NOT_FOUND_FROM else ErrorCode.NONE
        reason = f"there is no group {group.group_id!r}" if code else None
    asked = request.version >= AUTHORIZED_FROM and request.body.include_authorized_operations and not code
    return Message(
        error_code=code,
        error_message=reason,
        group_id=group.group_id,
        group_state=group.group_state or DEAD,
        protocol_type=group.protocol_type,
        protocol_data=group.protocol_data,
        members=[
            Message(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.member_metadata,
                member_assignment=member.member_assignment,
            )
            for member in group.members
        ],
        authorized_operations=authorized.operations(authorized.ON_GROUP, asked),
    )
