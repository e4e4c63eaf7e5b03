"""An archive's records found by key, by offset or by time, without Spark. Reads only.

The Delta table `records/` lists files with their least and greatest partition, offset and timestamp, and a file's row
groups have the same; only row groups that may hold a match are read. Where a statistic is missing, the data is read.
A key is looked up in the key index; files that are newer than the index are searched row group by row group.

What is found is given in order while it is read: a row group is opened only when nothing that was read before it has
to come first.
"""

from __future__ import annotations

import heapq
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from headrace.arrow.key_index import KeyIndex, Span
from headrace.arrow.locations import ObjectPath, delta_table, is_delta_table, location, one_line, parquet_source
from headrace.errors import OperatorError
from headrace.records.record import Record

if TYPE_CHECKING:
    from headrace.client.admin.query import RecordQuery

READER_VERSION_MAX: Final = 1
BOUNDED: Final = ("partition", "offset", "timestamp")
WRITER: Final = "headrace.writer"
"""In the log of a table, who made a commit: the name of a query, and its batch."""


class Bounds(NamedTuple):
    """Least and greatest of a column in a file or row group; None where nothing is known. Timestamps are in us."""

    partition: tuple[int, int] | None
    offset: tuple[int, int] | None
    timestamp: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class File:
    """A file of the table, by its path in the table's log."""

    path: str
    size_bytes: int
    rows: int
    modified_ms: int
    topic: str
    """Empty in a table whose files have it inside."""
    date: str
    bounds: Bounds


@dataclass(slots=True)
class Work:
    """What a search has looked at so far."""

    files: int = 0
    row_groups: int = 0
    files_not_indexed: int = 0
    """Files of the topic that hold records newer than the index: each one is searched, as far as the times allow."""


