"""SyncGroup, versions 0 to 5. 3: static members; 4: flexible; 5: protocol type and name.

The answer waits for the leader's assignment, and that for its record in the log.
"""

from __future__ import annotations

from headrace.groups.messages import SyncReply, SyncRequest
from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> None:
    body = request.body
    request.services.groups.sync(
        body.group_id,
        SyncRequest(
            member_id=body.member_id,
            generation_id=body.generation_id,
            group_instance_id=body.group_instance_id,
            protocol_type=body.protocol_type,
            protocol_name=body.protocol_name,
            assignments=tuple((given.member_id, bytes(given.assignment)) for given in body.assignments),
        ),
        lambda reply: request.reply(_response(reply)),
    )


def _response(reply: SyncReply) -> Message:
    return Message(
        throttle_time_ms=0,
        error_code=reply.error_code,
        protocol_type=reply.protocol_type,
        protocol_name=reply.protocol_name,
        assignment=reply.assignment,
    )
