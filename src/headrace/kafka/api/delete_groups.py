"""DeleteGroups, versions 0 to 2. 2: flexible. Only a group without members can be deleted."""

from __future__ import annotations

from functools import partial

from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> None:
    names = request.body.groups_names
    results: list[Message] = []
    if not names:
        request.reply(Message(throttle_time_ms=0, results=results))

    def deleted(group: str, code: int) -> None:
        results.append(Message(group_id=group, error_code=code))
        if len(results) == len(names):
            request.reply(Message(throttle_time_ms=0, results=results))

    for name in names:
        request.services.groups.delete(name, partial(deleted, name))
