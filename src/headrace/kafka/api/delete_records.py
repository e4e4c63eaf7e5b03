"""DeleteRecords, versions 0 to 2. 2: flexible. Offset -1 means everything that consumers can see.

Only the leader is asked. The answer waits until every replica in sync has the new start safe on its disk, so that what
was reported deleted does not come back, whoever leads next. The request's timeout is for the other replicas, as in
Kafka: after it REQUEST_TIMED_OUT is answered where they do not begin there yet, and the deletion goes on. What waits
for this broker's own disk alone, as all does that has one replica, has `request.timeout.max.ms`.
"""

from __future__ import annotations

import logging

from headrace.errors import ErrorCode, HeadraceError, InvalidRequest, RequestTimedOut
from headrace.kafka import leader_lookup
from headrace.kafka.connection import Request
from headrace.partitions.partition import Partition
from headrace.storage.log import TopicPartition
from headrace.wire.message import Message

logger = logging.getLogger(__name__)

HIGH_WATERMARK = -1


class _Deletion:
    """The answer to one request, and the partitions that do not all begin there yet."""

    def __init__(self, request: Request) -> None:
        self.answered = False
        self._request = request
        self._overdue = False
        self._waiting: dict[_Start, None] = {}
        self._answer = Message(throttle_time_ms=0, topics=[])

    def start(self) -> None:
        """All starts are proposed before any of them is waited for."""
        starts = []
        for topic in self._request.body.topics:
            told = Message(name=topic.name, partitions=[])
            self._answer.topics.append(told)
            for asked in topic.partitions:
                answer = Message(partition_index=asked.partition_index, low_watermark=-1, error_code=ErrorCode.NONE)
                told.partitions.append(answer)
                starts.append((topic.name, asked.offset, _Start(self, answer)))
        self._waiting = {start: None for _, _, start in starts}
        for name, offset, start in starts:
            self._delete(name, offset, start)
        if not starts:
            self._reply()
        elif not self.answered:
            self._expire_in(min(max(0, self._request.body.timeout_ms), self._longest_ms()))

    def _longest_ms(self) -> int:
        longest_ms: int = self._request.services.settings["request.timeout.max.ms"]
        return longest_ms

    def _expire_in(self, timeout_ms: int) -> None:
        partitions = self._request.services.partitions
        partitions.deadlines.add(partitions.clock.now() + timeout_ms / 1000, self)

    def _delete(self, topic: str, asked_offset: int, start: _Start) -> None:
        services = self._request.services
        try:
            known = services.view.image.topics.get(topic)
            if known is not None and known.internal:
                raise InvalidRequest(f"records of {topic} cannot be deleted")
            partition = leader_lookup.led_partition(services, topic, start.answer.partition_index)
            first = max(partition.log.archived_offset(), partition.log.start_offset)
            offset = partition.high_watermark if asked_offset == HIGH_WATERMARK else asked_offset
            start.partition, start.offset = partition, offset
            services.partitions.delete_before(partition, offset, start)
            _say_if_not_archived(partition, offset, first)
        except HeadraceError as error:
            start.end(error)

    def ended(self, start: _Start) -> None:
        self._waiting.pop(start, None)
        if not self._waiting:
            self._reply()

    def expire(self) -> None:
        """The deadline has come: first that of the request, then that of this broker's own disk."""
        error = RequestTimedOut("not every replica in sync begins there yet; it may later")
        for start in list(self._waiting):
            if self._overdue or start.awaits_followers():
                start.end(error)
        if not self.answered:
            self._overdue = True
            self._expire_in(self._longest_ms())

    def _reply(self) -> None:
        if not self.answered:
            self.answered = True
            self._request.reply(self._answer)


class _Start:
    """One partition of a request: see `partitions.partition.ProduceWaiter`."""

    def __init__(self, deletion: _Deletion, answer: Message) -> None:
        self.answered = False
        self.answer = answer
        self.partition: Partition | None = None
        self.offset = HIGH_WATERMARK
        self._deletion = deletion

    def awaits_followers(self) -> bool:
        return self.partition is None or not self.partition.followers_begin_at(self.offset)

    def passed(self) -> None:
        self.end(None)

    def failed(self, topic_partition: TopicPartition, error: HeadraceError) -> None:
        self.end(error)

    def end(self, error: HeadraceError | None) -> None:
        if self.answered:
            return
        self.answered = True
        if error is not None:
            self.answer.error_code = error.kafka_code
        elif self.partition is not None:
            self.answer.low_watermark = self.partition.start_offset
        self._deletion.ended(self)


def _say_if_not_archived(partition: Partition, offset: int, first: int) -> None:
    """Who deletes by hand means it, also where retention would wait; but it should be possible to find out later."""
    if partition.log.settings.retention_archived and offset > first:
        logger.warning(
            "%s: a client deletes offsets %d to %d, which are not archived",
            partition.topic_partition, first, offset - 1,
        )  # fmt: skip


def handle(request: Request) -> None:
    _Deletion(request).start()
