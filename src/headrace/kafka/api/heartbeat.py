"""Heartbeat, versions 0 to 4. 3: static members; 4: flexible."""

from __future__ import annotations

from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> Message:
    body = request.body
    code = request.services.groups.heartbeat(body.group_id, body.member_id, body.generation_id, body.group_instance_id)
    return Message(throttle_time_ms=0, error_code=code)
