"""DeleteShareGroupOffsets, version 0: a share group without members forgets where it began in topics, and what it has
acknowledged there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.errors import ErrorCode
from headrace.groups.assignors import Partition
from headrace.kafka.connection import Request
from headrace.wire.message import Message

NO_TOPIC_ID: Final = bytes(16)


def handle(request: Request) -> None:
    known = request.services.groups.catalog.topics
    names = [topic.topic_name for topic in request.body.topics]
    ids = {name: known[name].topic_id for name in names if name in known}

    def deleted(code: int, codes: Mapping[Partition, int]) -> None:
        rows = [] if code else [_topic(name, ids.get(name), codes) for name in names]
        request.reply(Message(throttle_time_ms=0, error_code=code, error_message=None, responses=rows))

    request.services.groups.share.delete_starts(request.body.group_id, frozenset(ids.values()), deleted)


def _topic(name: str, topic_id: bytes | None, codes: Mapping[Partition, int]) -> Message:
    reason = None
    found = [code for place, code in codes.items() if place[0] == topic_id]
    if topic_id is None or not found:
        code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        reason = "there is no such topic" if topic_id is None else "there is no offset information to delete"
    else:
        code = next((code for code in found if code), ErrorCode.NONE)
    return Message(topic_name=name, topic_id=topic_id or NO_TOPIC_ID, error_code=code, error_message=reason)
