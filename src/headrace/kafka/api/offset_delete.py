"""OffsetDelete, version 0: forgets a group's offsets of topics that it does not read any more."""

from __future__ import annotations

from headrace.groups.messages import OffsetDeleteReply
from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> None:
    body = request.body
    asked = [(topic.name, part.partition_index) for topic in body.topics for part in topic.partitions]
    request.services.groups.delete_offsets(body.group_id, asked, lambda reply: request.reply(_response(reply)))


def _response(reply: OffsetDeleteReply) -> Message:
    topics: dict[str, list[Message]] = {}
    for result in reply.partitions:
        row = Message(partition_index=result.partition_index, error_code=result.error_code)
        topics.setdefault(result.topic, []).append(row)
    return Message(
        throttle_time_ms=0,
        error_code=reply.error_code,
        topics=[Message(name=name, partitions=rows) for name, rows in topics.items()],
    )
