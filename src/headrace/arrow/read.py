"""Reading topics into Arrow batches: `read` gives all records of a topic, or those between two bounds."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.admin.fetch import Span, list_offsets, offsets_at, record_sets
from headrace.client.connection.tls import Tls
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.errors import OffsetOutOfRange
from headrace.records.arrow import BATCH_ROWS, DEFAULT_COLUMNS, TYPES, Decoder, schema
from headrace.records.isolation import isolation_of

Bound = str | int | Mapping[int, int] | datetime.datetime
"""`"earliest"`, `"latest"`, an offset, offsets by partition, or the first record not before a moment."""


def read(
    topic: str,
    *,
    bootstrap: str = DEFAULT_BOOTSTRAP,
    partitions: Iterable[int] | None = None,
    start: Bound = "earliest",
    end: Bound = "latest",
    columns: Sequence[str] = DEFAULT_COLUMNS,
    batch_rows: int = BATCH_ROWS,
    isolation: str = "committed",
    timeout_ms: int = 30_000,
    tls: Tls = None,
) -> pa.RecordBatchReader:
    """Records from `start` up to but not `end`, partition after partition, as batches of at most `batch_rows` rows.

    Both bounds are found when this is called; records come as the reader is read, of the topic that it was then: one
    that was made anew under its name meanwhile is an error. Offsets by partition choose the
    partitions that they name, unless `partitions` does. `columns` may name any of `headrace.records.arrow.TYPES`, such
    as `headers` or `digest`. With isolation `committed` records of aborted transactions are left out, and the end is at
    the first that is undecided; `uncommitted` gives all. `tls` is a consumer's.
    """
    unknown = [name for name in columns if name not in TYPES]
    if unknown:
        raise ValueError(f"there is no column {', '.join(map(repr, unknown))}; there are {', '.join(TYPES)}")
    retry, chosen = Retry(within_ms=timeout_ms), isolation_of(isolation)
    with Cluster(bootstrap, timeout_ms=timeout_ms, retry=retry, tls=tls, isolation=chosen) as cluster:
        spans = _spans(cluster, topic, _chosen(cluster, topic, partitions, start, end), start, end)

    def rows() -> Iterator[pa.RecordBatch]:
        with Cluster(bootstrap, timeout_ms=timeout_ms, retry=retry, tls=tls, isolation=chosen) as cluster:
            for span in spans:
                yield from read_span(cluster, span, columns, batch_rows)

    return pa.RecordBatchReader.from_batches(schema(columns), rows())


def read_span(
    cluster: Cluster, span: Span, columns: Sequence[str] = DEFAULT_COLUMNS, batch_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    decoder = Decoder(span.topic, span.partition, columns, batch_rows=batch_rows)
    for fetched in record_sets(cluster, span):
        yield from decoder.decode(fetched.records, span.first_offset, span.next_offset, hidden=fetched.hidden)


def _chosen(cluster: Cluster, topic: str, partitions: Iterable[int] | None, start: Bound, end: Bound) -> list[int]:
    if partitions is None:
        named = [bound for bound in (start, end) if isinstance(bound, Mapping)]
        everything = range(len(cluster.topic(topic).partitions))
        chosen = sorted(set(named[0]).union(*named[1:])) if named else list(everything)
    else:
        chosen = list(dict.fromkeys(partitions))
    for partition in chosen:
        cluster.partition(topic, partition)
    return chosen


def _spans(cluster: Cluster, topic: str, partitions: list[int], start: Bound, end: Bound) -> list[Span]:
    if not partitions:
        return []
    topic_id = cluster.topic(topic).topic_id
    starts = _resolve(cluster, topic, partitions, start, "start", "earliest")
    ends = _resolve(cluster, topic, partitions, end, "end", "latest")
    for partition in partitions:
        if starts[partition] > ends[partition] and isinstance(start, int | Mapping):
            raise OffsetOutOfRange(
                f"{topic}-{partition}: start {starts[partition]} is after the end, {ends[partition]}"
            )
    return [Span(topic, n, starts[n], ends[n], topic_id) for n in partitions if starts[n] < ends[n]]


def _resolve(
    cluster: Cluster, topic: str, partitions: list[int], bound: Bound, name: str, otherwise: str
) -> dict[int, int]:
    """The offset of a bound in each partition."""
    if isinstance(bound, datetime.datetime):
        if bound.tzinfo is None:
            raise ValueError(f"{name} {bound} has no time zone; give one, such as datetime.timezone.utc")
        return offsets_at(cluster, topic, partitions, round(bound.timestamp() * 1000))
    if isinstance(bound, Mapping):
        rest = [n for n in partitions if n not in bound]
        found = _resolve(cluster, topic, rest, otherwise, name, otherwise) if rest else {}
        return found | {n: bound[n] for n in partitions if n in bound}
    if isinstance(bound, int):
        return dict.fromkeys(partitions, bound)
    moment = {"earliest": EARLIEST, "latest": LATEST}.get(bound)
    if moment is None:
        raise ValueError(
            f"{name} is {bound!r}; it may be 'earliest', 'latest', an offset, offsets by partition or a time"
        )
    listed = list_offsets(cluster, topic, dict.fromkeys(partitions, moment))
    return {partition: listed[partition].offset for partition in partitions}