class Archive:
    """The newest version of the table of records when it was opened."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = location(folder)
        self.table = open_records(self.folder)
        self._root = root_of(self.table)

    def find(self, wanted: RecordQuery, newest_first: bool, work: Work) -> Iterator[tuple[int, Record]]:
        """Partition and record; newest first, or by partition and offset."""
        groups = list(self._groups(wanted, newest_first, work))
        heapq.heapify(groups)
        ready: list[tuple[tuple[int, ...], int, Any]] = []
        sequence = 0  # Rows of equal order, as in an archive that has a record twice, are not compared further.
        while groups or ready:
            while groups and (not ready or groups[0].order <= ready[0][0]):
                group = heapq.heappop(groups)
                work.row_groups += 1
                for row in self._matches(group, wanted):
                    sequence += 1
                    heapq.heappush(ready, (_order(row, newest_first), sequence, row))
            if ready:
                row = heapq.heappop(ready)[2]
                yield row["partition"], _record(row)

    def dead_letters(self, wanted: RecordQuery) -> list[tuple[int, int, str]]:
        """Partition, offset and reason of records that match, but were put aside when they could not be decoded."""
        path = self.folder / "dead_letters"
        if not is_delta_table(path):
            return []
        places = _Places(Span(partition, offset, offset) for partition, offset in wanted.ids) if wanted.ids else None
        found: list[tuple[int, int, str]] = []
        for file in list_files(delta_table(path)):
            if _may_hold(file.bounds, places, wanted):
                columns = ["topic", *BOUNDED, "key", "reason"]
                rows = pq.read_table(parquet_source(path / file.path), columns=columns, partitioning=None)
                rows = rows.filter(pc.and_(_mask(rows, wanted), pc.equal(rows["topic"], wanted.topic)))
                found += zip(*(rows[name].to_pylist() for name in ("partition", "offset", "reason")), strict=True)
        return sorted(found)

    def drops_values(self) -> bool:
        return drops_values(self.folder)

    def _groups(self, wanted: RecordQuery, newest_first: bool, work: Work) -> Iterator[_Group]:
        """Row groups that may hold a match, each with the least place in the order that a row of it can have."""
        files = [file for file in list_files(self.table) if file.topic == wanted.topic]
        everywhere: set[str] = set()
        spans = [Span(partition, offset, offset) for partition, offset in wanted.ids]
        if wanted.key is not None and not wanted.ids:
            index = KeyIndex(self.folder, self.table)
            everywhere = unknown_since(self.table, index.version).intersection(file.path for file in files)
            work.files_not_indexed = len(everywhere)
            spans = index.find(wanted.topic, wanted.key, wanted.from_ms, wanted.to_ms)
        placed = None if wanted.key is None and not wanted.ids else _Places(spans)
        for file in files:
            places = None if file.path in everywhere else placed
            if not _may_hold(file.bounds, places, wanted):
                continue
            work.files += 1
            for number, bounds in self._row_groups(file):
                if _may_hold(bounds, places, wanted):
                    yield _Group(_least(bounds, newest_first), file.path, number)

    def _row_groups(self, file: File) -> Iterator[tuple[int, Bounds]]:
        with self._open(file.path) as opened:
            yield from row_group_bounds(opened)

    def _matches(self, group: _Group, wanted: RecordQuery) -> list[dict[str, Any]]:
        """Rows of one row group. Values are read only where something matches."""
        with self._open(group.path) as opened:
            narrow = [*BOUNDED, *(["key"] if wanted.key is not None else [])]
            rows = opened.read_row_group(group.number, columns=narrow)
            chosen = pc.indices_nonzero(_mask(rows, wanted))
            if not len(chosen):
                return []
            wide = [name for name in ("key", "value", "headers") if name not in narrow]
            found = pa.Table.from_arrays(
                [*rows.columns, *opened.read_row_group(group.number, columns=wide).columns], names=[*narrow, *wide]
            ).take(chosen)
        times = found["timestamp"].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
        rows_: list[dict[str, Any]] = found.drop(["timestamp"]).append_column("timestamp", times).to_pylist()
        return rows_

    def _open(self, path: str) -> Any:
        try:
            return pq.ParquetFile(parquet_source(self._root / path), pre_buffer=False)
        except FileNotFoundError:
            raise OperatorError(
                f"{self._root / path} is gone: the archive was compacted and vacuumed while it was read; try again"
            ) from None


def drops_values(folder: Path) -> bool:
    """Whether an archive keeps decoded columns instead of values: a null value may not have been null."""
    try:
        known = json.loads((folder / "checkpoints" / "archive" / "query.json").read_text())
        return bool(known["identity"].get("drop_value"))
    except (OSError, ValueError, KeyError):
        return False


def open_records(folder: Path) -> DeltaTable:
    """The table of records of an archive; an OperatorError says what is there instead."""
    path = folder / "records"
    if isinstance(path, ObjectPath):
        path.check()
    if (path / "_spark_metadata").is_dir():
        raise OperatorError(
            f"{folder} is archived as plain Parquet; finding records by key, indexing and compacting need a Delta table"
        )
    if (folder / "iceberg.json").exists():
        raise OperatorError(
            f"{folder} is archived in Iceberg; finding records by key, indexing and compacting need a Delta table"
        )
    try:
        table = delta_table(path)
    except TableNotFoundError:
        raise OperatorError(f"{folder} has no archive; `headrace pipeline archive --to {folder}` makes one") from None
    except (DeltaError, OSError) as error:
        raise OperatorError(f"the archive {folder} cannot be read: {one_line(error)}") from None
    if table.protocol().min_reader_version > READER_VERSION_MAX:
        raise OperatorError(f"the archive {folder} has deleted rows or renamed columns: another program wrote to it")
    return table


def root_of(table: DeltaTable) -> Path:
    """Where a table is; `deltalake` itself gives a URI with blanks and the like written as %20."""
    uri = unquote(table.table_uri)
    return location(uri) if uri.startswith("s3://") else Path(unquote(urlparse(table.table_uri).path))


def list_files(table: DeltaTable) -> list[File]:
    """Every file of the table, with what its log says of it."""
    listed = pa.table(table.get_add_actions(flatten=True))
    nothing = [None] * listed.num_rows

    def column(name: str) -> list[Any]:
        if name not in listed.column_names:
            return nothing
        values = listed[name]
        if pa.types.is_timestamp(values.type):
            values = values.cast(pa.timestamp("us", tz="UTC"), safe=False).cast(pa.int64())
        return list(values.to_pylist())

    pairs = [list(zip(column(f"min.{name}"), column(f"max.{name}"), strict=True)) for name in BOUNDED]
    bounds = [Bounds(*(None if None in pair else pair for pair in of_file)) for of_file in zip(*pairs, strict=True)]
    rows = zip(
        column("path"), column("size_bytes"), column("num_records"), column("modification_time"),
        column("partition.topic"), column("partition.date"), bounds, strict=True,
    )  # fmt: skip
    root = root_of(table)
    return [
        File(
            path,
            size,
            pq.read_metadata(parquet_source(root / path)).num_rows if count is None else count,
            at,
            topic or "",
            str(date),
            known,
        )
        for path, size, count, at, topic, date, known in rows
    ]


def row_group_bounds(opened: Any) -> Iterator[tuple[int, Bounds]]:
    """The row groups of a file, by number, with what their statistics say."""
    leaves = {opened.schema.column(n).path: n for n in range(len(opened.schema))}
    for number in range(opened.num_row_groups):
        group = opened.metadata.row_group(number)
        yield number, Bounds(*(_statistics(group.column(leaves[name])) for name in BOUNDED))


def unknown_since(table: DeltaTable, version: int | None) -> set[str]:
    """Files of the table that may hold rows which were not there at the version: all of them when it is None.

    Follows the table's log. A file that only rearranges rows (compaction: `dataChange` is false) holds new rows if it
    takes the place of a file that does. When the log no longer reaches back to the version, all files may be new.
    """
    everything = {file.path for file in list_files(table)}
    if version is None or version > table.version():
        return everything
    unknown: set[str] = set()
    log = root_of(table) / "_delta_log"
    for number in range(version + 1, table.version() + 1):
        try:
            lines = (log / f"{number:020}.json").read_text().splitlines()
        except FileNotFoundError:
            return everything
        actions = [json.loads(line) for line in lines if line]
        added = [action["add"] for action in actions if "add" in action]
        removed = {action["remove"]["path"] for action in actions if "remove" in action}
        moved = bool(unknown & removed)
        unknown = (unknown - removed) | {add["path"] for add in added if moved or add.get("dataChange", True)}
    return unknown & everything


class _Group(NamedTuple):
    order: tuple[int, ...]
    path: str
    number: int


class _Places:
    """Spans of offsets per partition, merged, so that overlap is one search."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._firsts: dict[int, list[int]] = {}
        self._lasts: dict[int, list[int]] = {}
        for span in sorted(spans, key=lambda span: (span.partition, span.first_offset)):
            firsts, lasts = self._firsts.setdefault(span.partition, []), self._lasts.setdefault(span.partition, [])
            if lasts and span.first_offset <= lasts[-1] + 1:
                lasts[-1] = max(lasts[-1], span.last_offset)
            else:
                firsts.append(span.first_offset)
                lasts.append(span.last_offset)

    def touch(self, bounds: Bounds) -> bool:
        low, high = bounds.partition or (-math.inf, math.inf)
        chosen = [n for n in self._firsts if low <= n <= high]
        if bounds.offset is None:
            return bool(chosen)
        least, greatest = bounds.offset
        for partition in chosen:
            nth = bisect_right(self._firsts[partition], greatest) - 1
            if nth >= 0 and self._lasts[partition][nth] >= least:
                return True
        return False


