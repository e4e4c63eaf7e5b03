"""`headrace pipeline index`: (topic, key) -> where in the archive, for lookups without Spark.

The table is described in `headrace.arrow.key_index`. A run indexes what came to the archive since the last one and
commits it with the archive's version, so it may be killed at any point and run again. New rows absorb the generations
before them that are not much larger, so there are few generations and each row is rewritten a few times in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import functions as f

from headrace.arrow import key_index
from headrace.arrow.archive import list_files, open_records, root_of, unknown_since
from headrace.pipelines import delta, table_files
from headrace.pipelines.summary import Progress, Summary, rate
from headrace.spark import faults

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FILE_ROWS: Final = 4_000_000
# A generation is merged into the new one unless it has this many times the rows.
ABSORBED_TIMES: Final = 4
# Files of generations that were absorbed stay this long for queries that read them, and so do those of killed runs.
KEPT_HOURS: Final = 24
LAYOUT: Final = table_files.Layout(
    partition_by=("generation",),
    bounded=("hash",),
    row_group_rows=key_index.ROW_GROUP_ROWS,
    ascending=key_index.SCHEMA.names[1:],
)


@dataclass(frozen=True, slots=True)
class IndexOptions:
    archive: Path
    rebuild: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    number: int
    rows: int
    paths: tuple[str, ...]


def run(spark: SparkSession, options: IndexOptions, progress: Progress) -> Summary:
    records = open_records(options.archive)
    keys = _open_keys(options.archive)
    application = key_index.application(records)
    covered = None if options.rebuild else keys.transaction_version(application)
    new = unknown_since(records, covered)
    facts = {"archive_version": records.version(), "files_indexed": len(new)}
    if covered == records.version():
        return Summary("index", {**facts, "records_indexed": 0, **_size(keys)})
    generations = _generations(keys)
    absorbed = generations if covered is None else _absorbed(generations, _rows(records, new))
    kept = [] if covered is None else absorbed
    progress.say(f"indexing {len(new)} files, merging {len(kept)} generations")
    written: list[table_files.Written] = []
    if new or kept:
        rows = _entries(table_files.read(spark, records, new))
        if kept:
            rows = rows.unionByName(table_files.read(spark, keys, _paths(kept)).drop("generation"))
        expected = _rows(records, new) + sum(each.rows for each in kept)
        written = table_files.write(_placed(rows, expected, keys.version() + 1), root_of(keys), LAYOUT)
    faults.reached("index-written", 0)
    table_files.replace(
        keys,
        _paths(absorbed),
        written,
        partition_by=LAYOUT.partition_by,
        data_change=True,
        transactions={application: records.version()},
    )
    faults.reached("index-committed", 0)
    table_files.vacuum(keys, KEPT_HOURS)
    progress.done()
    indexed = _rows(records, new)
    return Summary(
        "index", {**facts, "records_indexed": indexed, **_size(keys), "rate": rate(indexed, progress.elapsed_s)}
    )


def _entries(records: DataFrame) -> DataFrame:
    """One row per key, partition and block of offsets."""
    timestamp_ms = f.unix_millis("timestamp")
    return (
        records.where(f.col("key").isNotNull())
        .groupBy(
            f.xxhash64("topic", "key").alias("hash"),
            "partition",
            f.shiftright("offset", key_index.BLOCK_OFFSETS.bit_length() - 1).alias("block"),
        )
        .agg(
            f.min("offset").alias("offset"),
            (f.max("offset") - f.min("offset")).alias("offset_span"),
            f.min(timestamp_ms).alias("timestamp_ms"),
            (f.max(timestamp_ms) - f.min(timestamp_ms)).alias("timestamp_span_ms"),
        )
        .drop("block")
    )


def _placed(entries: DataFrame, expected_rows: int, generation: int) -> DataFrame:
    """Sorted by hash over files of even ranges: hashes are evenly spread, so no sampling is needed."""
    files = max(1, -(-expected_rows // FILE_ROWS))
    columns = [f.lit(generation).cast("long").alias("generation"), *key_index.SCHEMA.names[1:]]
    return (
        entries.repartitionById(files, _range_of("hash", files))
        .select(*columns)
        .sortWithinPartitions("hash", "partition", "offset")
    )


def _range_of(column: str, ranges: int) -> Column:
    """Which of so many even ranges of 64-bit numbers a number is in."""
    return f.least(((f.col(column) / 2.0**64 + 0.5) * ranges).cast("int"), f.lit(ranges - 1))


def _open_keys(archive: Path) -> DeltaTable:
    path = key_index.folder(archive)
    if not delta.exists(path):
        delta.create(path, key_index.SCHEMA, LAYOUT.partition_by)
    return delta.open_table(path)


def _generations(keys: DeltaTable) -> list[Generation]:
    """Newest first."""
    listed = pa.table(keys.get_add_actions(flatten=True))
    if not listed.num_rows:
        return []
    files = listed.select(["partition.generation", "num_records", "path"]).to_pylist()
    numbers = sorted({file["partition.generation"] for file in files}, reverse=True)
    mine = {number: [file for file in files if file["partition.generation"] == number] for number in numbers}
    return [
        Generation(number, sum(file["num_records"] for file in of), tuple(file["path"] for file in of))
        for number, of in mine.items()
    ]


def _absorbed(generations: list[Generation], new_rows: int) -> list[Generation]:
    """The newest generations, up to the first that is much larger than all that is newer."""
    chosen, rows = [], new_rows
    for generation in generations:
        if generation.rows > ABSORBED_TIMES * rows:
            break
        chosen.append(generation)
        rows += generation.rows
    return chosen


def _paths(generations: list[Generation]) -> list[str]:
    return [path for generation in generations for path in generation.paths]


def _rows(records: DeltaTable, paths: set[str]) -> int:
    return sum(file.rows for file in list_files(records) if file.path in paths)


def _size(keys: DeltaTable) -> dict[str, int]:
    generations = _generations(keys)
    sizes = pa.table(keys.get_add_actions(flatten=True))["size_bytes"].to_pylist()
    return {
        "index_rows": sum(each.rows for each in generations),
        "index_bytes": sum(sizes),
        "generations": len(generations),
    }
