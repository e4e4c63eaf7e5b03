"""The Parquet files of an archive, as one task writes them.

A file holds records of one partition of one topic and one UTC date, in the order of their offsets, so that its name in
the table (topic, date) and its statistics (partition, offset, timestamp) say what is in it. Files of dead letters are
cut by topic and partition. Names bear the query and the batch they were written for:

    topic=orders/date=2026-11-16/<query>-<batch>-<task>-<random>.parquet

A file is whole and on disk when `close` returns. Those of a task that died stay behind under names that no table knows.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from headrace.arrow.locations import bytes_written, parquet_writer
from headrace.pipelines import durable

ROW_GROUP_BYTES: Final = 32 << 20
ROW_GROUP_ROWS: Final = 1 << 18
BUFFERED_BYTES: Final = 64 << 20
FILE_BYTES: Final = 256 << 20
OPEN_FILES: Final = 32
COMPRESSION: Final = "zstd"
COMPRESSION_LEVEL: Final = 1

# Ascending or nearly so: differences take a byte or two. Keys and values seldom repeat, and a dictionary of them is
# built in vain.
DELTA_ENCODED: Final = ("offset", "timestamp")
PLAIN: Final = ("key", "value", "headers")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """What a file is for; dead letters have no date."""

    topic: str
    partition: int
    date: date | None


@dataclass(frozen=True, slots=True)
class DataFile:
    """A finished file; `path` is below the table's folder."""

    path: str
    size_bytes: int
    rows: int
    place: Place
    first_offset: int
    last_offset: int
    first_timestamp: datetime
    last_timestamp: datetime

    def add_action(self) -> AddAction:
        """The file as a table's log has it, with the statistics by which readers skip it."""
        least = {
            "partition": self.place.partition,
            "offset": self.first_offset,
            "timestamp": _iso(self.first_timestamp),
        }
        most = {"partition": self.place.partition, "offset": self.last_offset, "timestamp": _iso(self.last_timestamp)}
        values: dict[str, str | None] = {}
        if self.place.date is None:
            least["topic"] = most["topic"] = self.place.topic
        else:
            values = {"topic": self.place.topic, "date": self.place.date.isoformat()}
        stats = {"numRecords": self.rows, "minValues": least, "maxValues": most, "nullCount": dict.fromkeys(least, 0)}
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        return AddAction(self.path, self.size_bytes, values, now_ms, True, json.dumps(stats))


def _iso(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def places(rows: pa.RecordBatch, by_date: bool) -> Iterator[tuple[Place, pa.RecordBatch]]:
    """The rows by the file they belong to. Nearly always that is one: a task reads one partition."""
    days = rows["timestamp"].cast(pa.timestamp("us")).cast(pa.date32())
    keys = pa.table({"topic": rows["topic"], "partition": rows["partition"], "date": days})
    if not by_date:
        keys = keys.drop(["date"])
    found = keys.group_by(keys.column_names).aggregate([]).to_pylist()
    for key in found:
        place = Place(key["topic"], key["partition"], key.get("date"))
        if len(found) == 1:
            yield place, rows
            return
        here = pc.and_(pc.equal(rows["topic"], place.topic), pc.equal(rows["partition"], place.partition))
        yield place, rows.filter(pc.and_(here, pc.equal(days, place.date)) if by_date else here)


@dataclass(slots=True)
class _Open:
    """A file being written, and rows that wait to be a row group."""

    path: str
    writer: pq.ParquetWriter
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    waiting_bytes: int = 0
    waiting_rows: int = 0
    rows: int = 0
    bounds: list[tuple[int, int, datetime, datetime]] = field(default_factory=list)


class FileSet:
    """The files that one task writes into one table; `columns` are those inside the files."""

    def __init__(self, table: Path, prefix: str, columns: pa.Schema, *, by_date: bool) -> None:
        self._table = table
        self._prefix = prefix
        self._columns = columns
        self._by_date = by_date
        self._open: dict[Place, _Open] = {}
        self._done: list[DataFile] = []
        self._started: list[Path] = []
        self._synced: set[Path] = set()

    def add(self, rows: pa.RecordBatch) -> None:
        for place, some in places(rows, self._by_date):
            file = self._file(place)
            file.bounds.append(_bounds(some))
            kept = some.select(self._columns.names).cast(self._columns)
            file.waiting.append(kept)
            file.waiting_rows += len(kept)
            file.waiting_bytes += kept.nbytes
            if file.waiting_bytes >= ROW_GROUP_BYTES or file.waiting_rows >= ROW_GROUP_ROWS:
                self._flush(place)
        while sum(file.waiting_bytes for file in self._open.values()) > BUFFERED_BYTES:
            self._flush(max(self._open, key=lambda place: self._open[place].waiting_bytes))

    def close(self) -> list[DataFile]:
        """Finish all files."""
        for place in list(self._open):
            self._finish(place)
        return self._done

    def discard(self) -> None:
        """Remove all files, finished or not."""
        for file in self._open.values():
            # It writes what is left, which a full disk does not take either.
            with suppress(OSError):
                file.writer.close()
        for path in self._started:
            path.unlink(missing_ok=True)

    def _file(self, place: Place) -> _Open:
        file = self._open.pop(place, None)
        if file is None:
            if len(self._open) >= OPEN_FILES:
                self._finish(next(iter(self._open)))
            file = self._start(place)
        # The one that rests longest is first.
        self._open[place] = file
        return file

    def _start(self, place: Place) -> _Open:
        folder = "" if place.date is None else f"topic={place.topic}/date={place.date.isoformat()}/"
        path = f"{folder}{self._prefix}-{secrets.token_hex(6)}.parquet"
        target = self._table / path
        target.parent.mkdir(parents=True, exist_ok=True)
        self._started.append(target)
        encoded = dict.fromkeys(DELTA_ENCODED, "DELTA_BINARY_PACKED")
        flat = [each.name for each in self._columns if not pa.types.is_nested(each.type)]
        writer = parquet_writer(
            target,
            self._columns,
            compression=COMPRESSION,
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=[name for name in flat if name not in (*PLAIN, *encoded)],
            column_encoding=encoded,
            write_statistics=[name for name in flat if name not in PLAIN],
        )
        return _Open(path, writer)

    def _flush(self, place: Place) -> None:
        file = self._open[place]
        if file.waiting:
            group = pa.Table.from_batches(file.waiting, self._columns)
            file.writer.write_table(group, row_group_size=len(group))
            file.rows += len(group)
            file.waiting, file.waiting_bytes, file.waiting_rows = [], 0, 0
        if bytes_written(self._table / file.path, file.writer) >= FILE_BYTES:
            self._finish(place)

    def _finish(self, place: Place) -> None:
        file = self._open[place]
        if file.waiting:
            self._flush(place)
        if self._open.pop(place, None) is None:
            return
        file.writer.close()
        target = self._table / file.path
        # The folders may be new; those of a file before this one are on disk already.
        durable.sync(target, None if target.parent in self._synced else self._table)
        self._synced.add(target.parent)
        firsts, lasts, earliest, latest = zip(*file.bounds, strict=True)
        self._done.append(
            DataFile(
                file.path, target.stat().st_size, file.rows, place,
                min(firsts), max(lasts), min(earliest), max(latest),
            )
        )  # fmt: skip


def _bounds(rows: pa.RecordBatch) -> tuple[int, int, datetime, datetime]:
    offsets, times = pc.min_max(rows["offset"]).as_py(), pc.min_max(rows["timestamp"]).as_py()
    return offsets["min"], offsets["max"], times["min"], times["max"]
