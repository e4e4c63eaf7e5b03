"""What files an archive has, and what is in them, from the tables' logs and the files' own statistics."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.arrow.locations import parquet_source
from headrace.arrow.stored_table import file_sink_files
from headrace.pipelines import archive_tables
from headrace.pipelines.archive_tables import DEAD_LETTERS, RECORDS, Offsets


def listed(archive: Path, kind: str) -> set[Path]:
    """Files that count, of records and dead letters; those that a writer left behind are not among them."""
    if kind == "parquet":
        return file_sink_files(archive / RECORDS)
    tables = [archive_tables.opened(archive, name) for name in (RECORDS, DEAD_LETTERS)]
    return {table.root / path for table in tables if table is not None for path in table.paths()}


def describe(archive: Path, files: Iterable[Path], since: Offsets | None = None) -> list[dict[str, Any]]:
    """By topic and partition: records, dead letters, bytes, files, and the offsets they reach over.

    Of files that were made of older ones too counts what has offsets `since` then, and its share of the bytes.
    """
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for file in sorted(files):
        meta = pq.read_metadata(parquet_source(file))
        stats = _statistics(meta)
        partition, (first, last) = stats["partition"][0], stats["offset"]
        dead = file.is_relative_to(archive / DEAD_LETTERS)
        topic = stats["topic"][0] if dead else _topic(file)
        count, size, known = meta.num_rows, file.stat().st_size, (since or {}).get((topic, partition), 0)
        if first < known and not dead:
            offsets = pq.read_table(parquet_source(file), columns=["offset"], partitioning=None)["offset"]
            fresh = offsets.filter(pc.greater_equal(offsets, known))
            if not len(fresh):
                continue
            count, size, first = len(fresh), size * len(fresh) // meta.num_rows, pc.min(fresh).as_py()
        row = rows.setdefault(
            (topic, partition),
            {
                "topic": topic, "partition": partition, "records": 0, "dead_letters": 0, "bytes": 0, "files": 0,
                "first_offset": first, "next_offset": last + 1,
            },
        )  # fmt: skip
        row["dead_letters" if dead else "records"] += count
        row["bytes"] += size
        row["files"] += 1
        row["first_offset"] = min(row["first_offset"], first)
        row["next_offset"] = max(row["next_offset"], last + 1)
    return [rows[place] for place in sorted(rows)]


def _topic(file: Path) -> str:
    return next(part.partition("=")[2] for part in file.parts if part.startswith("topic="))


def _statistics(meta: pq.FileMetaData) -> dict[str, tuple[Any, Any]]:
    """Least and greatest over all row groups, of the columns that have them."""
    found: dict[str, tuple[Any, Any]] = {}
    for group in range(meta.num_row_groups):
        for nth in range(meta.num_columns):
            column = meta.row_group(group).column(nth)
            if column.statistics is not None and column.statistics.has_min_max:
                name, low, high = column.path_in_schema, column.statistics.min, column.statistics.max
                least, most = found.get(name, (low, high))
                found[name] = (min(least, low), max(most, high))
    return found
