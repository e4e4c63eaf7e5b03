"""`headrace pipeline compact --latest`: the latest record of each key, as the table `latest/` of an archive.

Within a partition the greatest offset wins; if a key has records in several partitions, as after a topic was enlarged,
the latest timestamp does. A null value removes the key; records without a key are left out. Files are sorted by key.

The table is rebuilt from all records of its topics and replaced in one version, with the archive's version as the Delta
transaction `headrace-latest`. Keeping it up by increments would need every tombstone kept as well, since one in one
partition outlives older values that come in another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import functions as f

from headrace.arrow.archive import list_files, open_records, root_of
from headrace.records.arrow import TYPES
from headrace.spark import delta, faults, table_files
from headrace.spark.pipelines.summary import Progress, Summary

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

APPLICATION: Final = "headrace-latest"
FILE_BYTES: Final = 128 << 20
COLUMNS: Final = ("topic", "key", "partition", "offset", "timestamp", "timestampType", "value", "headers")
SCHEMA: Final = pa.schema([(name, TYPES[name]) for name in COLUMNS])
LAYOUT: Final = table_files.Layout(
    partition_by=("topic",),
    bounded=("partition", "offset", "timestamp"),
    row_group_rows=1 << 16,
    row_group_bytes=8 << 20,
    repeating=("partition", "timestampType"),
)


@dataclass(frozen=True, slots=True)
class Options:
    archive: Path
    topics: tuple[str, ...] = ()
    """None means all; others stay as they are in the table."""


def run(spark: SparkSession, options: Options, progress: Progress) -> Summary:
    records, latest = open_records(options.archive), _open_latest(options.archive)
    chosen = [file for file in list_files(records) if not options.topics or file.topic in options.topics]
    progress.say(f"finding the latest of {sum(file.rows for file in chosen)} records")
    files = -(-sum(file.size_bytes for file in chosen) // FILE_BYTES) or 1
    rows = (
        latest_per_key(table_files.read(spark, records, [file.path for file in chosen]))
        .select(*COLUMNS)
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
    progress.done()
    facts = {"keys": sum(file.rows for file in written), "archive_version": records.version()}
    return Summary("latest", facts)


def latest_per_key(records: DataFrame) -> DataFrame:
    last = f.struct("partition", "offset", "timestamp", "timestampType", "value", "headers")
    in_partition = (
        records.where(f.col("key").isNotNull())
        .groupBy("topic", "key", "partition")
        .agg(f.max_by(last, "offset").alias("last"))
    )
    newest = in_partition.groupBy("topic", "key").agg(
        f.max_by("last", f.struct("last.timestamp", "partition")).alias("last")
    )
    return newest.select("topic", "key", "last.*").where(f.col("value").isNotNull())


def _open_latest(archive: Path) -> DeltaTable:
    path = archive / "latest"
    if not delta.exists(path):
        DeltaTable.create(str(path), SCHEMA, mode="ignore", partition_by=list(LAYOUT.partition_by))
    return delta.open_table(path)
