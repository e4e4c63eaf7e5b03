"""OffsetForLeaderEpoch, versions 2 to 4. 3: replica id; 4: flexible.

Tells where an epoch ended, so that a consumer can see whether what it read still stands (KIP-320). That is a question
about the log, not about the watermark: a new leader holds everything that was ever read, while its own watermark may be
behind for a moment, and a consumer that were told so would go back.
"""

from __future__ import annotations

from headrace.errors import ErrorCode, HeadraceError
from headrace.kafka import leader_lookup
from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> Message:
    topics = [
        Message(topic=topic.topic, partitions=[_partition(request, topic.topic, asked) for asked in topic.partitions])
        for topic in request.body.topics
    ]
    return Message(throttle_time_ms=0, topics=topics)


def _partition(request: Request, topic: str, asked: Message) -> Message:
    code, epoch, end = ErrorCode.NONE, -1, -1
    try:
        partition = leader_lookup.led_or_stand_in(request.services, topic, asked.partition)
        partition.check_epoch(asked.current_leader_epoch)
        if asked.leader_epoch == partition.epoch:
            epoch, end = partition.epoch, partition.log.end_offset
        else:
            found = partition.log.epoch_end(asked.leader_epoch)
            if found is not None:
                epoch, end = found.epoch, found.end_offset
    except HeadraceError as error:
        code = error.kafka_code
    return Message(error_code=code, partition=asked.partition, leader_epoch=epoch, end_offset=end)
