"""ListOffsets, versions 1 to 11. 4: epochs; 6: flexible; 7: greatest timestamp; 8, 9, 11: tiers; 10: timeout.

-1 is the end that consumers see, -2 the start, -3 the record with the greatest timestamp, other numbers the first
record not older than that time. Nothing is tiered: -4 is the start, and -5 and -6 have no answer.
A new leader does not know where the end is before its watermark has reached what its epoch began with: until then it
answers OFFSET_NOT_AVAILABLE, and LEADER_NOT_AVAILABLE before version 5 (KIP-207). The same goes for the start, as long
as not all replicas in sync have told where they begin.
For who reads only what is committed (isolation level 1, from version 2) the end is the last stable offset.
"""

from __future__ import annotations

from headrace.errors import ErrorCode, HeadraceError, OffsetNotAvailable
from headrace.kafka import leader_lookup
from headrace.kafka.connection import Request
from headrace.partitions.partition import Partition
from headrace.storage.log import TimedOffset
from headrace.wire.message import Message

READ_COMMITTED = 1
LATEST = -1
EARLIEST = -2
GREATEST_TIMESTAMP = -3
EARLIEST_LOCAL = -4
NONE = TimedOffset(-1, -1)
NOT_AVAILABLE_FROM = 5


def handle(request: Request) -> Message:
    topics = [
        Message(name=topic.name, partitions=[_partition(request, topic.name, asked) for asked in topic.partitions])
        for topic in request.body.topics
    ]
    return Message(throttle_time_ms=0, topics=topics)


def _partition(request: Request, topic: str, asked: Message) -> Message:
    index: int = asked.partition_index
    code, found, epoch = ErrorCode.NONE, NONE, -1
    try:
        partition = leader_lookup.led_or_stand_in(request.services, topic, index)
        partition.check_epoch(asked.current_leader_epoch)
        is_committed = request.body.isolation_level == READ_COMMITTED
        end = partition.stable_end() if is_committed else partition.high_watermark
        found = _find(partition, asked.timestamp, end)
        if not _end_known(partition) and (asked.timestamp == LATEST or found is NONE):
            raise OffsetNotAvailable(f"{partition.topic_partition}: not all of it is known to be committed")
        epoch = partition.epoch if found.offset >= 0 else -1
    except OffsetNotAvailable:
        found = NONE
        code = (
            ErrorCode.OFFSET_NOT_AVAILABLE if request.version >= NOT_AVAILABLE_FROM else ErrorCode.LEADER_NOT_AVAILABLE
        )
    except HeadraceError as error:
        code = error.kafka_code
    return Message(
        partition_index=index, error_code=code, timestamp=found.timestamp_ms, offset=found.offset, leader_epoch=epoch
    )


def _end_known(partition: Partition) -> bool:
    return partition.core is None or partition.core.high_watermark >= partition.core.epoch_start


def _find(partition: Partition, timestamp_ms: int, end: int) -> TimedOffset:
    if timestamp_ms == LATEST:
        return TimedOffset(end, -1)
    if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
        return TimedOffset(partition.first_offset(), -1)
    if timestamp_ms == GREATEST_TIMESTAMP:
        found = partition.log.greatest_timestamp()
    elif timestamp_ms < 0:
        return NONE
    else:
        found = partition.log.offset_for_time(timestamp_ms)
    return found if found is not None and found.offset < end else NONE
