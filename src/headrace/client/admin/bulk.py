"""Reading a span of a partition from its first to its last record, as fast as the socket allows.

Record sets are handed out as they came, slices of the answer. While one is being looked at, the next is on its way, on
a connection of its own: the cluster stays free for other questions. What the log no longer has is told, never skipped.
A broker that goes away in the middle is waited for, and the reading goes on where it was. A topic that was deleted and
created again begins anew at offset 0: a span that has the topic's id is never read from another of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from headrace.client.admin.cluster import Cluster, Pending
from headrace.client.admin.fetch import ANSWER_MARGIN_MS, Fetched, Position, fetch, read_answer, request_for
from headrace.client.admin.offsets import list_offsets
from headrace.client.fetch_requests import EARLIEST, LATEST, FetchLimits, extent, larger
from headrace.errors import ErrorCode, ErrorMapping, HeadraceError, OffsetOutOfRange

SET_BYTES: Final = 8 << 20
LEAST_SET_BYTES: Final = 64 << 10
UNSEEN_OFFSET_BYTES: Final = 512
"""For the first set, of which spans of some ten thousand offsets and more take as much as they may."""
EMPTY_ANSWERS_MAX: Final = 2
BEHIND_ANSWERS_MAX: Final = 100
MAX_WAIT_MS: Final = 100
"""What a span is made of is there already; only a span beyond the end waits."""


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets of one partition from `first_offset` up to but not `next_offset`."""

    topic: str
    partition: int
    first_offset: int
    next_offset: int
    topic_id: bytes = b""
    """Empty if any topic of the name will do."""

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class TopicReplaced(HeadraceError):
    """A topic has the name of the one that was to be read, and is another."""

    mapping = ErrorMapping(ErrorCode.UNKNOWN_TOPIC_ID, 404, False)

    def __init__(self, span: Span, topic_id: bytes) -> None:
        super().__init__(
            f"{span}: offsets {span.first_offset} to {span.next_offset - 1} are gone: topic {span.topic!r} was deleted "
            f"and created again (id {span.topic_id.hex()}, now {topic_id.hex()}); read it anew for what it has now"
        )


def check_topic(cluster: Cluster, span: Span) -> None:
    """TopicReplaced unless the topic that the cluster was last asked for, and now if need be, is that of the span."""
    if not span.topic_id or cluster.topic(span.topic).topic_id == span.topic_id:
        return
    cluster.forget()
    now = cluster.topic(span.topic).topic_id
    if now != span.topic_id:
        raise TopicReplaced(span, now)


def record_sets(cluster: Cluster, span: Span, set_bytes: int = SET_BYTES) -> Iterator[memoryview]:
    """Whole batches that together hold every record of the span that the log has; the ends may reach beyond it.

    Offsets that compaction has removed are passed over. OffsetOutOfRange if the log begins after the span does, or
    ends before it, TopicReplaced if it is another topic's, CorruptBatch where a batch cannot be told from the next.
    """
    at, empty_answers, seen_bytes, most_bytes = span.first_offset, 0, 0, set_bytes
    size = _size(span, 0, 0, most_bytes)
    reader = _Reader(cluster, span)
    try:
        check_topic(cluster, span)
        while at < span.next_offset:
            fetched = reader.fetch(at, size)
            end, _, cut_bytes, _ = extent(fetched.records, at, str(span))
            if end > at:
                seen_bytes += len(fetched.records)
                if end < span.next_offset:
                    size = _size(span, end - span.first_offset, seen_bytes, most_bytes)
                    reader.ask(end, size)
                yield fetched.records
                at, empty_answers = end, 0
            elif cut_bytes:
                size = larger(size, cut_bytes, f"{span} at offset {at}")
                most_bytes = max(size, most_bytes)
            else:
                empty_answers += 1
                if _is_gap(cluster, fetched, span, empty_answers):
                    return
    finally:
        reader.close()


