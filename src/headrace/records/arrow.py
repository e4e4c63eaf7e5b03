"""Record batches as Arrow columns, and Arrow columns as record batches. Needs pyarrow (`headrace[arrow]`).

The types are those that Spark maps to without a change: binary, string, int32, int64, timestamp[us, UTC] and
list<struct<key: string, value: binary>>, all nullable. `headers` is null for a record without any.

Arrow's functions are brought in where they are used: a process of Spark that only plans does without them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from headrace.errors import BatchTooLarge, CorruptBatch, InvalidRecord
from headrace.records import arrow_decoder, arrow_encoder, codecs, kernel
from headrace.records.batch import MAGIC, NO_PRODUCER, TRANSACTIONAL, BatchHeader, View
from headrace.records.buffers import BufferPool
from headrace.records.record import Header

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
"""Every column there is. `digest` is 64 bits over key, value and headers; `sequence` is the record's own."""

DEFAULT_COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
BATCH_ROWS: Final = 10_000
MOST_BATCH_ROWS: Final = 1 << 20
BATCH_BYTES: Final = 64 << 20
PASSED_ON_BYTES: Final = 2 << 20
"""For batches that are written to a socket at once, as in Spark's workers: buffers of this size are used again, larger
ones are new pages from the kernel each time, which cost more than to fill them."""
MOST_BATCH_BYTES: Final = 512 << 20
"""Ends of binary are int32; names of headers can grow threefold when they are shown with marks."""


def schema(columns: Sequence[str] = DEFAULT_COLUMNS) -> pa.Schema:
    return pa.schema([pa.field(name, TYPES[name]) for name in columns])


class Decoder:
    """Turns the record sets of one partition into Arrow batches of at most `batch_rows` rows and `batch_bytes` bytes.

    A single record above `batch_bytes` has a batch of its own. The name of a header that is not UTF-8 is shown with
    replacement characters, and a timestamp outside the years 1 to 9999 as the nearest moment inside: rows that a
    producer spoilt do not hold up the rest.

    With a pool, keys and values of batches that nobody has any more make room for those of later ones.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        columns: Sequence[str] = DEFAULT_COLUMNS,
        *,
        batch_rows: int = BATCH_ROWS,
        batch_bytes: int = BATCH_BYTES,
        pool: BufferPool | None = None,
    ) -> None:
        if not 0 < batch_rows <= MOST_BATCH_ROWS:
            raise ValueError(f"batch_rows is {batch_rows}, and has to be from 1 to {MOST_BATCH_ROWS}")
        if not 0 < batch_bytes <= MOST_BATCH_BYTES:
            raise ValueError(f"batch_bytes is {batch_bytes}, and has to be from 1 to {MOST_BATCH_BYTES}")
        self.at_offset = 0
        """Where the batch begins that the last error was about."""
        self._where = f"{topic}-{partition}"
        self._columns = tuple(columns)
        self._schema = schema(columns)
        asked = {*columns, *(("key", "value", "headers") if "digest" in columns else ())}
        self._turn = 0
        self._pool = pool
        self._rows = arrow_decoder.Rows(asked, batch_rows, batch_bytes, pool)
        self._constants = {
            "topic": pa.repeat(pa.scalar(topic, TYPES["topic"]), batch_rows),
            "partition": pa.repeat(pa.scalar(partition, TYPES["partition"]), batch_rows),
        }

    def decode(
        self,
        records: View,
        first_offset: int = 0,
        next_offset: int = 1 << 62,
        *,
        checked: bool = False,
        hidden: frozenset[int] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of whole batches with offsets from `first_offset` up to but not `next_offset`; no control records.

        A damaged batch raises CorruptBatch or InvalidRecord that names topic, partition and offset. With `checked` the
        CRCs are known to be right, and are not looked at. Batches whose base offset is in `hidden`, those of aborted
        transactions (see `isolation.hidden_batches`), give no rows.
        """
        rows = self._rows
        self._turn = turn = self._turn + 1
        rows.begin(records, first_offset, next_offset, checked, hidden)
        try:
            while rows.advance():
                while not rows.fill():
                    yield self._take()
            if rows.count:
                yield self._take()
        except (CorruptBatch, InvalidRecord) as error:
            self.at_offset = rows.at_offset
            raise type(error)(f"{self._where} at offset {self.at_offset}: {error}") from None
        finally:
            # One that was left in the middle and ends late has nothing to say any more.
            if turn == self._turn:
                if rows.count:
                    self._take()
                # The record set may be a slice of a buffer that is to be used again.
                rows.begin(b"", 0, 0)

    def _take(self) -> pa.RecordBatch:
        rows, count = self._rows, self._rows.count
        found: dict[str, Any] = {name: array.slice(0, count) for name, array in self._constants.items()}
        for name, cells in (("key", rows.keys), ("value", rows.values)):
            if name in rows.wanted:
                taken = cells.take()
                found[name] = _binary(TYPES[name], taken)
                if self._pool is not None:
                    self._pool.lend(taken.data)
        if "headers" in rows.wanted:
            found["headers"] = _headers(rows)
        for name, buffer in rows.take_numbers().items():
            found[name] = pa.Array.from_buffers(TYPES[name], count, [None, pa.py_buffer(buffer)], 0)
        if "digest" in self._columns:
            found["digest"] = digests(pa.RecordBatch.from_pydict({n: found[n] for n in ("key", "value", "headers")}))
        return pa.RecordBatch.from_arrays([found[name] for name in self._columns], schema=self._schema)


