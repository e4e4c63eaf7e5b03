"""AlterShareGroupOffsets, version 0: where a share group without members begins from now on. What it has acknowledged
or locked behind that counts no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.errors import ErrorCode
from headrace.groups.assignors import Partition
from headrace.kafka.connection import Request
from headrace.wire.message import Message

NO_TOPIC_ID: Final = bytes(16)


def handle(request: Request) -> None:
    body = request.body
    starts: dict[Partition, int] = {}
    refused: dict[tuple[str, int], tuple[int, str]] = {}
    for topic in body.topics:
        known = request.services.groups.catalog.topics.get(topic.topic_name)
        for one in topic.partitions:
            place = topic.topic_name, one.partition_index
            if known is None or not 0 <= one.partition_index < known.partitions:
                refused[place] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such partition"
            elif one.start_offset < 0:
                refused[place] = ErrorCode.INVALID_REQUEST, "a start is an offset from 0 on"
            else:
                starts[known.topic_id, one.partition_index] = one.start_offset

    def altered(code: int, codes: Mapping[Partition, int]) -> None:
        request.reply(_response(request, code, codes, refused))

    request.services.groups.share.set_starts(body.group_id, starts, altered)


def _response(
    request: Request, code: int, codes: Mapping[Partition, int], refused: Mapping[tuple[str, int], tuple[int, str]]
) -> Message:
    topics = []
    for topic in request.body.topics if not code else ():
        known = request.services.groups.catalog.topics.get(topic.topic_name)
        topic_id = NO_TOPIC_ID if known is None else known.topic_id
        rows = []
        for one in topic.partitions:
            found = codes.get((topic_id, one.partition_index), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), None
            fault, reason = refused.get((topic.topic_name, one.partition_index), found)
            rows.append(Message(partition_index=one.partition_index, error_code=fault, error_message=reason))
        topics.append(Message(topic_name=topic.topic_name, topic_id=topic_id, partitions=rows))
    return Message(throttle_time_ms=0, error_code=code, error_message=None, responses=topics)
