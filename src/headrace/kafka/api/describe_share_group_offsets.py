"""DescribeShareGroupOffsets, versions 0 to 1. 1: the lag.

Where share groups begin in their partitions: what lies below is acknowledged, or given up. -1 where that is not decided
yet. The lag counts the records behind the start that are neither; it is -1 of partitions that another broker leads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from headrace.errors import ErrorCode
from headrace.groups.assignors import Partition
from headrace.groups.share_groups import Summary
from headrace.kafka.connection import Request
from headrace.queues.messages import NO_OFFSET
from headrace.wire.message import Message

NO_TOPIC_ID: Final = bytes(16)
UNKNOWN_LAG: Final = -1


def handle(request: Request) -> None:
    asked = request.body.groups
    results: list[Message | None] = [None] * len(asked)
    left = len(asked)
    if not left:
        request.reply(Message(throttle_time_ms=0, groups=[]))

    def described(number: int, code: int, starts: Mapping[Partition, Summary]) -> None:
        nonlocal left
        results[number] = _group(request, asked[number], code, starts)
        left -= 1
        if not left:
            request.reply(Message(throttle_time_ms=0, groups=results))

    for number, group in enumerate(asked):
        request.services.groups.share.starts(group.group_id, _wanted(request, group), partial(described, number))


def _wanted(request: Request, group: Message) -> list[Partition] | None:
    """The partitions that are asked for, of topics that there are; None for all."""
    if group.topics is None:
        return None
    known = request.services.groups.catalog.topics
    return [
        (known[topic.topic_name].topic_id, index)
        for topic in group.topics
        if topic.topic_name in known
        for index in topic.partitions
    ]


def _group(request: Request, asked: Message, code: int, starts: Mapping[Partition, Summary]) -> Message:
    names = request.services.groups.catalog.names
    topics: dict[tuple[str, bytes], list[Message]] = {}
    for (topic_id, index), found in sorted(starts.items()):
        name = names.get(topic_id, "")
        topics.setdefault((name, topic_id), []).append(_partition(request, name, index, found))
    known = {name for name, _ in topics}
    for topic in asked.topics or ():
        if not code and topic.topic_name not in known:
            topics[topic.topic_name, NO_TOPIC_ID] = [_unknown(index) for index in topic.partitions]
    rows = [Message(topic_name=name, topic_id=topic_id, partitions=rows) for (name, topic_id), rows in topics.items()]
    reason = f"there is no share group {asked.group_id!r}" if code == ErrorCode.GROUP_ID_NOT_FOUND else None
    return Message(group_id=asked.group_id, topics=rows, error_code=code, error_message=reason)


def _partition(request: Request, topic: str, index: int, found: Summary) -> Message:
    code, state = found
    if code or state is None:
        start_offset, leader_epoch, lag = NO_OFFSET, 0, UNKNOWN_LAG
    else:
        start_offset, leader_epoch = state.start_offset, state.leader_epoch
        lag = _lag(request, topic, index, start_offset, state.delivery_complete_count)
    return Message(
        partition_index=index, start_offset=start_offset, leader_epoch=leader_epoch, lag=lag, error_code=code
    )


def _lag(request: Request, topic: str, index: int, start_offset: int, complete: int) -> int:
    partition = request.services.partitions.find(topic, index)
    if partition is None or start_offset == NO_OFFSET or complete < 0:
        return UNKNOWN_LAG
    return max(0, partition.high_watermark - start_offset - complete)


def _unknown(index: int) -> Message:
    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return Message(partition_index=index, start_offset=NO_OFFSET, leader_epoch=0, error_code=code)