def _binary(kind: pa.DataType, taken: arrow_decoder.Taken) -> pa.Array:
    buffers = [_bitmap(taken), pa.py_buffer(taken.ends), pa.py_buffer(taken.data)]
    return pa.Array.from_buffers(kind, taken.rows, buffers, taken.nulls)


def _headers(rows: arrow_decoder.Rows) -> pa.Array:
    names = _binary(pa.string(), rows.header_names.take())
    contents = _binary(pa.binary(), rows.header_values.take())
    lists = rows.headers.take()
    pairs = pa.StructArray.from_arrays([names, contents], fields=list(HEADERS_TYPE.value_type))
    buffers = [_bitmap(lists), pa.py_buffer(lists.ends)]
    return pa.Array.from_buffers(HEADERS_TYPE, lists.rows, buffers, lists.nulls, children=[pairs])


def _bitmap(taken: arrow_decoder.Taken) -> pa.Buffer | None:
    return None if taken.valid is None else pa.py_buffer(taken.valid)


def digest(key: bytes | None, value: bytes | None, headers: Sequence[Header]) -> int:
    """64 bits that tell whether key, value and headers of a record are what was sent, as a signed number."""
    return arrow_encoder.digest(key, value, headers)


def digests(rows: pa.RecordBatch) -> pa.Array:
    """The digest of each row, from its columns `key`, `value` and `headers`; a column that is missing is all null."""
    return pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(arrow_encoder.digests(_table(rows)))], 0)


def partitions_of(keys: pa.Array, partition_count: int) -> pa.Array:
    """Where Kafka's default partitioner sends each key, as int32; null for a null key."""
    import pyarrow.compute as pc

    found = pa.py_buffer(arrow_encoder.partitions_of(_cells(_as_binary(keys)), partition_count))
    partitions = pa.Array.from_buffers(pa.int32(), len(keys), [None, found], 0)
    return pc.if_else(keys.is_valid(), partitions, None) if keys.null_count else partitions


def spread(rows: pa.RecordBatch, partition_count: int, turn: int, run: int) -> pa.Array:
    """The partition of each row, as int32: its own `partition` where it has one, else by hash of its key.

    Rows with neither go to the partitions in turn, `run` rows at a time; `turn` says how many did before.
    """
    import pyarrow.compute as pc

    names, count = rows.schema.names, len(rows)
    keys = _cells(_as_binary(rows["key"])) if "key" in names else arrow_encoder.Cells(count)
    found = pa.py_buffer(arrow_encoder.partitions_of(keys, partition_count, turn, run))
    partitions = pa.Array.from_buffers(pa.int32(), count, [None, found], 0)
    return pc.coalesce(rows["partition"].cast(pa.int32()), partitions) if "partition" in names else partitions


def by_partition(partitions: pa.Array, partition_count: int) -> tuple[pa.Array, list[int]]:
    """Rows ordered by partition, each partition's in their order; and where each begins, and the last ends."""
    count = len(partitions)
    order, starts = arrow_encoder.by_partition(_numbers(partitions, 4).cast("i"), count, partition_count)
    return pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(order)], 0), starts


class Offsets:
    """The offsets of rows, filled in batch by batch; null where nothing was filled in."""

    def __init__(self, order: pa.Array) -> None:
        self._order = _numbers(order, 4).cast("i")
        self._found = bytearray(b"\xff") * (8 * len(order))

    def put(self, first: int, end: int, base_offset: int) -> None:
        """The rows at places `first` up to `end` of the order are one after the other from `base_offset` on."""
        arrow_encoder.put_offsets(memoryview(self._found).cast("q"), self._order, first, end, base_offset)

    def take(self) -> pa.Array:
        import pyarrow.compute as pc

        offsets = pa.Array.from_buffers(pa.int64(), len(self._order), [None, pa.py_buffer(self._found)], 0)
        return pc.if_else(pc.greater_equal(offsets, 0), offsets, None)