def _is_gap(cluster: Cluster, fetched: Fetched, span: Span, answers: int) -> bool:
    """Whether so many empty answers, of which this is the last, mean that the rest of the span holds no record.

    Only an answer that itself reaches beyond the span can tell. One that does not may come from a leader that does not
    yet know how far the log is acknowledged.
    """
    if fetched.high_watermark >= span.next_offset:
        return answers >= EMPTY_ANSWERS_MAX
    if answers >= BEHIND_ANSWERS_MAX or (answers >= EMPTY_ANSWERS_MAX and _end(cluster, span) < span.next_offset):
        raise _beyond(cluster, span)
    return False


class _Reader:
    """Has one record set on its way, and falls back on the cluster's own connection when that comes to nothing."""

    def __init__(self, cluster: Cluster, span: Span) -> None:
        self._cluster = cluster
        self._span = span
        self._lane = f"bulk {id(self)}"
        self._asked: tuple[int, int] | None = None
        self._pending: Pending | None = None

    def ask(self, at: int, size: int) -> None:
        """Send for a record set; if that cannot be done now, `fetch` will."""
        assert self._asked is None
        span = self._span
        try:
            leader = self._cluster.leader(span.topic, span.partition, self._lane)
            position = Position(span.topic, span.partition, at)
            self._pending = self._cluster.submit(leader, request_for(self._cluster, [position], _limits(size)))
            self._asked = (at, size)
            self._cluster.flush()
        except HeadraceError:
            self.close()

    def fetch(self, at: int, size: int) -> Fetched:
        position = Position(self._span.topic, self._span.partition, at)
        try:
            fetched = self._receive(position, size) or fetch(self._cluster, [position], _limits(size))[0]
            # It was asked for by the id that the cluster knows still.
            check_topic(self._cluster, self._span)
            return fetched
        except HeadraceError as error:
            if error.kafka_code in (ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.UNKNOWN_TOPIC_ID):
                self._cluster.forget()
                check_topic(self._cluster, self._span)
            if error.kafka_code == ErrorCode.OFFSET_OUT_OF_RANGE:
                raise _gone(self._cluster, self._span, at) from None
            raise

    def close(self) -> None:
        self._asked = self._pending = None
        self._cluster.close_lane(self._lane)

    def _receive(self, position: Position, size: int) -> Fetched | None:
        """What was sent for, or None if it was something else or does not come."""
        asked, pending = self._asked, self._pending
        self._asked = self._pending = None
        if pending is None:
            return None
        if asked != (position.offset, size):
            self.close()
            return None
        try:
            answer = self._cluster.receive([pending], _limits(size).max_wait_ms + ANSWER_MARGIN_MS)[0]
            if isinstance(answer, HeadraceError):
                raise answer
            return read_answer(self._cluster, [position], answer)[0]
        except HeadraceError as error:
            self.close()
            if error.mapping.retriable:
                return None
            raise


def _limits(size: int) -> FetchLimits:
    return FetchLimits(max_wait_ms=MAX_WAIT_MS, max_bytes=size, partition_max_bytes=size)


def _size(span: Span, seen: int, seen_bytes: int, most_bytes: int) -> int:
    """About what is left of the span, going by what was seen of it: little of what follows is to be sent along."""
    left = span.next_offset - span.first_offset - seen
    per_offset = seen_bytes / seen if seen else UNSEEN_OFFSET_BYTES
    return min(most_bytes, max(LEAST_SET_BYTES, int(per_offset * left * 1.25)))


def _gone(cluster: Cluster, span: Span, at: int) -> OffsetOutOfRange:
    start = list_offsets(cluster, span.topic, {span.partition: EARLIEST})[span.partition].offset
    if at < start:
        gone = min(start, span.next_offset)
        return OffsetOutOfRange(f"{span}: offsets {at} to {gone - 1} are gone; the log begins at {start}")
    return _beyond(cluster, span)


def _beyond(cluster: Cluster, span: Span) -> OffsetOutOfRange:
    asked = f"offsets {span.first_offset} to {span.next_offset - 1} were asked for"
    return OffsetOutOfRange(f"{span}: {asked}; the log ends at {_end(cluster, span)}")


def _end(cluster: Cluster, span: Span) -> int:
    return list_offsets(cluster, span.topic, {span.partition: LATEST})[span.partition].offset
