"""`headrace pipeline compact`: an archive's small files merged, each new file one partition in the order of offsets.

Small files of one topic, date and partition are put into bins of the target size; a bin becomes one file. All bins are
committed as one version of the table that removes the old files and adds the new ones (`dataChange` false: no row comes
or goes). Records archived meanwhile stay; if another run has replaced one of the files, this one plans again. A run
that is killed before its commit leaves the table as it was and files that no version names.

`deltalake`'s own `optimize.compact` keeps the order of files, not of offsets, mixes partitions in a file and writes row
groups of a million rows; its files answer a lookup by offset by reading most of a file, and the archive would have to
open them to learn how far each partition is.

Old files stay for readers of earlier versions until vacuum removes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deltalake import DeltaTable
from pyspark.sql import functions as f

from headrace.arrow.archive import File, list_files, open_records, root_of
from headrace.errors import OperatorError
from headrace.pipelines import table_files
from headrace.pipelines.summary import Progress, Summary, Table
from headrace.spark import faults

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLANS: Final = 3
# Files this large stay as they are, so that a record is rewritten a few times in all.
SMALL_PART: Final = 0.5
LAYOUT: Final = table_files.Layout(
    partition_by=("topic", "date"),
    bounded=("partition", "offset", "timestamp"),
    row_group_rows=1 << 16,
    row_group_bytes=8 << 20,
    cut_by=("partition",),
    ascending=("offset", "timestamp"),
    repeating=("partition", "timestampType"),
)


@dataclass(frozen=True, slots=True)
class CompactOptions:
    archive: Path
    topics: tuple[str, ...] = ()
    """None means all."""
    target_bytes: int = 128 << 20
    older_than_ms: int | None = None
    """Only files that were written before this time."""
    vacuum_hours: int | None = None
    """Remove files that no version of so many hours needs."""


def run(spark: SparkSession, options: CompactOptions, progress: Progress) -> Summary:
    table = open_records(options.archive)
    before = list_files(table)
    bins: list[list[File]] = []
    written: list[table_files.Written] = []
    for attempt in range(PLANS):
        bins = plan(list_files(table), options)
        if not bins:
            break
        progress.say(f"merging {sum(map(len, bins))} files into {len(bins)}")
        written = _merge(spark, table, bins)
        faults.reached("compact-written", 0)
        try:
            commit(table, bins, written)
            break
        except table_files.FilesGone:
            if attempt == PLANS - 1:
                raise
    faults.reached("compact-committed", 0)
    removed = 0 if options.vacuum_hours is None else table_files.vacuum(table, options.vacuum_hours)
    progress.done()
    return _summary(before, bins, written, table, removed)


def plan(files: Iterable[File], options: CompactOptions) -> list[list[File]]:
    """Bins of two small files or more, which have topic, date and partition in common, in the order of offsets."""
    small = [
        file
        for file in files
        if file.size_bytes < SMALL_PART * options.target_bytes
        and (not options.topics or file.topic in options.topics)
        and (options.older_than_ms is None or file.modified_ms < options.older_than_ms)
    ]
    bins: list[list[File]] = []
    for _, group in groupby(sorted(small, key=_order), key=lambda file: _order(file)[:3]):
        current: list[File] = []
        for file in group:
            if current and sum(each.size_bytes for each in current) + file.size_bytes > options.target_bytes:
                bins.append(current)
                current = []
            current.append(file)
        bins.append(current)
    return [files for files in bins if len(files) > 1]


def _order(file: File) -> tuple[str, str, int, int]:
    """Files of several partitions, or of unknown ones, are binned together; they are cut when they are written."""
    partition, offset = file.bounds.partition, file.bounds.offset
    single = partition is not None and partition[0] == partition[1]
    return file.topic, file.date, partition[0] if single and partition else -1, offset[0] if offset else 0


def _merge(spark: SparkSession, table: DeltaTable, bins: list[list[File]]) -> list[table_files.Written]:
    paths = [file.path for files in bins for file in files]
    numbers = [(Path(file.path).name, number) for number, files in enumerate(bins) for file in files]
    bin_of = f.broadcast(spark.createDataFrame(numbers, "file_name string, bin int"))
    rows = table_files.read(spark, table, paths, with_file_name=True)
    merged = (
        rows.join(bin_of, "file_name")
        .repartitionById(len(bins), f.col("bin"))
        .sortWithinPartitions("partition", "offset")
        .drop("file_name", "bin")
    )
    return table_files.write(merged, root_of(table), LAYOUT)


def commit(table: DeltaTable, bins: list[list[File]], written: list[table_files.Written]) -> None:
    """Put the files that were written in the place of those in the bins, if they have as many records."""
    read, kept = sum(file.rows for files in bins for file in files), sum(file.rows for file in written)
    if read != kept:
        raise OperatorError(
            f"{table.table_uri} has {read} records in files to merge, and {kept} came out: not committed"
        )
    paths = [file.path for files in bins for file in files]
    table_files.replace(table, paths, written, partition_by=LAYOUT.partition_by, data_change=False)


def _summary(
    before: list[File], bins: list[list[File]], written: list[table_files.Written], table: DeltaTable, removed: int
) -> Summary:
    after = list_files(table)
    topics = sorted({file.topic for file in before})
    rows = [
        {
            "topic": topic,
            "files_before": sum(file.topic == topic for file in before),
            "files_after": sum(file.topic == topic for file in after),
            "records": sum(file.rows for file in after if file.topic == topic),
            "bytes": sum(file.size_bytes for file in after if file.topic == topic),
        }
        for topic in topics
    ]
    facts = {
        "files_merged": sum(map(len, bins)),
        "files_written": len(written) if bins else 0,
        "files_removed_from_disk": removed,
        "version": table.version(),
    }
    return Summary("compact", facts, [Table("topics", list(rows[0]) if rows else [], rows)] if rows else [])