class Builder:
    """Builds signed batches from some of the rows it is given: see `build` for what they may hold.

    The rows at places `first` up to `end` of `order` (int32, all rows as they stand when it is None) are offered to
    `build`, which takes as many as `max_bytes` of records hold before compression, and at least one; `taken` tells.
    """

    def __init__(self, rows: pa.RecordBatch, order: pa.Array | None = None, *, now_ms: int) -> None:
        self.taken = 0
        self._now_ms = now_ms
        self._encoder = arrow_encoder.Encoder(
            _table(rows, now_ms),
            memoryview(array("i", range(len(rows)))) if order is None else _numbers(order, 4).cast("i"),
        )

    def build(
        self,
        first: int,
        end: int,
        max_bytes: int = MOST_BATCH_BYTES,
        codec: int = codecs.Codec.NONE,
        *,
        producer_id: int = NO_PRODUCER,
        producer_epoch: int = -1,
        base_sequence: int = -1,
        transactional: bool = False,
    ) -> bytearray:
        section = self._encoder.encode(first, end, max_bytes, self._now_ms)
        self.taken = self._encoder.taken
        header = BatchHeader(
            base_offset=0,
            size_bytes=0,
            leader_epoch=-1,
            magic=MAGIC,
            crc=0,
            attributes=codec | TRANSACTIONAL if transactional else codec,
            last_offset_delta=self.taken - 1,
            base_timestamp_ms=self._encoder.base_ms,
            max_timestamp_ms=self._encoder.max_ms,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
            record_count=self.taken,
        )
        return kernel.assemble(header, section)[0]


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

    A row without a timestamp bears `now_ms`. `value`, `key` and the values of headers may be binary or text, small,
    large or views; a timestamp may have any unit, and a plain number is milliseconds.
    """
    if not len(rows):
        raise InvalidRecord("a batch needs at least one record")
    builder = Builder(rows, now_ms=now_ms)
    batch = builder.build(
        0,
        len(rows),
        codec=codec,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )
    if builder.taken < len(rows):
        raise BatchTooLarge(f"{len(rows)} rows do not fit one batch of {MOST_BATCH_BYTES} bytes")
    return batch


def _table(rows: pa.RecordBatch, now_ms: int = 0) -> arrow_encoder.Table:
    names = rows.schema.names
    absent = arrow_encoder.Cells(len(rows))
    key, value = (_cells(_as_binary(rows[name])) if name in names else absent for name in ("key", "value"))
    lists = titles = contents = absent
    if "headers" in names and rows["headers"].null_count < len(rows):
        headers = rows["headers"]
        if headers.type != HEADERS_TYPE:
            headers = headers.cast(HEADERS_TYPE)
        lists = _cells(headers)
        titles, contents = map(_cells, headers.values.flatten())
    times = None
    if "timestamp" in names:
        found = rows["timestamp"].cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64())
        times = _numbers(found.fill_null(now_ms) if found.null_count else found, 8).cast("q")
    return arrow_encoder.Table(key, value, lists, titles, contents, times)


def _as_binary(column: pa.Array) -> pa.Array:
    if pa.types.is_binary(column.type) or pa.types.is_string(column.type):
        return column
    try:
        return column.cast(pa.binary())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidRecord(f"keys and values are binary or text, not {column.type}: {error}") from None


def _cells(column: pa.Array) -> arrow_encoder.Cells:
    """A view of a column of binary, or of the ends of one of lists."""
    count, first = len(column), column.offset
    valid, ends, *data = column.buffers()[:3] if not pa.types.is_list(column.type) else column.buffers()[:2]
    if not count:
        return arrow_encoder.Cells(0)
    return arrow_encoder.Cells(
        count,
        first,
        None if valid is None or not column.null_count else memoryview(valid).cast("B"),
        memoryview(ends).cast("B")[: 4 * (first + count + 1)].cast("i"),
        memoryview(data[0]).cast("B") if data and data[0] is not None else None,
    )


def _numbers(column: pa.Array, width: int) -> memoryview:
    """The bytes of a column of numbers without nulls."""
    end = column.offset + len(column)
    return memoryview(column.buffers()[1]).cast("B")[width * column.offset : width * end]
