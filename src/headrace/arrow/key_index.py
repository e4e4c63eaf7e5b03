"""The key index of an archive: `keys/`, a Delta table that says where records of a key lie. Read without Spark.

    keys/generation=N/*.parquet   hash, partition, offset, offset_span, timestamp_ms, timestamp_span_ms; sorted by hash

`hash` is XXH64 over topic and key (Spark's `xxhash64(topic, key)`). One row says that the key occurs in the partition
between two offsets, and between two timestamps; records of a key within one block of `BLOCK_OFFSETS` offsets share a
row, so a key of a million records has few. A row names offsets, not files: the archive's statistics give the file,
and compaction, which moves records between files, leaves the index as it is. Two keys of one hash are told apart by
the records themselves.

A generation covers the records that came between two versions of the archive. Its files cover a range of hashes each
and have small row groups with statistics, so that a lookup reads one row group per generation. The Delta transaction
`application(archive)` holds the archive's version up to which everything is indexed, and is committed with the rows:
a run that dies leaves the index as it was. Another archive's index, or none, counts as an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from headrace.arrow.locations import delta_table, is_delta_table, location, parquet_source

BLOCK_OFFSETS: Final = 1 << 16
ROW_GROUP_ROWS: Final = 1 << 14
HASH_SEED: Final = 42
SCHEMA: Final = pa.schema(
    [
        ("generation", pa.int64()),
        ("hash", pa.int64()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("offset_span", pa.int64()),
        ("timestamp_ms", pa.int64()),
        ("timestamp_span_ms", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets of one partition, the last one included."""

    partition: int
    first_offset: int
    last_offset: int


def folder(archive: str | Path) -> Path:
    return location(archive) / "keys"


def application(archive: DeltaTable) -> str:
    """The Delta application id under which the index of this table of records keeps its version."""
    return f"headrace-index-{archive.metadata().id}"


class KeyIndex:
    """The index of one table of records at the moment it was opened."""

    def __init__(self, archive_folder: str | Path, archive: DeltaTable) -> None:
        self._folder = folder(archive_folder)
        self._table = delta_table(self._folder) if is_delta_table(self._folder) else None
        covered = self._table.transaction_version(application(archive)) if self._table else None
        self.version: int | None = covered
        """The version of the archive up to which everything is indexed; None without an index."""

    def find(self, topic: str, key: bytes, from_ms: int | None = None, to_ms: int | None = None) -> list[Span]:
        """Where the key may occur, in no order; with times, where it may do so at or after one and before the other."""
        if self._table is None or self.version is None:
            return []
        hash = key_hash(topic, key)
        found = [rows for path in self._files(hash) for rows in _lookup(path, hash)]
        if not found:
            return []
        rows = pa.concat_tables(found)
        if from_ms is not None:
            rows = rows.filter(pc.greater_equal(pc.add(rows["timestamp_ms"], rows["timestamp_span_ms"]), from_ms))
        if to_ms is not None:
            rows = rows.filter(pc.less(rows["timestamp_ms"], to_ms))
        columns = [rows[name].to_pylist() for name in ("partition", "offset", "offset_span")]
        return [Span(partition, first, first + span) for partition, first, span in zip(*columns, strict=True)]

    def _files(self, hash: int) -> Iterator[Path]:
        assert self._table is not None
        listed = pa.table(self._table.get_add_actions(flatten=True))
        if not listed.num_rows:
            return
        covering = pc.and_(pc.less_equal(listed["min.hash"], hash), pc.greater_equal(listed["max.hash"], hash))
        for path in listed.filter(covering)["path"].to_pylist():
            yield self._folder / path


def _lookup(path: Path, hash: int) -> Iterator[Any]:
    """The rows of one file, which is sorted by hash."""
    with pq.ParquetFile(parquet_source(path), pre_buffer=False) as file:
        nth = file.schema_arrow.get_field_index("hash")
        groups = []
        for group in range(file.num_row_groups):
            known = file.metadata.row_group(group).column(nth).statistics
            if known.max < hash:
                continue
            if known.min > hash:
                break
            groups.append(group)
        if groups:
            rows = file.read_row_groups(groups, use_threads=False)
            yield rows.filter(pc.equal(rows["hash"], hash))


_MASK: Final = (1 << 64) - 1
_P1: Final = 0x9E3779B185EBCA87
_P2: Final = 0xC2B2AE3D27D4EB4F
_P3: Final = 0x165667B19E3779F9
_P4: Final = 0x85EBCA77C2B2AE63
_P5: Final = 0x27D4EB2F165667C5


def key_hash(topic: str, key: bytes) -> int:
    """Spark's `xxhash64(topic, key)`, as a signed number: each column is hashed with the hash before it as its seed."""
    hashed = xxh64(key, xxh64(topic.encode(), HASH_SEED))
    return hashed - (1 << 64) if hashed >> 63 else hashed


def xxh64(data: bytes, seed: int) -> int:
    """XXH64 as its specification gives it, unsigned."""
    length, at = len(data), 0
    if length >= 32:
        lanes = [(seed + _P1 + _P2) & _MASK, (seed + _P2) & _MASK, seed, (seed - _P1) & _MASK]
        while at + 32 <= length:
            for lane in range(4):
                lanes[lane] = _round(lanes[lane], _word(data, at + 8 * lane, 8))
            at += 32
        turns = zip(lanes, (1, 7, 12, 18), strict=True)
        hashed = sum(_rotate(lane, bits) for lane, bits in turns) & _MASK
        for lane in lanes:
            hashed = ((hashed ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        hashed = (seed + _P5) & _MASK
    hashed = (hashed + length) & _MASK
    while at + 8 <= length:
        hashed = (_rotate(hashed ^ _round(0, _word(data, at, 8)), 27) * _P1 + _P4) & _MASK
        at += 8
    if at + 4 <= length:
        hashed = (_rotate(hashed ^ (_word(data, at, 4) * _P1 & _MASK), 23) * _P2 + _P3) & _MASK
        at += 4
    for byte in data[at:]:
        hashed = _rotate(hashed ^ (byte * _P5 & _MASK), 11) * _P1 & _MASK
    hashed = (hashed ^ hashed >> 33) * _P2 & _MASK
    hashed = (hashed ^ hashed >> 29) * _P3 & _MASK
    return hashed ^ hashed >> 32


def _word(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def _round(lane: int, word: int) -> int:
    return _rotate((lane + word * _P2) & _MASK, 31) * _P1 & _MASK
