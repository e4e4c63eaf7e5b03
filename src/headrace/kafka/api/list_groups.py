"""ListGroups, versions 0 to 5. 3: flexible; 4: filter by state; 5: filter by type."""

from __future__ import annotations

from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> Message:
    body = request.body
    reply = request.services.groups.list_groups(body.states_filter or (), body.types_filter or ())
    groups = [
        Message(
            group_id=group.group_id,
            protocol_type=group.protocol_type,
            group_state=group.group_state,
            group_type=group.group_type,
        )
        for group in reply.groups
    ]
    return Message(throttle_time_ms=0, error_code=reply.error_code, groups=groups)
