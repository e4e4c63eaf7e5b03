"""Records of a topic by key, by partition and offset, or by time, found in the brokers.

By key the brokers look into their key indexes (KeyQuery, over the Kafka port: it needs no second address, and goes the
way of all other requests: TLS, leaders, retries). Where there is no index, and by time, partitions are read from the
first record that is not older: times need not rise with offsets, so they are read to their ends. A record by its id is
fetched.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from headrace.client.admin.cluster import Cluster, Request
from headrace.client.admin.fetch import Span, list_offsets, offsets_at, read_batches, span_records
from headrace.client.connection.broker_connection import BrokerConnection
from headrace.client.connection.metadata import NO_LEADER, Topic
from headrace.client.errors import Refusal, check
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.errors import ErrorCode
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.records.isolation import Isolation
from headrace.records.record import Record
from headrace.wire import api as apis
from headrace.wire.message import Message

PAGE_RECORDS: Final = 10_000
PAGE_BYTES: Final = 8 << 20
QUERY_TIMEOUT_MS: Final = 60_000
MOST: Final = 1 << 62

Row = tuple[int, Record]
"""Partition and record."""
Scanned = Callable[[int, int], None]
"""Is told how many offsets were passed since the last time, and how many there are in all."""

_NO_INDEX: Final = frozenset({ErrorCode.INVALID_CONFIG, ErrorCode.UNSUPPORTED_VERSION})
"""The topic has none; the broker is not Headrace."""


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """What is looked for: all that is given has to hold. `to_ms` itself is outside."""

    topic: str
    key: bytes | None = None
    ids: tuple[tuple[int, int], ...] = ()
    """Partition and offset of single records; empty for all."""
    from_ms: int | None = None
    to_ms: int | None = None

    def matches(self, record: Record) -> bool:
        return (
            (self.key is None or record.key == self.key)
            and (self.from_ms is None or record.timestamp_ms >= self.from_ms)
            and (self.to_ms is None or record.timestamp_ms < self.to_ms)
        )


@dataclass(frozen=True, slots=True)
class IndexPosition:
    """How far a partition's key index has come, and how far consumers can see."""

    partition: int
    high_watermark: int
    indexed_offset: int

    @property
    def behind(self) -> int:
        return max(0, self.high_watermark - self.indexed_offset)


def find(
    cluster: Cluster,
    wanted: RecordQuery,
    *,
    newest_first: bool = True,
    limit: int | None = None,
    scanned: Scanned | None = None,
) -> Iterator[Row]:
    """By time, newest first, or by partition and offset. With a limit on a search by key, the newest are those with
    the greatest offsets of their partitions.

    A topic without a key index is read through if `scanned` is there to be told; else a search by key is refused.
    """
    if wanted.ids:
        found: Iterable[Row] = _by_id(cluster, wanted)
    elif wanted.key is not None and scanned is not None:
        found = _by_key_or_scan(cluster, wanted, newest_first, limit, scanned)
    elif wanted.key is not None:
        found = _by_key(cluster, wanted, newest_first, limit)
    else:
        found = _scan(cluster, wanted, scanned)
    if not newest_first:
        rows: Iterable[Row] = sorted(found, key=_by_offset) if wanted.ids else found
    elif limit is None:
        rows = sorted(found, key=_newest_first)
    else:
        rows = heapq.nsmallest(limit, found, key=_newest_first)
    for nth, row in enumerate(rows, 1):
        yield row
        if nth == limit:
            return


def index_positions(cluster: Cluster, topic: Topic) -> list[IndexPosition]:
    """Of every partition that has a leader; a Refusal if the topic has no key index."""
    asked = {partition.index: (0, MOST) for partition in topic.partitions if partition.leader_id != NO_LEADER}
    answers = _ask(cluster, RecordQuery(topic.name, b""), asked, True, 0)
    return [IndexPosition(n, found.high_watermark, found.indexed_offset) for n, found in sorted(answers.items())]


def _newest_first(row: Row) -> tuple[int, int, int]:
    return -row[1].timestamp_ms, row[0], -row[1].offset


def _by_offset(row: Row) -> tuple[int, int]:
    return row[0], row[1].offset


def _by_id(cluster: Cluster, wanted: RecordQuery) -> Iterator[Row]:
    for partition, offset in dict.fromkeys(wanted.ids):
        cluster.partition(wanted.topic, partition)
        try:
            found = read_batches(cluster, wanted.topic, partition, offset, 1)
        except Refusal as refusal:
            if refusal.kafka_code == ErrorCode.OFFSET_OUT_OF_RANGE:
                continue
            raise
        for _, batch in found.batches:
            for record in kernel.records(batch):
                if record.offset == offset and wanted.matches(record):
                    yield partition, record


