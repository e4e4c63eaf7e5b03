"""DescribeTopicPartitions, version 0: topics page by page, with a cursor where the next page begins."""

from __future__ import annotations

from typing import Final

from headrace.cluster.image import Topic
from headrace.errors import ErrorCode
from headrace.kafka import authorized
from headrace.kafka.api import metadata
from headrace.kafka.connection import Request
from headrace.wire.message import ZERO_UUID, Message

PAGE_PARTITIONS_MAX: Final = 2000


def handle(request: Request) -> Message:
    known = request.services.view.image.topics
    names = sorted({topic.name for topic in request.body.topics} or known)
    cursor = request.body.cursor
    first, skip = (cursor.topic_name, max(0, cursor.partition_index)) if cursor is not None else ("", 0)
    left = max(1, min(request.body.response_partition_limit, PAGE_PARTITIONS_MAX))
    found: list[Message] = []
    for name in (name for name in names if name >= first):
        topic = known.get(name)
        if topic is None:
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            found.append(Message(error_code=code, name=name, topic_id=ZERO_UUID, partitions=[]))
            continue
        begin = skip if name == first else 0
        if not left:
            return _page(found, Message(topic_name=name, partition_index=begin))
        end = min(begin + left, len(topic.partitions))
        left -= max(0, end - begin)
        found.append(_topic(request, topic, begin, end))
        if end < len(topic.partitions):
            return _page(found, Message(topic_name=name, partition_index=end))
    return _page(found, None)


def _page(topics: list[Message], cursor: Message | None) -> Message:
    return Message(throttle_time_ms=0, topics=topics, next_cursor=cursor)


def _topic(request: Request, topic: Topic, begin: int, end: int) -> Message:
    partitions = [metadata.partition(request, topic, state) for state in topic.partitions[begin:end]]
    for partition in partitions:
        partition.eligible_leader_replicas = partition.last_known_elr = []
    return Message(
        error_code=ErrorCode.NONE,
        name=topic.name,
        topic_id=topic.id,
        is_internal=topic.internal,
        partitions=partitions,
        topic_authorized_operations=authorized.ON_TOPIC,
    )
