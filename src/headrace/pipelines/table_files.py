"""Rows of a DataFrame as Parquet files of a Delta table, written by the tasks and committed by the driver.

A task writes the rows of its partition, in their order, to new files: another one where the values of the table's
partition columns change. A file counts only when a commit names it; what a task or driver that died has left is removed
by vacuum. Files are synced before they are reported; in a store they are there then.

`replace` takes files out and puts others in, in one version, and only if the table still has every file that goes out:
`deltalake` itself would let two commits remove the same file and both add its rows.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake._internal import RemoveAction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from headrace.arrow.archive import root_of
from headrace.arrow.locations import location, parquet_source, parquet_writer
from headrace.errors import OperatorError
from headrace.pipelines import delta, durable, parquet_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COMMIT_ATTEMPTS: Final = 20
UNNAMED_HOURS: Final = 24
REPORT: Final = "path string, size long, rows long, partition_values string, stats string"
REPORT_SCHEMA: Final = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("rows", pa.int64()),
        ("partition_values", pa.string()),
        ("stats", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How files of a table are written. A row group ends at whichever limit comes first."""

    partition_by: Sequence[str]
    bounded: Sequence[str]
    """Columns whose least and greatest value go to the table's log, and to the statistics of row groups."""
    row_group_rows: int
    row_group_bytes: int = 1 << 30
    cut_by: Sequence[str] = ()
    """Columns inside the files of which a file has one value only."""
    ascending: Sequence[str] = ()
    """Columns of whole numbers or times that are stored as differences."""
    repeating: Sequence[str] = ()
    """Columns stored with a dictionary."""
    name: str = "part"
    """How names of files begin."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file that is whole, and in no version of the table yet."""

    path: str
    size_bytes: int
    rows: int
    partition_values: dict[str, str]
    stats: str

    def add(self, data_change: bool) -> AddAction:
        now_ms = int(time.time() * 1000)
        return AddAction(self.path, self.size_bytes, self.partition_values, now_ms, data_change, self.stats)


def read(spark: SparkSession, table: DeltaTable, paths: Iterable[str], *, with_file_name: bool = False) -> DataFrame:
    """Some files of the table, by their paths in its log: its columns, and `file_name` if that is asked for."""
    return parquet_rows.read(
        spark, root_of(table), list(paths), delta.spark_schema(table), with_file_name=with_file_name
    )


def write(rows: DataFrame, table: str | Path, layout: Layout) -> list[Written]:
    """Run the job: each of its partitions becomes a file, or one per value of the table's partition columns."""
    reported = rows.mapInArrow(_writer(str(table), layout), REPORT).collect()
    return [
        Written(row["path"], row["size"], row["rows"], json.loads(row["partition_values"]), row["stats"])
        for row in reported
    ]


def _writer(table: str, layout: Layout) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def write_partition(batches: Iterator[Any]) -> Iterator[Any]:
        report: list[Written] = []
        current: TableFile | None = None
        for batch in batches:
            for values, rows in _runs(pa.Table.from_batches([batch]), (*layout.partition_by, *layout.cut_by)):
                if current is None or current.values != values:
                    report += [current.close()] if current is not None else []
                    current = TableFile(location(table), values, rows.schema, layout)
                current.append(rows)
        report += [current.close()] if current is not None else []
        rows_of_report = [
            {
                "path": file.path,
                "size": file.size_bytes,
                "rows": file.rows,
                "partition_values": json.dumps(file.partition_values),
                "stats": file.stats,
            }
            for file in report
        ]
        yield pa.RecordBatch.from_pylist(rows_of_report, schema=REPORT_SCHEMA)

    return write_partition


def _runs(rows: Any, columns: Sequence[str]) -> Iterator[tuple[dict[str, str], Any]]:
    """Neighbouring rows with the same values of some columns, and these values as text."""
    start = 0
    while start < rows.num_rows:
        first = {name: rows[name][start] for name in columns}
        length = rows.num_rows - start
        for name, value in first.items():
            differs = pc.index(pc.equal(rows[name].slice(start, length), value), False).as_py()
            length = length if differs < 0 else differs
        yield {name: str(value.as_py()) for name, value in first.items()}, rows.slice(start, length)
        start += length