def _may_hold(bounds: Bounds, places: _Places | None, wanted: RecordQuery) -> bool:
    if bounds.timestamp is not None:
        least_us, greatest_us = bounds.timestamp
        # Statistics of a table may be cut to milliseconds.
        if wanted.from_ms is not None and greatest_us + 999 < wanted.from_ms * 1000:
            return False
        if wanted.to_ms is not None and least_us >= wanted.to_ms * 1000:
            return False
    return places is None or places.touch(bounds)


def _statistics(column: Any) -> tuple[int, int] | None:
    known = column.statistics
    if known is None or not known.has_min_max or column.physical_type not in ("INT32", "INT64"):
        return None
    scale = 1
    if known.logical_type.type == "TIMESTAMP":
        unit = json.loads(known.logical_type.to_json())["timeUnit"]
        if unit == "nanoseconds":
            return known.min_raw // 1000, known.max_raw // 1000
        scale = 1000 if unit == "milliseconds" else 1
    return known.min_raw * scale, known.max_raw * scale


def _least(bounds: Bounds, newest_first: bool) -> tuple[int, ...]:
    """A place in the order that no row of these bounds comes before; nothing known is the very first place."""
    if newest_first:
        return (-bounds.timestamp[1],) if bounds.timestamp else ()
    if bounds.partition is None:
        return ()
    return (bounds.partition[0], bounds.offset[0]) if bounds.offset else (bounds.partition[0],)


def _order(row: dict[str, Any], newest_first: bool) -> tuple[int, ...]:
    if newest_first:
        return -row["timestamp"], row["partition"], -row["offset"]
    return row["partition"], row["offset"]


def _mask(rows: Any, wanted: RecordQuery) -> Any:
    chosen = [pc.is_valid(rows["offset"])]
    if wanted.key is not None:
        chosen.append(pc.equal(rows["key"], pa.scalar(wanted.key, rows.schema.field("key").type)))
    if wanted.from_ms is not None:
        chosen.append(pc.greater_equal(rows["timestamp"], _instant(wanted.from_ms, rows)))
    if wanted.to_ms is not None:
        chosen.append(pc.less(rows["timestamp"], _instant(wanted.to_ms, rows)))
    if wanted.ids:
        chosen.append(_is_one_of(rows, wanted.ids))
    return reduce(pc.and_, chosen)


def _instant(at_ms: int, rows: Any) -> Any:
    return pa.scalar(at_ms, pa.timestamp("ms", tz="UTC")).cast(rows.schema.field("timestamp").type)


def _is_one_of(rows: Any, ids: Sequence[tuple[int, int]]) -> Any:
    """Per partition, whether the offset is one of those asked for."""
    masks = []
    for partition in sorted({n for n, _ in ids}):
        offsets = pa.array([offset for n, offset in ids if n == partition], pa.int64())
        masks.append(pc.and_(pc.equal(rows["partition"], partition), pc.is_in(rows["offset"], value_set=offsets)))
    return reduce(pc.or_, masks)


def _record(row: dict[str, Any]) -> Record:
    headers = [(header["key"], header["value"]) for header in row["headers"] or ()]
    return Record(row["offset"], row["timestamp"] // 1000, row["key"], row["value"], headers)
