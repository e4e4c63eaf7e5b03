"""Reading logs as they lie: where partitions begin and end, and their record sets as slices of answers, no object per
record.

What is read and where a log ends goes by the isolation of the `Cluster`: with `committed` nothing from the last stable
offset on, and batches of aborted transactions are `hidden`, which decoders pass over.

A record set begins with the batch that holds the offset asked for, so it may begin below it, and its last batch may be
cut; `whole_batches` and `BatchRange` look after both. Many partitions are read in one round, all leaders at once.

A `Span` of one partition is read from its first to its last record, as fast as the socket allows: while one record set
is being looked at, the next is on its way, on a connection of its own, so that the cluster stays free for other
questions. What the log no longer has is told, never skipped. A broker that goes away in the middle is waited for, and
the reading goes on where it was. A topic that was deleted and created again begins anew at offset 0: a span that has
the topic's id is never read from another of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Literal

from headrace.client.admin.cluster import Cluster, Pending, Request, Retry
from headrace.client.connection.broker_connection import BrokerConnection
from headrace.client.connection.tls import Tls
from headrace.client.errors import check
from headrace.client.fetch_requests import (
    EARLIEST,
    LATEST,
    MOMENTS,
    FetchLimits,
    extent,
    fetch_refusal,
    fetch_request,
    larger,
    offsets_request,
)
from headrace.errors import ErrorCode, ErrorMapping, HeadraceError, InvalidRequest, OffsetOutOfRange
from headrace.records import kernel
from headrace.records.batch import BatchHeader, batches
from headrace.records.consumer_records import ReceivedRecord, receive
from headrace.records.isolation import Aborted, Isolation, aborted_of, hidden_batches, isolation_of
from headrace.records.record import Record
from headrace.wire import api as apis
from headrace.wire.message import Message

ANSWER_MARGIN_MS: Final = 10_000
SET_BYTES: Final = 8 << 20
LEAST_SET_BYTES: Final = 64 << 10
UNSEEN_OFFSET_BYTES: Final = 512
"""For the first set, of which spans of some ten thousand offsets and more take as much as they may."""
EMPTY_ANSWERS_MAX: Final = 2
BEHIND_ANSWERS_MAX: Final = 100
MAX_WAIT_MS: Final = 100
"""What a span is made of is there already; only a span beyond the end waits."""


Moment = Literal["earliest", "latest"] | datetime
"""The beginning of a log, its end, or a point in time; one without a zone is local."""


def moment_of(at: Moment) -> int:
    """As ListOffsets has it."""
    if isinstance(at, datetime):
        return round(at.timestamp() * 1000)
    if at not in MOMENTS:
        raise InvalidRequest(f"{at!r} is no moment: give 'earliest', 'latest' or a datetime")
    return MOMENTS[at]


@dataclass(frozen=True, slots=True)
class TimedOffset:
    """`offset` is -1 when no record is as late as the time asked for."""

    offset: int
    timestamp_ms: int


def list_offsets(
    cluster: Cluster,
    topic: str,
    times: Mapping[int, int],
    *,
    timeout_ms: int = 30_000,
    isolation: Isolation | None = None,
) -> dict[int, TimedOffset]:
    """Partition to offset, for EARLIEST, LATEST, MAX_TIMESTAMP or the first record not before a time in ms; in another
    isolation than that of the cluster, if one is given."""
    moments = {(topic, partition): time_ms for partition, time_ms in times.items()}
    places = list_places(cluster, moments, timeout_ms=timeout_ms, isolation=isolation)
    return {n: found for (_, n), found in places.items()}


def list_places(
    cluster: Cluster,
    moments: Mapping[tuple[str, int], int],
    *,
    timeout_ms: int = 30_000,
    isolation: Isolation | None = None,
) -> dict[tuple[str, int], TimedOffset]:
    """As `list_offsets`, of partitions of many topics at once: one request to each leader."""
    chosen = cluster.isolation if isolation is None else isolation

    def ask() -> dict[tuple[str, int], TimedOffset]:
        by_leader: dict[BrokerConnection, dict[tuple[str, int], int]] = {}
        for (topic, partition), time_ms in moments.items():
            by_leader.setdefault(cluster.leader(topic, partition), {})[topic, partition] = time_ms
        asked = [
            (leader, Request(apis.LIST_OFFSETS, offsets_request(led, timeout_ms, chosen)))
            for leader, led in by_leader.items()
        ]
        found: dict[tuple[str, int], TimedOffset] = {}
        for answer in cluster.call_all(asked):
            for named in answer.topics:
                for partition in named.partitions:
                    check(partition.error_code, f"offsets of {named.name}-{partition.partition_index}")
                    place = (named.name, partition.partition_index)
                    found[place] = TimedOffset(partition.offset, partition.timestamp)
        return found

    return cluster.retry(ask)


def offsets_at(cluster: Cluster, topic: str, partitions: Iterable[int], time_ms: int) -> dict[int, int]:
    """Partition to offset for one time, or EARLIEST or LATEST; a partition with nothing so late answers its end."""
    wanted = list(partitions)
    found = {n: timed.offset for n, timed in list_offsets(cluster, topic, dict.fromkeys(wanted, time_ms)).items()}
    missing = [n for n in wanted if found[n] < 0]
    if missing:
        ends = list_offsets(cluster, topic, dict.fromkeys(missing, LATEST))
        found.update((n, ends[n].offset) for n in missing)
    return found


@dataclass(frozen=True, slots=True)
class Position:
    """The next record wanted of one partition."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """A piece of one partition's log, and how far the log reaches."""

    position: Position
    records: memoryview
    high_watermark: int
    log_start_offset: int
    last_stable_offset: int = -1
    """-1 where all records were asked for."""
    aborted: tuple[Aborted, ...] = ()
    """Transactions that were aborted; told where committed records alone were asked for."""

    @property
    def hidden(self) -> frozenset[int]:
        """Base offsets of the batches that a reader of committed records passes over."""
        return hidden_batches(self.records, self.aborted)

    @property
    def end_offset(self) -> int:
        """How far the log can be read in the isolation that was asked for."""
        return self.high_watermark if self.last_stable_offset < 0 else self.last_stable_offset

    def whole_batches(self) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Batches that hold records at or after the position, each whole; control batches are among them."""
        for header, batch in batches(self.records):
            if header.next_offset > self.position.offset:
                yield header, batch

    def shown_batches(self) -> Iterator[tuple[BatchHeader, memoryview | None]]:
        """As `whole_batches`; None in the place of those whose records no reader is given: of control records, and of
        aborted transactions."""
        hidden = self.hidden
        for header, batch in self.whole_batches():
            yield header, None if header.is_control or header.base_offset in hidden else batch


def fetch(cluster: Cluster, positions: Sequence[Position], limits: FetchLimits | None = None) -> list[Fetched]:
    """One round over all positions; partitions with nothing new are there with an empty record set.

    OFFSET_OUT_OF_RANGE and other lasting errors are raised as a Refusal that names the partition.
    """
    limits = limits or FetchLimits()
    return cluster.retry(lambda: fetch_once(cluster, positions, limits))


def fetch_once(cluster: Cluster, positions: Sequence[Position], limits: FetchLimits) -> list[Fetched]:
    """As `fetch`; errors that may pass are raised too."""
    by_leader: dict[BrokerConnection, list[Position]] = {}
    for position in positions:
        by_leader.setdefault(cluster.leader(position.topic, position.partition), []).append(position)
    asked = [(leader, request_for(cluster, wanted, limits)) for leader, wanted in by_leader.items()]
    fetched: list[Fetched] = []
    for answer in cluster.call_all(asked, limits.max_wait_ms + ANSWER_MARGIN_MS):
        fetched += read_answer(cluster, positions, answer)
    return fetched


def read_answer(cluster: Cluster, positions: Sequence[Position], answer: Message) -> list[Fetched]:
    """What one leader answered about some or all of the positions."""
    check(answer.error_code, "fetch")
    places = {(position.topic, position.partition): position for position in positions}
    fetched = []
    for topic in answer.responses:
        name = topic.topic or cluster.topic_name(topic.topic_id)
        fetched += [
            _read(places[name, partition.partition_index], partition, cluster.isolation)
            for partition in topic.partitions
        ]
    return fetched


def request_for(cluster: Cluster, positions: Iterable[Position], limits: FetchLimits) -> Request:
    wanted = (
        (
            position.topic,
            cluster.topic(position.topic).topic_id,
            Message(
                partition=position.partition,
                fetch_offset=position.offset,
                partition_max_bytes=limits.partition_max_bytes,
            ),
        )
        for position in positions
    )
    return Request(apis.FETCH, fetch_request(wanted, replace(limits, isolation=cluster.isolation)))


def _read(position: Position, answer: Message, isolation: Isolation) -> Fetched:
    if answer.error_code != ErrorCode.NONE:
        where = f"fetch of {position.topic}-{position.partition} at offset {position.offset}"
        raise fetch_refusal(answer.error_code, where)
    records = answer.records if answer.records is not None else memoryview(b"")
    return Fetched(
        position,
        records,
        answer.high_watermark,
        answer.log_start_offset,
        answer.last_stable_offset if isolation is Isolation.COMMITTED else -1,
        aborted_of(answer),
    )


@dataclass(frozen=True, slots=True)
class BatchRange:
    """Up to `count` records of one partition from `first_offset` on, as the batches that hold them.

    The first batch may begin before `first_offset` and the last one end after `next_offset`: whoever unpacks them
    takes the offsets between the two.
    """

    first_offset: int
    next_offset: int
    high_watermark: int
    batches: tuple[tuple[BatchHeader, memoryview], ...]
    """Without those of control records and of aborted transactions."""


def read_batches(
    cluster: Cluster, topic: str, partition: int, offset: int, count: int, limits: FetchLimits | None = None
) -> BatchRange:
    """The records of a partition with offsets from `offset` to `offset + count`, or to the end of the log.

    Offsets that compaction has removed count as read.
    """
    limits = limits or FetchLimits(max_wait_ms=0, min_bytes=0)
    found: list[tuple[BatchHeader, memoryview]] = []
    stop = offset + count
    at, high_watermark = offset, -1
    while at < stop:
        (fetched,) = fetch(cluster, [Position(topic, partition, at)], limits)
        high_watermark = fetched.high_watermark
        stop = min(stop, fetched.end_offset)
        before = at
        for header, batch in fetched.shown_batches():
            if header.base_offset >= stop:
                at = stop
                break
            at = header.next_offset
            if batch is not None:
                found.append((header, batch))
        if at == before:
            break
    return BatchRange(offset, max(offset, min(at, stop)), high_watermark, tuple(found))


def read(
    bootstrap: str | Iterable[str],
    topic: str,
    partition: int,
    offset: int,
    count: int,
    *,
    isolation: str = "committed",
    timeout_ms: int = 30_000,
    tls: Tls = None,
) -> list[ReceivedRecord]:
    """The records with offsets from `offset` up to but not `offset + count`; fewer where the log ends before.

    Offsets that compaction has removed count as read, and with isolation `committed` those of aborted transactions;
    `uncommitted` gives these too, and those of open ones. An offset outside the log is an error that says so.
    """
    retry, chosen = Retry(within_ms=timeout_ms), isolation_of(isolation)
    with Cluster(bootstrap, timeout_ms=timeout_ms, retry=retry, tls=tls, isolation=chosen) as cluster:
        found = read_batches(cluster, topic, partition, offset, count)
    records: list[ReceivedRecord] = []
    for _, batch in found.batches:
        receive(batch, topic, partition, offset, offset + count, records)
    return records


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


def record_sets(cluster: Cluster, span: Span, set_bytes: int = SET_BYTES) -> Iterator[Fetched]:
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
                yield fetched
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


def span_records(cluster: Cluster, span: Span) -> Iterator[tuple[list[Record], int]]:
    """The records of a span batch by batch, and how many offsets each step went over; no control records."""
    at = span.first_offset
    for fetched in record_sets(cluster, span):
        for header, batch in fetched.shown_batches():
            found = [] if batch is None else kernel.records(batch)
            reached = min(header.next_offset, span.next_offset)
            yield [record for record in found if at <= record.offset < span.next_offset], reached - at
            at = reached


def _is_gap(cluster: Cluster, fetched: Fetched, span: Span, answers: int) -> bool:
    """Whether so many empty answers, of which this is the last, mean that the rest of the span holds no record.

    Only an answer that itself reaches beyond the span can tell. One that does not may come from a leader that does not
    yet know how far the log is acknowledged.
    """
    if fetched.end_offset >= span.next_offset:
        return answers >= EMPTY_ANSWERS_MAX
    if answers >= BEHIND_ANSWERS_MAX or (answers >= EMPTY_ANSWERS_MAX and _end(cluster, span) < span.next_offset):
        raise _beyond(cluster, span)
    return False


class _Reader:
    """Has one record set on its way, and falls back on the cluster's own connection when that comes to nothing."""

    def __init__(self, cluster: Cluster, span: Span) -> None:
        self._cluster = cluster
        self._span = span
        self._channel = f"bulk {id(self)}"
        self._asked: tuple[int, int] | None = None
        self._pending: Pending | None = None

    def ask(self, at: int, size: int) -> None:
        """Send for a record set; if that cannot be done now, `fetch` will."""
        assert self._asked is None
        span = self._span
        try:
            leader = self._cluster.leader(span.topic, span.partition, self._channel)
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
        self._cluster.close_channel(self._channel)

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
    end, here = _end(cluster, span), {span.partition: LATEST}
    if list_offsets(cluster, span.topic, here, isolation=Isolation.UNCOMMITTED)[span.partition].offset > end:
        return OffsetOutOfRange(f"{span}: {asked}; from {end} on, transactions are open")
    return OffsetOutOfRange(f"{span}: {asked}; the log ends at {end}")


def _end(cluster: Cluster, span: Span) -> int:
    return list_offsets(cluster, span.topic, {span.partition: LATEST})[span.partition].offset
