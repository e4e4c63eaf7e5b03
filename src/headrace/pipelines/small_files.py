"""The small files of an archive, merged by size while it runs: `headrace pipeline archive --merge`.

A batch leaves a file for each partition and date. Neighbours, files of one partition and date whose offsets follow each
other, become one file when there are `fan_in` of about the same size, as in the levels of a log-structured tree: a
record is written again a few times in all. Where nothing came for `REST_MS`, all small neighbours become one. Their
rows are in order already, so a merge copies one after the other, needs no Spark, and is done between two looks at the
query, by the one process that holds the archive.

A merge is one version of the table, as in `headrace.pipelines.compact`: killed before it, the table is as it was, and
the larger file, which no version names, goes with the next sweep. Replaced files stay for readers of former versions,
and vacuum removes them at a safe age.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from headrace.arrow.archive import File, list_files, root_of
from headrace.arrow.locations import parquet_source
from headrace.errors import OperatorError
from headrace.pipelines import compact, delta, table_files
from headrace.pipelines.archive_tables import MERGED, RECORDS
from headrace.spark import faults

FAN_IN: Final = 8
REST_MS: Final = 3_600_000
# By one commit, and between two looks at the query: a signal and the consumer group wait for it.
STEP_BYTES: Final = 256 << 20
VACUUM_EVERY_S: Final = 3600.0
BATCH_ROWS: Final = 1 << 16
LAYOUT: Final = replace(compact.LAYOUT, name=MERGED)


@dataclass(frozen=True, slots=True)
class MergeOptions:
    target_bytes: int = 128 << 20
    vacuum_hours: int = 24
    """The age at which files that were replaced are removed; a reader that takes longer may miss one."""
    fan_in: int = FAN_IN


def plan(files: Iterable[File], options: MergeOptions, now_ms: int) -> list[list[File]]:
    """Neighbours that are to become one file, each list in the order of offsets."""
    known = [file for file in files if _partition(file) is not None]
    bins: list[list[File]] = []
    for _, group in groupby(sorted(known, key=_order), key=lambda file: _order(file)[:3]):
        ordered = list(group)
        is_at_rest = now_ms - max(file.modified_ms for file in ordered) >= REST_MS
        for some in _runs(ordered, lambda file: file.size_bytes < compact.SMALL_PART * options.target_bytes):
            bins += _cut(some, options.target_bytes) if is_at_rest else _full_level(some, options)
    return bins


def _partition(file: File) -> int | None:
    """None of files that hold several, or say nothing of it: they are for `compact`, which sorts."""
    bounds = file.bounds
    if bounds.partition is None or bounds.offset is None or bounds.partition[0] != bounds.partition[1]:
        return None
    return bounds.partition[0]


def _order(file: File) -> tuple[str, str, int, int]:
    return file.topic, file.date, _partition(file) or 0, _offsets(file)[0]


def _runs(files: Iterable[File], chosen: Callable[[File], bool]) -> Iterator[list[File]]:
    """Files that are chosen and follow each other; one that overlaps the one before it begins anew."""
    run: list[File] = []
    for file in files:
        follows = not run or _offsets(run[-1])[1] < _offsets(file)[0]
        if run and not (follows and chosen(file)):
            yield run
            run = []
        if chosen(file):
            run.append(file)
    if run:
        yield run


def _offsets(file: File) -> tuple[int, int]:
    assert file.bounds.offset is not None
    return file.bounds.offset


def _full_level(run: list[File], options: MergeOptions) -> list[list[File]]:
    """Of the lowest level that is full, the runs of files of this level and below."""
    levels = {file.path: int(math.log(max(1, file.size_bytes), options.fan_in)) for file in run}
    for level in sorted(set(levels.values())):
        low = {path for path, its in levels.items() if its <= level}
        full = [some for some in _runs(run, lambda file: file.path in low) if _is_full(some, options.fan_in)]  # noqa: B023
        if full:
            return [files for some in full for files in _cut(some, options.target_bytes)]
    return []


def _is_full(run: list[File], fan_in: int) -> bool:
    """Many files, and none that makes up most of it: what is written again becomes part of something much larger."""
    sizes = [file.size_bytes for file in run]
    return len(run) >= fan_in and sum(sizes) >= fan_in / 2 * max(sizes)


def _cut(run: list[File], target_bytes: int) -> list[list[File]]:
    """Parts of at most the target size; one file alone stays as it is."""
    parts: list[list[File]] = [[]]
    for file in run:
        if parts[-1] and sum(each.size_bytes for each in parts[-1]) + file.size_bytes > target_bytes:
            parts.append([])
        parts[-1].append(file)
    return [part for part in parts if len(part) > 1]


class SmallFiles:
    """The table of records of an archive that this process holds alone."""

    def __init__(self, archive: Path, options: MergeOptions) -> None:
        self._archive = archive
        self._options = options
        self._vacuumed_at = -math.inf
        self._commits = 0
        self.merged = 0
        self.written = 0
        self.removed = 0

    def merge_all(self) -> None:
        """Until nothing is left that is worth it; then vacuum."""
        while self.merge_some():
            pass
        self._vacuum()

    def merge_some(self) -> bool:
        """As much as one commit takes. False if there was nothing to merge."""
        table = delta.open_table(self._archive / RECORDS)
        bins = _first(plan(list_files(table), self._options, int(time.time() * 1000)))
        if not bins:
            if time.monotonic() - self._vacuumed_at >= VACUUM_EVERY_S:
                self._vacuum()
            return False
        try:
            written = [_merge(table, files) for files in bins]
            faults.reached("merge-written", self._commits)
            compact.commit(table, bins, written)
        except table_files.FilesGone:
            # `headrace pipeline compact` was quicker. What was written goes with the next sweep.
            return True
        faults.reached("merge-committed", self._commits)
        self._commits += 1
        self.merged += sum(map(len, bins))
        self.written += len(written)
        return True

    def _vacuum(self) -> None:
        self._vacuumed_at = time.monotonic()
        self.removed += table_files.vacuum(delta.open_table(self._archive / RECORDS), self._options.vacuum_hours)


def _first(bins: list[list[File]]) -> list[list[File]]:
    """So many that a step takes, and one at least."""
    taken: list[list[File]] = []
    size = 0
    for files in bins:
        size += sum(file.size_bytes for file in files)
        if taken and size > STEP_BYTES:
            break
        taken.append(files)
    return taken


def _merge(table: DeltaTable, files: list[File]) -> table_files.Written:
    """The rows of neighbours in one new file. A column that came to the table later is null in older files."""
    columns = pa.schema(table.schema().to_arrow())
    inside = pa.schema([field for field in columns if field.name not in LAYOUT.partition_by])
    values = {"topic": files[0].topic, "date": files[0].date}
    merged = table_files.TableFile(root_of(table), values, inside, LAYOUT)
    try:
        for file in files:
            with pq.ParquetFile(parquet_source(root_of(table) / file.path), pre_buffer=False) as opened:
                for rows in opened.iter_batches(BATCH_ROWS):
                    merged.append(_shaped(rows, inside))
        return merged.close()
    except BaseException as error:
        merged.discard()
        if isinstance(error, OSError):
            raise _unmergeable(table, files, error) from None
        raise


def _unmergeable(table: DeltaTable, files: list[File], error: OSError) -> OperatorError:
    table.update_incremental()
    if not {file.path for file in files} <= delta.paths(table):
        return table_files.FilesGone(f"files of {table.table_uri} were replaced and removed by another run")
    return OperatorError(
        f"files of {root_of(table)} cannot be merged: {error.strerror or error}; they are as they were, and the "
        "archive goes on where it ended when it is run again"
    )


def _shaped(rows: pa.RecordBatch, columns: pa.Schema) -> pa.Table:
    arrays = [
        rows[field.name].cast(field.type) if field.name in rows.schema.names else pa.nulls(len(rows), field.type)
        for field in columns
    ]
    return pa.Table.from_arrays(arrays, schema=columns)
