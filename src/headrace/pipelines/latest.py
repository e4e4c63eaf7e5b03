"""`headrace pipeline compact --latest`: the latest record of each key, as the table `latest/` of an archive.

Within a partition the greatest offset wins; if a key has records in several partitions, as after a topic was enlarged,
the latest timestamp does. A null value removes the key; records without a key are left out. Files are sorted by key.
Decoded columns come along; where the archive keeps no value beside them, a record is null if all of them are.

The table is rebuilt from all records of its topics and replaced in one version, with the archive's version as the Delta
transaction `headrace-latest`. Keeping it up by increments would need every tombstone kept as well, since one in one
partition outlives older values that come in another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import DeltaTable, Schema
from pyspark.sql import functions as f

from headrace.arrow.archive import list_files, open_records, root_of
from headrace.pipelines import delta, table_files
from headrace.pipelines.summary import Progress, Summary
from headrace.spark import faults

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

APPLICATION: Final = "headrace-latest"
FILE_BYTES: Final = 128 << 20
# Files that were replaced stay this long for those who read them.
KEPT_HOURS: Final = 24
# Of a record that is there; the others are its content.
WHERE: Final = ("topic", "date", "key", "partition", "offset", "timestamp", "timestampType", "headers")
LAYOUT: Final = table_files.Layout(
    partition_by=("topic",),
    bounded=("partition", "offset", "timestamp"),
    row_group_rows=1 << 16,
    row_group_bytes=8 << 20,
    repeating=("partition", "timestampType"),
)


@dataclass(frozen=True, slots=True)
class LatestOptions:
    archive: Path
    topics: tuple[str, ...] = ()
    """None means all; others stay as they are in the table."""


def run(spark: SparkSession, options: LatestOptions, progress: Progress) -> Summary:
    records = open_records(options.archive)
    latest = _open_latest(options.archive, records)
    chosen = [file for file in list_files(records) if not options.topics or file.topic in options.topics]
    progress.say(f"finding the latest of {sum(file.rows for file in chosen)} records")
    files = -(-sum(file.size_bytes for file in chosen) // FILE_BYTES) or 1
    rows = (
        latest_per_key(table_files.read(spark, records, [file.path for file in chosen]))
        .select(*delta.spark_schema(latest).fieldNames())
        .repartition(files, "topic", "key")
        .sortWithinPartitions("topic", "key")
    )
    written = table_files.write(rows, root_of(latest), LAYOUT) if chosen else []
    faults.reached("latest-written", 0)
    listed = pa.table(latest.get_add_actions(flatten=True)).to_pylist()
    old = [row["path"] for row in listed if not options.topics or row["partition.topic"] in options.topics]
    transactions = {} if options.topics else {APPLICATION: records.version()}
    table_files.replace(
        latest, old, written, partition_by=LAYOUT.partition_by, data_change=True, transactions=transactions
    )
    table_files.vacuum(latest, KEPT_HOURS)
    progress.done()
    facts = {"keys": sum(file.rows for file in written), "archive_version": records.version()}
    return Summary("latest", facts)


def latest_per_key(records: DataFrame) -> DataFrame:
    content = [name for name in records.columns if name not in WHERE]
    last = f.struct(*(name for name in records.columns if name not in ("topic", "date", "key")))
    in_partition = (
        records.where(f.col("key").isNotNull())
        .groupBy("topic", "key", "partition")
        .agg(f.max_by(last, "offset").alias("last"))
    )
    newest = in_partition.groupBy("topic", "key").agg(
        f.max_by("last", f.struct("last.timestamp", "partition")).alias("last")
    )
    return newest.select("topic", "key", "last.*").where(f.coalesce(*map(_is_there, content), f.lit(False)))


def _is_there(column: str) -> Column:
    """True, or null."""
    return f.when(f.col(column).isNotNull(), True)


def _open_latest(archive: Path, records: DeltaTable) -> DeltaTable:
    """The table, with all columns of the archive but the date."""
    path = archive / "latest"
    fields = [field for field in records.schema().fields if field.name != "date"]
    if not delta.exists(path):
        delta.create(path, Schema(fields), LAYOUT.partition_by)
    table = delta.open_table(path)
    known = {field.name for field in table.schema().fields}
    if missing := [field for field in fields if field.name not in known]:
        table.alter.add_columns(missing)
        delta.sync_version(path, table.version())
    return delta.open_table(path)
