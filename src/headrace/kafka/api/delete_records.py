"""DeleteRecords, versions 0 to 2. 2: compact encoding. Offset -1 means everything that consumers can see.

Only the leader deletes; its followers move their start after its own.
The answer waits until the new start offsets are safe on disk: what was reported deleted does not come back.
"""

from __future__ import annotations

import logging

from headrace.errors import Code, HeadraceError, InvalidRequest, OffsetOutOfRange
from headrace.kafka import routing
from headrace.kafka.request import Request
from headrace.partitions.partition import Partition
from headrace.wire.message import Message

logger = logging.getLogger(__name__)

HIGH_WATERMARK = -1


class _Deletion:
    """The answer to one request, and how many of its partitions are not safe yet."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._left = 1  # the loop over the partitions itself
        self._answer = Message(throttle_time_ms=0, topics=[])

    def start(self) -> None:
        for topic in self._request.body.topics:
            told = Message(name=topic.name, partitions=[])
            self._answer.topics.append(told)
            for asked in topic.partitions:
                answer = Message(partition_index=asked.partition_index, low_watermark=-1, error_code=Code.NONE)
                told.partitions.append(answer)
                self._delete(topic.name, asked, answer)
        self._one_less()

    def _delete(self, topic: str, asked: Message, answer: Message) -> None:
        services = self._request.services
        self._left += 1

        def done(error: HeadraceError | None) -> None:
            if error is not None:
                answer.error_code = error.kafka_code
            else:
                answer.low_watermark = partition.log.start_offset
            self._one_less()

        try:
            known = services.view.image.topics.get(topic)
            if known is not None and known.internal:
                raise InvalidRequest(f"records of {topic} cannot be deleted")
            partition = routing.led(services, topic, asked.partition_index)
            offset = partition.high_watermark if asked.offset == HIGH_WATERMARK else asked.offset
            if not 0 <= offset <= partition.high_watermark:
                raise OffsetOutOfRange(f"{partition.topic_partition}: {offset} is above {partition.high_watermark}")
            _say_if_not_archived(partition, offset)
            partition.log.delete_before(offset, done)
        except HeadraceError as error:
            done(error)

    def _one_less(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._request.reply(self._answer)


def _say_if_not_archived(partition: Partition, offset: int) -> None:
    """Who deletes by hand means it, also where retention would wait; but it should be possible to find out later."""
    log, first = partition.log, max(partition.log.archived_offset(), partition.log.start_offset)
    if log.settings.retention_archived and offset > first:
        logger.warning(
            "%s: a client deletes offsets %d to %d, which are not archived",
            partition.topic_partition, first, offset - 1,
        )  # fmt: skip


def handle(request: Request) -> None:
    _Deletion(request).start()
