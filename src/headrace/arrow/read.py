"""Reading topics into Arrow batches: `read` gives all records of a topic, or those between two bounds."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.admin.fetch import Span, list_offsets, offsets_at, record_sets
from headrace.client.connection.tls import Tls
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.errors import OffsetOutOfRange
from headrace.records.arrow import BATCH_ROWS, DEFAULT_COLUMNS, TYPES, Decoder, schema
from headrace.records.batch import batches
from headrace.records.isolation import Isolation, isolation_of

if TYPE_CHECKING:
    from headrace.arrow.history import History

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
    history: str | Path | None = None,
    timeout_ms: int = 30_000,
    tls: Tls = None,
) -> pa.RecordBatchReader:
    """Records from `start` up to but not `end`, partition after partition, as batches of at most `batch_rows` rows.

    Both bounds are found when this is called; records come as the reader is read, of the topic that it was then: one
    that was made anew under its name meanwhile is an error. Offsets by partition choose the
    partitions that they name, unless `partitions` does. `columns` may name any of `headrace.records.arrow.TYPES`, such
    as `headers` or `digest`. With isolation `committed` records of aborted transactions are left out, and the end is at
    the first that is undecided; `uncommitted` gives all. `history` is the folder of an archive: what that has is read
    there, also what the broker has deleted, and `earliest` is the first record of both; records that were put aside
    when they were archived come after those of their file. `tls` is a consumer's.
    """
    unknown = [name for name in columns if name not in TYPES]
    if unknown:
        raise ValueError(f"there is no column {', '.join(map(repr, unknown))}; there are {', '.join(TYPES)}")
    retry, chosen = Retry(within_ms=timeout_ms), isolation_of(isolation)
    if history is not None and chosen is Isolation.UNCOMMITTED:
        raise ValueError("history and isolation='uncommitted' do not go together: an archive has what is committed")
    early: dict[int, int] = {}
    with Cluster(bootstrap, timeout_ms=timeout_ms, retry=retry, tls=tls, isolation=chosen) as cluster:
        chosen_partitions = _chosen(cluster, topic, partitions, start, end)
        past = None
        if history is not None:
            past, early = _history(cluster, history, topic, chosen_partitions, columns)
        spans = _spans(cluster, topic, chosen_partitions, start, end, past)

    def rows() -> Iterator[pa.RecordBatch]:
        with Cluster(bootstrap, timeout_ms=timeout_ms, retry=retry, tls=tls, isolation=chosen) as cluster:
            for span in spans:
                if past is None:
                    yield from read_span(cluster, span, columns, batch_rows)
                else:
                    began = early.get(span.partition, 0)
                    if span.first_offset < began:
                        before = replace(span, next_offset=min(began, span.next_offset))
                        yield from read_span(cluster, before, columns, batch_rows)
                    rest = replace(span, first_offset=max(began, span.first_offset))
                    yield from _read_both(cluster, past, rest, columns, batch_rows)

    return pa.RecordBatchReader.from_batches(schema(columns), rows())


def read_span(
    cluster: Cluster, span: Span, columns: Sequence[str] = DEFAULT_COLUMNS, batch_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    decoder = Decoder(span.topic, span.partition, columns, batch_rows=batch_rows)
    for fetched in record_sets(cluster, span):
        yield from decoder.decode(fetched.records, span.first_offset, span.next_offset, hidden=fetched.hidden)


def _history(
    cluster: Cluster, folder: str | Path, topic: str, partitions: list[int], columns: Sequence[str]
) -> tuple[History, dict[int, int]]:
    """The archive, and where it began, of the partitions of which the broker has what came before."""
    from headrace.arrow.history import covering

    def log_starts() -> dict[tuple[str, int], int]:
        listed = list_offsets(cluster, topic, dict.fromkeys(partitions, EARLIEST))
        return {(topic, partition): found.offset for partition, found in listed.items()}

    past, starts = covering(folder, log_starts)
    past.check({topic: cluster.topic(topic).topic_id.hex()}, columns)
    begins = {place: past.begin(place) for place in starts}
    return past, {place[1]: begin for place, begin in begins.items() if starts[place] < begin}


def _read_both(
    cluster: Cluster, past: History, span: Span, columns: Sequence[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """What is archived, then the broker's records; what it deletes meanwhile is archived by then."""
    from headrace.arrow.history import History, read_part

    place, at, end = (span.topic, span.partition), span.first_offset, span.next_offset
    while at < end:
        cut = min(end, past.ends.get(place, 0))
        if at < cut:
            for part in past.parts(span.topic, {span.partition: (at, cut)}):
                yield from read_part(part, columns, batch_rows)
            at = cut
        try:
            decoder = Decoder(span.topic, span.partition, columns, batch_rows=batch_rows)
            for fetched in record_sets(cluster, replace(span, first_offset=at)) if at < end else ():
                yield from decoder.decode(fetched.records, at, end, hidden=fetched.hidden)
                at = max(at, *(header.next_offset for header, _ in batches(fetched.records)))
            return
        except OffsetOutOfRange:
            past = History(past.folder)
            if past.ends.get(place, 0) <= at:
                raise


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


def _spans(
    cluster: Cluster, topic: str, partitions: list[int], start: Bound, end: Bound, past: History | None
) -> list[Span]:
    if not partitions:
        return []
    topic_id = cluster.topic(topic).topic_id
    starts = _resolve(cluster, topic, partitions, start, "start", "earliest")
    if past is not None and not isinstance(start, int):
        starts |= _archived_starts(past, topic, starts, start)
    ends = _resolve(cluster, topic, partitions, end, "end", "latest")
    for partition in partitions:
        if starts[partition] > ends[partition] and isinstance(start, int | Mapping):
            raise OffsetOutOfRange(
                f"{topic}-{partition}: start {starts[partition]} is after the end, {ends[partition]}"
            )
    return [Span(topic, n, starts[n], ends[n], topic_id) for n in partitions if starts[n] < ends[n]]


def _archived_starts(past: History, topic: str, starts: Mapping[int, int], start: Bound) -> dict[int, int]:
    """Where the archive begins earlier than the broker's log, as far as the start is not given as an offset."""
    if isinstance(start, datetime.datetime):
        at_ms = round(start.timestamp() * 1000)
        found = {n: past.first_at((topic, n), at_ms) for n in starts}
        return {n: min(offset, starts[n]) for n, offset in found.items() if offset is not None}
    if start == "latest":
        return {}
    firsts = past.starts()
    given = start if isinstance(start, Mapping) else {}
    return {
        n: firsts[topic, n]
        for n, log_start in starts.items()
        if n not in given and firsts.get((topic, n), log_start) < log_start
    }


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