def _scan(cluster: Cluster, wanted: RecordQuery, scanned: Scanned | None) -> Iterator[Row]:
    topic = cluster.topic(wanted.topic)
    numbers = [partition.index for partition in topic.partitions]
    starts = offsets_at(cluster, topic.name, numbers, EARLIEST if wanted.from_ms is None else wanted.from_ms)
    ends = list_offsets(cluster, topic.name, dict.fromkeys(numbers, LATEST))
    total = sum(max(0, ends[n].offset - starts[n]) for n in numbers)
    for n in numbers:
        for records, passed in span_records(cluster, Span(topic.name, n, starts[n], ends[n].offset, topic.topic_id)):
            yield from ((n, record) for record in records if wanted.matches(record))
            if scanned is not None:
                scanned(passed, total)


def _by_key_or_scan(
    cluster: Cluster, wanted: RecordQuery, newest_first: bool, limit: int | None, scanned: Scanned
) -> Iterator[Row]:
    some = False
    try:
        for row in _by_key(cluster, wanted, newest_first, limit):
            some = True
            yield row
    except Refusal as refusal:
        # An index that goes away between two pages is told: what was found by it would come twice.
        if some or refusal.kafka_code not in _NO_INDEX:
            raise
    else:
        return
    yield from _scan(cluster, wanted, scanned)


def _by_key(cluster: Cluster, wanted: RecordQuery, newest_first: bool, limit: int | None) -> Iterator[Row]:
    """Page by page, all partitions at once or, in the order of offsets, one behind the other."""
    numbers = [partition.index for partition in cluster.topic(wanted.topic).partitions]
    if newest_first:
        yield from _pages(cluster, wanted, numbers, True, limit)
    else:
        for number in numbers:
            yield from _pages(cluster, wanted, [number], False, limit)


def _pages(
    cluster: Cluster, wanted: RecordQuery, numbers: list[int], newest_first: bool, limit: int | None
) -> Iterator[Row]:
    left = dict.fromkeys(numbers, MOST if limit is None else limit)
    asked = dict.fromkeys(numbers, (0, MOST))
    while asked:
        page = min(PAGE_RECORDS, max(left[number] for number in asked))
        for number, found in _ask(cluster, wanted, asked, newest_first, page).items():
            records = [record for _, batch in batches(found.records) for record in kernel.records(batch)]
            records.sort(reverse=newest_first)
            yield from ((number, record) for record in records[: left[number]])
            left[number] -= len(records)
            first, end = asked.pop(number)
            if not found.done and left[number] > 0:
                asked[number] = (first, found.searched) if newest_first else (found.searched, end)


def _ask(
    cluster: Cluster, wanted: RecordQuery, asked: dict[int, tuple[int, int]], newest_first: bool, page: int
) -> dict[int, Message]:
    """One request to each leader; partition to answer."""

    def ask() -> dict[int, Message]:
        by_leader: dict[BrokerConnection, list[Message]] = {}
        for number, (first, end) in asked.items():
            part = Message(partition_index=number, first_offset=first, next_offset=end)
            by_leader.setdefault(cluster.leader(wanted.topic, number), []).append(part)
        requests = [
            (leader, Request(apis.KEY_QUERY, _request(cluster.isolation, wanted, parts, newest_first, page)))
            for leader, parts in by_leader.items()
        ]
        found: dict[int, Message] = {}
        for answer in cluster.call_all(requests, QUERY_TIMEOUT_MS):
            for partition in answer.partitions:
                about = f"query of {wanted.topic}-{partition.partition_index}"
                check(partition.error_code, about, partition.error_message)
                found[partition.partition_index] = partition
        return found

    return cluster.retry(ask)


def _request(
    isolation: Isolation, wanted: RecordQuery, partitions: list[Message], newest_first: bool, page: int
) -> Message:
    return Message(
        topic=wanted.topic,
        key=wanted.key,
        from_ms=-MOST if wanted.from_ms is None else wanted.from_ms,
        to_ms=MOST if wanted.to_ms is None else wanted.to_ms,
        newest_first=newest_first,
        max_records=page,
        max_bytes=PAGE_BYTES,
        partitions=partitions,
        isolation_level=isolation,
    )
