"""One version of a table of an archive: what both kinds of tables, Delta and Iceberg, are asked."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.arrow.archive import File
from headrace.arrow.locations import parquet_source

Place = tuple[str, int]
"""Topic and partition."""


class TableVersion(Protocol):
    """`root` is the table's folder; paths of files are below it."""

    root: Path

    def files(self) -> list[File]:
        """Of this version, with what the table knows of each."""

    def paths(self) -> set[str]:
        """Of this version."""

    def named_paths(self) -> set[str]:
        """Also those of earlier versions, which readers may be at."""

    def transaction_version(self, app_id: str) -> int | None:
        """The last batch of a query that the table has."""

    def last_writer(self) -> tuple[str, int] | None:
        """Query and batch of the newest commit that has such."""

    def is_set_back(self) -> bool:
        """Whether rows of batches that it has had were taken from it since the last batch came."""

    def next_offsets(self, topics: Iterable[str] | None = None) -> dict[Place, int]:
        """One more than the last offset that the table has, for each partition it has anything of."""


def looked_into(root: Path, path: str, topic: str | None) -> pa.Table:
    """Topic, partition and offset of all records of a file; the topic is None where the file has it inside."""
    inside = ["partition", "offset"] if topic is not None else ["topic", "partition", "offset"]
    rows = pq.read_table(parquet_source(root / path), columns=inside, partitioning=None)
    return rows if topic is None else rows.append_column("topic", pa.repeat(topic, len(rows)))
