"""Record batches as Arrow columns, and Arrow columns as record batches. Needs pyarrow (`headrace[arrow]`).

The types are those that Spark maps to without a change: binary, string, int32, int64, timestamp[us, UTC] and
list<struct<key: string, value: binary>>, all nullable. `headers` is null for a record without any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from headrace.errors import CorruptBatch, HeadraceError, InvalidRecord
from headrace.records import codecs, kernel
from headrace.records.batch import NO_PRODUCER, View, batches
from headrace.records.partitioner import partition_for_key

HEADERS_TYPE: Final = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
TIMESTAMP_TYPE: Final = pa.timestamp("us", tz="UTC")

TYPES: Final[dict[str, Any]] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": TIMESTAMP_TYPE,
    "timestampType": pa.int32(),
    "headers": HEADERS_TYPE,
    "digest": pa.int64(),
    "producerId": pa.int64(),
    "producerEpoch": pa.int32(),
    "sequence": pa.int32(),
    "leaderEpoch": pa.int32(),
}
"""Every column there is, in its order. `digest` is 64 bits over key, value and headers; `sequence` is the record's own."""

DEFAULT_COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
BATCH_ROWS: Final = 10_000


def schema(columns: Sequence[str] = DEFAULT_COLUMNS) -> pa.Schema:
    return pa.schema([pa.field(name, TYPES[name]) for name in columns])


class Decoder:
    """Turns the record sets of one partition into Arrow batches of at most `batch_rows` rows."""

    def __init__(
        self, topic: str, partition: int, columns: Sequence[str] = DEFAULT_COLUMNS, *, batch_rows: int = BATCH_ROWS
    ) -> None:
        self._topic = topic
        self._partition = partition
        self._columns = tuple(columns)
        self._schema = schema(columns)
        self._batch_rows = batch_rows

    def decode(self, records: View, first_offset: int = 0, next_offset: int = 1 << 62) -> Iterator[pa.RecordBatch]:
        """The rows of whole batches with offsets from `first_offset` up to but not `next_offset`; no control records.

        A damaged batch raises CorruptBatch or InvalidRecord that names topic, partition and offset.
        """
        columns = {name: [] for name in self._columns}  # type: dict[str, list[Any]]
        rows = 0
        for header, batch in batches(memoryview(records)):
            if header.is_control or header.next_offset <= first_offset or header.base_offset >= next_offset:
                continue
            try:
                found = kernel.records(batch)
            except HeadraceError as error:
                kind = CorruptBatch if isinstance(error, CorruptBatch) else InvalidRecord
                raise kind(f"{self._topic}-{self._partition} at offset {header.base_offset}: {error}") from None
            for record in found:
                if not first_offset <= record.offset < next_offset:
                    continue
                row = {
                    "key": record.key,
                    "value": record.value,
                    "topic": self._topic,
                    "partition": self._partition,
                    "offset": record.offset,
                    "timestamp": record.timestamp_ms * 1000,
                    "timestampType": int(header.append_time),
                    "headers": [{"key": k, "value": v} for k, v in record.headers] or None,
                    "digest": digest(record.key, record.value, record.headers),
                    "producerId": header.producer_id,
                    "producerEpoch": header.producer_epoch,
                    "sequence": -1
                    if header.base_sequence < 0
                    else (header.base_sequence + record.offset - header.base_offset) & 0x7FFFFFFF,
                    "leaderEpoch": header.leader_epoch,
                }
                for name in self._columns:
                    columns[name].append(row[name])
                rows += 1
                if rows == self._batch_rows:
                    yield self._batch(columns)
                    columns, rows = {name: [] for name in self._columns}, 0
        if rows:
            yield self._batch(columns)

    def _batch(self, columns: dict[str, list[Any]]) -> pa.RecordBatch:
        arrays = [pa.array(columns[name], type=TYPES[name]) for name in self._columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def digest(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> int:
    """64 bits that tell whether key, value and headers of a record are what was sent, as a signed number."""
    parts = [key, value]
    for name, content in headers:
        parts += (name.encode(), content)
    told = hashlib.blake2b(digest_size=8)
    for part in parts:
        told.update(b"-" if part is None else b"%d:" % len(part) + part)
    return int.from_bytes(told.digest(), "little", signed=True)


def digests(rows: pa.RecordBatch) -> pa.Array:
    """The digest of each row, from its columns `key`, `value` and `headers`; a column that is missing is all null."""
    names = rows.schema.names
    columns = [rows[name].to_pylist() if name in names else [None] * len(rows) for name in ("key", "value", "headers")]
    found = [
        digest(key, value, [(each["key"], each["value"]) for each in headers or []])
        for key, value, headers in zip(*columns, strict=True)
    ]
    return pa.array(found, type=pa.int64())


def build(
    rows: pa.RecordBatch,
    codec: int = codecs.Codec.NONE,
    *,
    now_ms: int,
    producer_id: int = NO_PRODUCER,
    producer_epoch: int = -1,
    base_sequence: int = -1,
) -> bytearray:
    """One signed batch of at least one row, from `value` and, where they are there, `key`, `headers`, `timestamp`.

    A row without a timestamp bears `now_ms`. `value` and `key` may be binary or string.
    """
    names = rows.schema.names
    columns = {name: rows[name].to_pylist() for name in ("key", "value", "headers") if name in names}
    empty = [None] * len(rows)
    times = (
        rows["timestamp"].cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64()).to_pylist()
        if "timestamp" in names
        else empty
    )
    new = [
        (
            now_ms if at is None else at,
            _bytes(key),
            _bytes(value),
            [(each["key"], each["value"]) for each in headers or []],
        )
        for at, key, value, headers in zip(
            times, columns.get("key", empty), columns["value"], columns.get("headers", empty), strict=True
        )
    ]
    return kernel.build(new, codec, producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=base_sequence)


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def partitions_of(keys: pa.Array, partition_count: int) -> pa.Array:
    """Where Kafka's default partitioner sends each key, as int32; null for a null key."""
    found = [
        None if key is None else partition_for_key(_bytes(key) or b"", partition_count) for key in keys.to_pylist()
    ]
    return pa.array(found, type=pa.int32())
