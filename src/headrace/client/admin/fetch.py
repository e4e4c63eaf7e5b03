"""Reading record sets as they lie in the log: slices of the answer, no object per record.

A record set begins with the batch that holds the offset asked for, so it may begin below it, and its last batch may be
cut; `whole_batches` and `RecordSet` look after both. Many partitions are read in one round, all leaders at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.client.admin.cluster import Cluster, Request
from headrace.client.connection.broker_connection import Link
from headrace.client.errors import check
from headrace.client.fetch_requests import FetchLimits, fetch_refusal, fetch_request
from headrace.errors import ErrorCode, HeadraceError
from headrace.records.batch import BatchHeader, batches
from headrace.wire import api as apis
from headrace.wire.message import Message

ANSWER_MARGIN_MS: Final = 10_000


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

    def whole_batches(self) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Batches that hold records at or after the position, each whole; control batches are among them."""
        for header, batch in batches(self.records):
            if header.next_offset > self.position.offset:
                yield header, batch


def fetch(cluster: Cluster, positions: Sequence[Position], limits: FetchLimits | None = None) -> list[Fetched]:
    """One round over all positions; partitions with nothing new are there with an empty record set.

    OFFSET_OUT_OF_RANGE and other lasting errors are raised as a Refusal that names the partition.
    """
    limits = limits or FetchLimits()
    return cluster.retry(lambda: _fetch_once(cluster, positions, limits))


def _fetch_once(cluster: Cluster, positions: Sequence[Position], limits: FetchLimits) -> list[Fetched]:
    by_leader: dict[Link, list[Position]] = {}
    for position in positions:
        by_leader.setdefault(cluster.leader(position.topic, position.partition), []).append(position)
    asked = [(leader, request_for(cluster, wanted, limits)) for leader, wanted in by_leader.items()]
    fetched: list[Fetched] = []
    for answer in cluster.exchange(asked, limits.max_wait_ms + ANSWER_MARGIN_MS):
        if isinstance(answer, HeadraceError):
            raise answer
        fetched += read_answer(cluster, positions, answer)
    return fetched


def read_answer(cluster: Cluster, positions: Sequence[Position], answer: Message) -> list[Fetched]:
    """What one leader answered about some or all of the positions."""
    check(answer.error_code, "fetch")
    places = {(position.topic, position.partition): position for position in positions}
    fetched = []
    for topic in answer.responses:
        name = topic.topic or cluster.topic_name(topic.topic_id)
        fetched += [_read(places[name, partition.partition_index], partition) for partition in topic.partitions]
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
    return Request(apis.FETCH, fetch_request(wanted, limits))


def _read(position: Position, answer: Message) -> Fetched:
    if answer.error_code != ErrorCode.NONE:
        where = f"fetch of {position.topic}-{position.partition} at offset {position.offset}"
        raise fetch_refusal(answer.error_code, where)
    records = answer.records if answer.records is not None else memoryview(b"")
    return Fetched(position, records, answer.high_watermark, answer.log_start_offset)


@dataclass(frozen=True, slots=True)
class RecordSet:
    """Up to `count` records of one partition from `first_offset` on, as the batches that hold them.

    The first batch may begin before `first_offset` and the last one end after `next_offset`: whoever unpacks them
    takes the offsets between the two.
    """

    first_offset: int
    next_offset: int
    high_watermark: int
    batches: tuple[tuple[BatchHeader, memoryview], ...]


def read(
    cluster: Cluster, topic: str, partition: int, offset: int, count: int, limits: FetchLimits | None = None
) -> RecordSet:
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
        stop = min(stop, high_watermark)
        before = at
        for header, batch in fetched.whole_batches():
            if header.base_offset >= stop:
                at = stop
                break
            at = header.next_offset
            if not header.is_control:
                found.append((header, batch))
        if at == before:
            break
    return RecordSet(offset, max(offset, min(at, stop)), high_watermark, tuple(found))
