"""Batches of a streaming query into a Delta table of any schema, each batch once.

Spark writes a batch as Parquet below `_staging/`, the driver moves the files to their place and adds them to the table
with the transaction (query, batch) in one version. A driver that dies before that leaves files that no version names;
the next start removes them, and Spark runs the batch again. One that dies after it finds the transaction and adds
nothing. A checkpoint that does not belong to the table, as it is now, is refused before anything is read. Files are
named

    <partition column>=<value>/<query>-<batch>-<number>-<random>.parquet

The folder has to be one that driver and executors share.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from deltalake.transaction import AddAction
from pyspark.sql.types import StructType

from headrace.errors import OperatorError
from headrace.pipelines import delta, durable
from headrace.spark import faults

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STAGING: Final = "_staging"
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class TableSink:
    """`query` names the batches: the same over all restarts of a query, and no other query's."""

    path: Path
    query: str
    partition_by: tuple[str, ...] = ()

    def check_checkpoint(self, checkpoint: Path, accept_others: bool = False) -> None:
        """Refuse a checkpoint that has not seen the batches of the table, or has seen those of a table that is gone.

        Rows of others are refused too when the query begins, unless they are accepted: they may be its own, written
        with another checkpoint.
        """
        # Spark notes a batch here before it runs it.
        started = max(
            (int(each.name) for each in (checkpoint / "offsets").glob("*") if each.name.isdigit()), default=-1
        )
        if not delta.exists(self.path):
            if (checkpoint / "commits" / str(started)).exists() and not accept_others:
                raise OperatorError(
                    f"table {self.path} is gone, but {checkpoint} says how far it was filled: bring the table back, or "
                    "remove that folder too, to fill it from the beginning"
                )
            return
        table = delta.open_table(self.path)
        taken = table.transaction_version(self.query)
        if taken is not None and taken > started:
            known = f"knows none after {started}" if started >= 0 else "knows none"
            raise OperatorError(
                f"table {self.path} has batch {taken} of this job, and the checkpoint {checkpoint} {known}, so new "
                "rows would be left out: bring the checkpoint back, or remove the table too, to fill it anew"
            )
        if taken is None and started < 0 and delta.paths(table) and not accept_others:
            raise OperatorError(
                f"table {self.path} has rows that did not come with this checkpoint, and would have them twice if they "
                "are this job's: give its former --checkpoint or another table, or --accept-change to add to them"
            )

    def prepare(self, spark: SparkSession, schema: StructType) -> None:
        """Make the table, or check that the rows fit the one that is there; remove what a dead run left."""
        missing = [name for name in self.partition_by if name not in schema.fieldNames()]
        if missing:
            raise OperatorError(f"table {self.path} is to be partitioned by {missing[0]}, which the rows do not have")
        # Files that other readers of Delta take as they are.
        spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        if delta.exists(self.path):
            _check(self.path, delta.open_table(self.path), schema, self.partition_by)
        elif self.path.exists() and any(self.path.iterdir()):
            raise OperatorError(f"{self.path} holds something that is no Delta table; choose another folder")
        else:
            delta.create(self.path, Schema.from_json(schema.json()), self.partition_by)
        self._sweep()

    def write(self, rows: DataFrame, batch: int) -> None:
        """Add one batch, for `foreachBatch`."""
        known = delta.open_table(self.path).transaction_version(self.query)
        if known is not None and known >= batch:
            return
        staged = self.path / STAGING / f"{self.query}-{batch:08}-{secrets.token_hex(4)}"
        writer = rows.write.option("compression", "zstd")
        (writer.partitionBy(*self.partition_by) if self.partition_by else writer).parquet(str(staged))
        files = [
            self._move(staged, file, f"{self.query}-{batch:08}-{nth:05}-{secrets.token_hex(4)}.parquet")
            for nth, file in enumerate(sorted(staged.rglob("*.parquet")))
            if pq.read_metadata(file).num_rows
        ]
        shutil.rmtree(staged)
        faults.reached("files-written", batch)
        if files:
            delta.append(self.path, files, app_id=self.query, app_version=batch)
        faults.reached("table-committed", batch)

    def _move(self, staged: Path, file: Path, name: str) -> AddAction:
        folder = file.relative_to(staged).parent
        target = self.path / folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        file.rename(target)
        durable.sync(target, self.path)
        values = {key: _value(text) for key, _, text in (part.partition("=") for part in folder.parts)}
        about = target.stat()
        stats = {"numRecords": pq.read_metadata(target).num_rows}
        modified_ms = int(about.st_mtime * 1000)
        return AddAction(str(folder / name), about.st_size, values, modified_ms, True, json.dumps(stats))

    def _sweep(self) -> None:
        """Files of batches that the table has not taken; what it has taken is not even looked at."""
        known = delta.open_table(self.path).transaction_version(self.query)
        for left in self.path.rglob(f"{self.query}-*.parquet"):
            if known is None or int(left.name[len(self.query) + 1 :].partition("-")[0]) > known:
                left.unlink()
        for staged in (self.path / STAGING).glob(f"{self.query}-*"):
            shutil.rmtree(staged)


def _value(text: str) -> str | None:
    return None if text == _NULL else unquote(text)


def _check(path: Path, table: DeltaTable, schema: StructType, partition_by: Sequence[str]) -> None:
    there, now = _columns(delta.spark_schema(table)), _columns(schema)
    if there != now:
        differ = sorted(name for name in there.keys() | now.keys() if there.get(name) != now.get(name))
        told = "; ".join(f"{name} is {there.get(name, 'not there')}, now {now.get(name, 'missing')}" for name in differ)
        raise OperatorError(f"the rows do not fit table {path}: {told}")
    if tuple(table.metadata().partition_columns) != tuple(partition_by):
        of = ", ".join(table.metadata().partition_columns) or "nothing"
        raise OperatorError(f"table {path} is partitioned by {of}, not {', '.join(partition_by) or 'nothing'}")


def _columns(schema: StructType) -> dict[str, Any]:
    return {field.name: field.dataType.simpleString() for field in schema.fields}