class TableFile:
    """A Parquet file that is being written; rows are held until they fill a row group."""

    def __init__(self, table: Path, values: dict[str, str], schema: Any, layout: Layout) -> None:
        self.values = values
        self._layout = layout
        folder = Path(*(f"{name}={values[name]}" for name in layout.partition_by))
        self._name = folder / f"{layout.name}-{uuid.uuid4().hex}.parquet"
        self._table = table
        self._path = table / self._name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Delta's columns may all be null, whatever Spark knows of these rows.
        kept = [column.with_nullable(True) for column in schema if column.name not in layout.partition_by]
        self._schema = pa.schema(kept)
        self._writer = parquet_writer(
            self._path,
            self._schema,
            compression="zstd",
            use_dictionary=list(layout.repeating),
            column_encoding=dict.fromkeys(layout.ascending, "DELTA_BINARY_PACKED"),
            write_statistics=list(layout.bounded),
        )
        self._held: list[Any] = []
        self._held_rows = self._held_bytes = 0

    def append(self, rows: Any) -> None:
        limit = self._layout.row_group_rows
        while rows.num_rows:
            part = rows.slice(0, limit - self._held_rows)
            rows = rows.slice(part.num_rows)
            self._held.append(part)
            self._held_rows += part.num_rows
            self._held_bytes += part.nbytes
            if self._held_rows >= limit or self._held_bytes >= self._layout.row_group_bytes:
                self._end_row_group()

    def close(self) -> Written:
        """It is on disk when this returns."""
        self._end_row_group()
        self._writer.close()
        durable.sync(self._path, self._table)
        metadata = pq.read_metadata(parquet_source(self._path))
        values = {name: self.values[name] for name in self._layout.partition_by}
        stats = json.dumps(_stats(metadata, self._layout.bounded))
        return Written(str(self._name), self._path.stat().st_size, metadata.num_rows, values, stats)

    def discard(self) -> None:
        # It writes what is left, which a full disk does not take either.
        with suppress(OSError):
            self._writer.close()
        self._path.unlink(missing_ok=True)

    def _end_row_group(self) -> None:
        if self._held_rows:
            rows = pa.concat_tables(self._held).select(self._schema.names)
            self._writer.write_table(rows.cast(self._schema), row_group_size=self._held_rows)
        self._held, self._held_rows, self._held_bytes = [], 0, 0


def _stats(metadata: Any, bounded: Sequence[str]) -> dict[str, Any]:
    """Delta's statistics of a file, from those of its row groups."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    names = {metadata.schema.column(n).path: n for n in range(metadata.num_columns)}
    for name in bounded:
        found = [metadata.row_group(n).column(names[name]).statistics for n in range(metadata.num_row_groups)]
        known = [each for each in found if each.has_min_max]
        nulls[name] = sum(each.null_count for each in found)
        if known:
            least[name] = _json(min(each.min for each in known))
            greatest[name] = _json(max(each.max for each in known))
    return {"numRecords": metadata.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}


def _json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return value


class FilesGone(OperatorError):
    """Another program has removed files of the table that were to be replaced; nothing was changed."""


def replace(
    table: DeltaTable,
    removed: Iterable[str],
    added: Sequence[Written],
    *,
    partition_by: Sequence[str],
    data_change: bool,
    transactions: Mapping[str, int] | None = None,
) -> int:
    """Commit one version, and answer its number. Commits of others in between are no hindrance."""
    going = set(removed)
    applications = [Transaction(name, version) for name, version in (transactions or {}).items()]
    actions = [file.add(data_change) for file in added]
    for _ in range(COMMIT_ATTEMPTS):
        table.update_incremental()
        listed = pa.table(table.get_add_actions(flatten=False)).select(["path", "size_bytes", "partition"])
        live = {row["path"]: row for row in listed.to_pylist()}
        if missing := going - live.keys():
            raise FilesGone(f"{len(missing)} files of {table.table_uri} were replaced by another run; try again")
        version, now_ms = table.version() + 1, int(time.time() * 1000)
        removals = [
            RemoveAction(path, data_change, now_ms, live[path]["size_bytes"], _as_text(live[path]["partition"]))
            for path in sorted(going)
        ]
        try:
            # Without retries a commit goes to exactly the version that was looked at, or fails.
            properties = CommitProperties(max_commit_retries=0, app_transactions=applications)
            table.create_write_transaction(
                [*actions, *removals], "append", table.schema(), list(partition_by), commit_properties=properties
            )
        except CommitFailedError:
            continue
        table.update_incremental()
        delta.sync_version(root_of(table), version)
        return version
    raise OperatorError(f"{table.table_uri} is written to so often that {COMMIT_ATTEMPTS} commits failed; try again")


def vacuum(table: DeltaTable, hours: int) -> int:
    """Remove files that no version of the last so many hours needs, and answer how many.

    Below a day only files that the table's log names go: others may be part of a commit to come. What this adds to the
    log is on disk when it returns: a loss of power that takes an entry from the middle of a log ends the table.
    """
    table.update_incremental()
    before, root = table.version(), root_of(table)
    work = partial(table.vacuum, hours, enforce_retention_duration=False, full=hours >= UNNAMED_HOURS)
    # It lists what is long gone too, as long as the log names it.
    old = {path for path in work(dry_run=True) if (root / unquote(path)).exists()}
    if not old:
        return 0
    work(dry_run=False)
    table.update_incremental()
    for version in range(before + 1, table.version() + 1):
        delta.sync_version(root, version)
    return len(old)


def _as_text(values: Mapping[str, Any] | None) -> dict[str, str | None]:
    return {name: None if value is None else str(value) for name, value in (values or {}).items()}
