"""The sink of the archive: Arrow rows of a stream into Delta tables, each batch once.

Tasks write Parquet files; the driver's `commit` adds them to the tables with the transaction (query, batch), each table
in one version, dead letters before records. Whatever dies in between, Spark runs the batch again from its log of
offsets, and a table that has the transaction takes nothing from the second run. Between the two commits a crash leaves
dead letters without their batch's records; the second run adds these and nothing else.

Spark calls `abort` with the same messages when `commit` raises, even after it did its work: files that a table has are
never removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema

from headrace.arrow import iceberg
from headrace.arrow.history import DeltaVersion
from headrace.arrow.locations import ObjectPath
from headrace.arrow.table_version import TableVersion
from headrace.errors import OperatorError
from headrace.pipelines import archive_tables, delta
from headrace.pipelines.archive_files import DataFile, FileSet
from headrace.pipelines.archive_tables import DEAD_LETTERS, DEAD_SCHEMA, RECORDS
from headrace.spark import faults, task_batch

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

REASON: Final = "reason"


@dataclass(frozen=True)
class FilesWritten(WriterCommitMessage):
    """What one task has written, by table."""

    records: tuple[DataFile, ...]
    dead_letters: tuple[DataFile, ...]


class ArchiveWriter(DataSourceStreamArrowWriter):
    """Rows have the columns of records, decoded ones after them, and last `reason` if they may be dead letters."""

    def __init__(self, archive: Path, query: str, schema: StructType) -> None:
        self._archive = archive
        self._query = query
        columns = to_arrow_schema(schema, timezone="UTC")
        self._inside = pa.schema([field for field in columns if field.name not in ("topic", REASON)])
        self._dead_inside = DEAD_SCHEMA
        self._is_iceberg = iceberg.where(archive) is not None
        if self._is_iceberg:
            # Such files have the topic inside, and the ids of columns.
            chosen = {"topic", *self._inside.names}
            self._inside = pa.schema([field for field in self._columns(RECORDS) if field.name in chosen])
            self._dead_inside = self._columns(DEAD_LETTERS) if REASON in columns.names else DEAD_SCHEMA

    def _columns(self, name: str) -> pa.Schema:
        table = self._opened(name)
        assert isinstance(table, iceberg.IcebergVersion)
        return table.columns()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> FilesWritten:
        context = TaskContext.get()
        assert context is not None
        (batch,) = task_batch.told(task_batch.BATCH_ID)
        prefix = f"{self._query}-{int(batch):08}-{context.partitionId():05}"
        records = FileSet(self._archive / RECORDS, prefix, self._inside, by_date=True)
        dead = FileSet(self._archive / DEAD_LETTERS, prefix, self._dead_inside, by_date=False)
        try:
            for rows in iterator:
                good, bad = parted(rows)
                if len(good):
                    records.add(good)
                if len(bad):
                    dead.add(bad)
            return FilesWritten(tuple(records.close()), tuple(dead.close()))
        except BaseException as error:
            records.discard()
            dead.discard()
            if isinstance(error, OSError):
                raise self._unwritable(error) from None
            raise

    def _unwritable(self, error: OSError) -> OperatorError:
        told = os.strerror(error.errno) if error.errno else str(error)
        return OperatorError(
            f"the archive {self._archive} cannot be written: {told}; nothing of this batch is archived: run it again, "
            "it goes on where it ended"
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        records, dead = files_of(messages)
        faults.reached("files-written", batchId)
        if dead:
            self._add(DEAD_LETTERS, dead, batchId)
        faults.reached("dead-committed", batchId)
        # Also without any: that the table has all batches which Spark has finished tells that it is the newest one.
        self._add(RECORDS, records, batchId)
        faults.reached("table-committed", batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        if self._is_iceberg or isinstance(self._archive, ObjectPath):
            # A commit whose answer was lost may still come; the batch's second run clears up.
            return
        for name, files in zip((RECORDS, DEAD_LETTERS), files_of(messages), strict=True):
            self._remove(name, files)

    def _add(self, name: str, files: Sequence[DataFile], batch: int) -> None:
        if self._is_iceberg:
            from headrace.pipelines import iceberg_tables

            added = iceberg_tables.append(self._archive, name, files, app_id=self._query, app_version=batch)
        else:
            added = delta.append(
                self._archive / name,
                [file.add_action() for file in files],
                app_id=self._query,
                app_version=batch,
                check=lambda table: archive_tables.refuse_repeats(DeltaVersion(table), files),
            )
        if not added:
            table = self._opened(name)
            archive_tables.refuse_unknown(table, files)
            archive_tables.refuse_missing(table, f"{self._query}-{batch:08}-")
            self._remove(name, files)
            return
        # Tasks that died and were run again have left files beside those that count.
        kept = {self._archive / name / file.path for file in files}
        for folder in {path.parent for path in kept}:
            for path in folder.glob(f"{self._query}-{batch:08}-*.parquet"):
                if path not in kept:
                    path.unlink(missing_ok=True)

    def _opened(self, name: str) -> TableVersion:
        table = archive_tables.opened(self._archive, name)
        if table is None:
            raise OperatorError(f"the archive {self._archive} has lost its table {name}")
        return table

    def _remove(self, name: str, files: Iterable[DataFile]) -> None:
        files = list(files)
        if not files:
            return
        named = self._opened(name).named_paths()
        for file in files:
            if file.path not in named:
                (self._archive / name / file.path).unlink(missing_ok=True)


def files_of(messages: Iterable[WriterCommitMessage | None]) -> tuple[list[DataFile], list[DataFile]]:
    """Records and dead letters, of the tasks that answered."""
    done = [message for message in messages if isinstance(message, FilesWritten)]
    return [file for each in done for file in each.records], [file for each in done for file in each.dead_letters]


def parted(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Records and dead letters."""
    if REASON not in rows.schema.names:
        return rows, rows.slice(len(rows))
    wrong = pc.is_valid(rows[REASON])
    bad = rows.filter(wrong)
    now = pa.array([datetime.now(UTC)] * len(bad), type=DEAD_SCHEMA.field("archived_at").type)
    return rows.filter(pc.invert(wrong)), bad.append_column("archived_at", now)
