"""DescribeLogDirs, versions 1 to 5. 2: flexible; 3: an error for the whole; 4: size of the disk; 5: cordoned folders.

Of the replicas that this broker holds, led here or not; a follower's lag is what it lacks up to the watermark.
"""

from __future__ import annotations

from collections import defaultdict

from headrace.errors import ErrorCode
from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> Message:
    services = request.services
    asked = request.body.topics
    wanted = None if asked is None else {(topic.topic, index) for topic in asked for index in topic.partitions}
    by_topic: defaultdict[str, list[Message]] = defaultdict(list)
    for partition in services.partitions:
        where = partition.topic_partition
        if wanted is None or (where.topic, where.partition) in wanted:
            by_topic[where.topic].append(
                Message(
                    partition_index=where.partition,
                    partition_size=partition.log.size_bytes,
                    offset_lag=max(0, partition.high_watermark - partition.log.end_offset),
                    is_future_key=False,
                )
            )
    folder = services.data_folder
    if folder is None:
        return Message(throttle_time_ms=0, error_code=ErrorCode.NONE, results=[])
    result = Message(
        error_code=ErrorCode.NONE,
        log_dir=folder,
        topics=[Message(name=name, partitions=partitions) for name, partitions in by_topic.items()],
        usable_bytes=services.disk.free_bytes(folder),
    )
    return Message(throttle_time_ms=0, error_code=ErrorCode.NONE, results=[result])
