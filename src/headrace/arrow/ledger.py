"""A ledger: which records a producer had acknowledged, and where they went. What an audit holds the stores against.

A folder of Parquet files with a row per acknowledged record:

    producer   string                 who sent it; a name that no other run has
    sequence   int64                  place in the producer's order of sending, from 0
    topic      string
    partition  int32
    offset     int64                  null when the broker said only that it had the record already
    timestamp  timestamp[us, UTC]     the record's own
    digest     int64                  of key, value and headers (`headrace.records.arrow.digest`)

A row is added after its acknowledgement, and files get their names when they are whole: a killed producer claims less
than was acknowledged, never more. Many producers may share a folder.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from headrace.arrow.rolling_files import FILE_ROWS, INTERVAL_MS, RollingFiles
from headrace.records.arrow import HEADERS_TYPE, TIMESTAMP_TYPE, digests

SCHEMA: Final = pa.schema(
    [
        ("producer", pa.string()),
        ("sequence", pa.int64()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", TIMESTAMP_TYPE),
        ("digest", pa.int64()),
    ]
)


RecordSent = tuple[int, bytes | None, bytes | None, Iterable[tuple[str, bytes | None]]]
"""Timestamp in ms, key, value, headers."""


def producer_name(kind: str) -> str:
    """A name for a producer of this process that no other run has."""
    return f"{kind}-{socket.gethostname()}-{uuid.uuid4().hex[:12]}"


def counting_from(first: int, count: int) -> pa.Array:
    """`count` whole numbers, rising by one."""
    return pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), count), start=pa.scalar(first - 1, pa.int64()))


class Ledger:
    """The ledger of one producer. Use as a context manager, or close it: what waits is written then."""

    def __init__(
        self, folder: str | Path, producer: str, *, file_rows: int = FILE_ROWS, interval_ms: int = INTERVAL_MS
    ) -> None:
        self.producer = producer
        self._files = RollingFiles(
            folder, producer, SCHEMA, file_rows=file_rows, interval_ms=interval_ms, rising=("sequence", "offset")
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(
        self,
        topic: str,
        partition: int,
        base_offset: int | None,
        sequences: pa.Array,
        timestamps: pa.Array,
        digests: pa.Array,
    ) -> None:
        """One acknowledged batch: its records have offsets from `base_offset` on."""
        rows = len(sequences)
        offsets = pa.nulls(rows, pa.int64()) if base_offset is None else counting_from(base_offset, rows)
        self.add_rows(topic, pa.repeat(pa.scalar(partition, pa.int32()), rows), offsets, sequences, timestamps, digests)

    def add_rows(
        self,
        topic: str,
        partitions: pa.Array,
        offsets: pa.Array,
        sequences: pa.Array,
        timestamps: pa.Array,
        digests: pa.Array,
    ) -> None:
        """Acknowledged records, each with its own place."""
        rows = len(sequences)
        columns = [
            pa.repeat(self.producer, rows),
            sequences,
            pa.repeat(topic, rows),
            partitions,
            offsets,
            timestamps.cast(TIMESTAMP_TYPE),
            digests,
        ]
        self._files.add(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))

    def close(self) -> None:
        self._files.close()


def add_records(
    ledger: Ledger,
    topic: str,
    partition: int,
    base_offset: int | None,
    sequences: Iterable[int],
    records: Iterable[RecordSent],
) -> None:
    """An acknowledged batch of records that are Python objects, such as lines of input."""
    times, keys, values, headers = zip(*records, strict=True)
    rows = pa.RecordBatch.from_pydict(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": pa.array([list(each) or None for each in headers], HEADERS_TYPE),
        }
    )
    timestamps = pa.array(times, pa.timestamp("ms", tz="UTC"))
    ledger.add(topic, partition, base_offset, pa.array(sequences, pa.int64()), timestamps, digests(rows))
