"""Archives made without a broker: records in a Delta table as `headrace pipeline archive` lays it out."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from headrace.records.arrow import HEADERS_TYPE, TIMESTAMP_TYPE

COLUMNS: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("date", pa.date32()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", TIMESTAMP_TYPE),
        ("timestampType", pa.int32()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", HEADERS_TYPE),
    ]
)
MIDNIGHT_MS: Final = int(datetime(2026, 11, 15, tzinfo=UTC).timestamp() * 1000)


@dataclass(frozen=True, slots=True)
class Row:
    """A record of an archive, in an order that tests compare."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def append(archive: Path, rows: Iterable[Row], mixed: bool = False) -> None:
    """A file per topic, date and partition as the archive makes them; or `mixed`, one for all partitions."""
    rows = list(rows)
    for partition in [None] if mixed else sorted({row.partition for row in rows}):
        _append(archive, [row for row in rows if partition in (None, row.partition)])


def _append(archive: Path, rows: Iterable[Row]) -> None:
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS.names}
    for row in rows:
        at = datetime.fromtimestamp(row.timestamp_ms / 1000, UTC)
        headers = [{"key": name, "value": value} for name, value in row.headers] or None
        cells = (row.topic, at.date(), row.partition, row.offset, at, 0, row.key, row.value, headers)
        for name, cell in zip(COLUMNS.names, cells, strict=True):
            columns[name].append(cell)
    table = pa.table(columns, schema=COLUMNS)
    write_deltalake(str(archive / "records"), table, mode="append", partition_by=["topic", "date"])


def rows_of(archive: Path) -> list[Row]:
    """Everything in the table, by a reader that is not ours, sorted."""
    found = DeltaTable(str(archive / "records")).to_pyarrow_table().to_pylist()
    rows = [
        Row(
            row["topic"], row["partition"], row["offset"], round(row["timestamp"].timestamp() * 1000),
            row["key"], row["value"], tuple((header["key"], header["value"]) for header in row["headers"] or ()),
        )
        for row in found
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row.topic, row.partition, row.offset))


class Traffic:
    """Records as they come: offsets go on per partition, keys repeat, some are binary, empty or missing."""

    def __init__(self, seed: int, topics: Sequence[str] = ("123", "orders"), partitions: int = 2) -> None:
        self._random = random.Random(seed)
        self._next = {(topic, partition): 0 for topic in topics for partition in range(partitions)}

    def rows(self, count: int) -> list[Row]:
        """So many records for each partition; ten minutes apart, so that days end in between."""
        rows = []
        for topic, partition in self._next:
            first = self._next[topic, partition]
            self._next[topic, partition] += count
            rows += [self._row(topic, partition, offset) for offset in range(first, first + count)]
        return rows

    def key(self) -> bytes | None:
        drawn = self._random.randrange(60)
        if drawn < 3:
            return None
        if drawn < 6:
            return b""
        return bytes([0xFF, 0x00, drawn]) if drawn < 15 else b"key-%d" % (drawn % 40)

    def _row(self, topic: str, partition: int, offset: int) -> Row:
        value = None if self._random.random() < 0.1 else f"{topic} {partition} {offset}".encode()
        headers = (("trace", b"\x01"), ("empty", None)) if self._random.random() < 0.2 else ()
        at_ms = MIDNIGHT_MS + offset * 600_000 + partition
        return Row(topic, partition, offset, at_ms, self.key(), value, headers)
