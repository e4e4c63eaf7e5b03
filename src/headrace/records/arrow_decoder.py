# cython: boundscheck=False, wraparound=False
"""Records straight into Arrow's buffers, without an object per record.

What is handed out is in Arrow's own layout: a number is four or eight bytes, little-endian; a column of binary is int32
ends, one more than there are rows, and the bytes one after the other; a bitmap, lowest bit first, tells what is not
null, and is left out when nothing is. A buffer that was handed out is not touched again while anybody has a view of it.

The same file runs as Python and, with the C types of `arrow_decoder.pxd`, compiled: `compiled` tells which one runs.
The format of a record is in `kernel`; as there, positions are checked before a byte is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from headrace.errors import InvalidRecord
from headrace.records.batch import View, check, read_header
from headrace.records.codecs import decompress
from headrace.records.kernel import refuse_impossible

try:
    import cython
except ImportError:
    from headrace.records import cython_stub as cython

if not cython.compiled:  # else they are constants and inlined functions, as the .pxd says
    from headrace.records.batch import (
        APPEND_TIME,
        ATTRIBUTES_AT,
        CODEC_MASK,
        CONTROL,
        CRC_AT,
        HEADER_BYTES,
        LEAST_RECORD_BYTES,
        LENGTH_END,
        MAGIC,
        MAGIC_AT,
        MAX_UNPACKED_BYTES,
        MOST,
    )
    from headrace.records.memory import copy, ints, longs, number, octets
    from headrace.records.varints import skip, skip_headers, varint

compiled: Final = not __file__.endswith((".py", ".pyc"))


LEAST_MS: Final = -62_135_596_800_000
MOST_MS: Final = 253_402_300_799_999
"""First and last moment of the years 1 to 9999: as far as dates of Python, Spark and Delta reach."""
LEAST_ROOM_BYTES: Final = 4096
SEQUENCE_MASK: Final = 0x7FFFFFFF
CONSTANTS: Final = {"timestampType": 4, "producerId": 8, "producerEpoch": 4, "sequence": 4, "leaderEpoch": 4}
"""Columns that a batch's header gives, with their widths; `sequence` rises with the offset."""


class Taken(NamedTuple):
    """Buffers of one column of binary, or of the ends of a list (then `data` is empty)."""

    rows: int
    nulls: int
    valid: bytearray | None
    ends: bytearray
    data: bytearray


def fresh(size: int) -> bytearray:
    """A buffer whose bytes are still to be written."""
    if cython.compiled:
        return PyByteArray_FromStringAndSize(cython.NULL, size)  # type: ignore[name-defined,no-any-return] # noqa: F821
    return bytearray(size)


def is_ascii(data: Any, pos: int, length: int) -> bool:
    while length > 0 and data[pos + length - 1] < 0x80:
        length -= 1
    return length == 0


class Cells:
    """A column of binary that grows by a cell at a time; without data, the ends of a column of lists. Buffers for data
    come from the pool, if there is one; whoever takes them is to lend them."""

    def __init__(self, rows: int, pool: Any = None) -> None:
        self.rows = rows
        self.pool = pool
        self.start(LEAST_ROOM_BYTES)

    def start(self, room: int) -> None:
        """A buffer comes with the first cell: who has nothing to put, such as one of many partitions, keeps none."""
        self.count = self.nulls = self.used = self.room = 0
        self.first_room = room
        self.data_buffer = fresh(0)
        self.data = octets(self.data_buffer)
        self.end_buffer = fresh(4 * (self.rows + 1))
        self.ends = ints(self.end_buffer)
        self.ends[0] = 0
        self.valid: bytearray | None = None

    def make_room(self, size: int) -> None:
        self.data_buffer = fresh(size) if self.pool is None else self.pool.take(size)
        self.data = octets(self.data_buffer)
        self.room = len(self.data_buffer)

    def put(self, data: Any, pos: int, length: int) -> None:
        """Append a copy of `length` bytes, or a null for -1."""
        if length > 0:
            if length > self.room - self.used:
                self.more_room(length)
            copy(self.data, self.used, data, pos, length)
        self.put_length(length)

    def put_length(self, length: int) -> None:
        if self.count == self.rows:
            self.more_rows()
        if length > 0:
            self.used += length
        elif length < 0:
            self.put_null()
        self.count += 1
        self.ends[self.count] = self.used

    def put_null(self) -> None:
        if self.valid is None:
            self.valid = bytearray(b"\xff") * (self.rows // 8 + 1)
            self.bits = octets(self.valid)
        self.bits[self.count >> 3] &= 0xFF ^ (1 << (self.count & 7))
        self.nulls += 1

    def more_rows(self) -> None:
        before = self.end_buffer
        self.rows = 2 * self.rows
        self.end_buffer = fresh(4 * (self.rows + 1))
        copy(octets(self.end_buffer), 0, octets(before), 0, 4 * (self.count + 1))
        self.ends = ints(self.end_buffer)
        if self.valid is not None:
            self.valid += b"\xff" * (self.rows // 8 + 1 - len(self.valid))
            self.bits = octets(self.valid)

    def more_room(self, length: int) -> None:
        before = self.data_buffer
        self.make_room(max(self.first_room, 2 * self.room, self.used + length))
        copy(self.data, 0, octets(before), 0, self.used)

    def take(self) -> Taken:
        """What was put since the last time."""
        valid = None if self.valid is None else trimmed(self.valid, self.count // 8 + 1)
        ends = trimmed(self.end_buffer, 4 * (self.count + 1))
        taken = Taken(self.count, self.nulls, valid, ends, trimmed(self.data_buffer, self.used))
        # Batches that follow each other are alike: with an eighth to spare, most never grow.
        self.start(max(LEAST_ROOM_BYTES, self.used + self.used // 8))
        return taken


def trimmed(buffer: bytearray, size: int) -> bytearray:
    """The buffer itself, or a copy of what is used where that is little of it."""
    return buffer if 2 * size >= len(buffer) else buffer[:size]


class Rows:
    """Rows from as many record batches as it takes: `begin` a record set, `advance` to a batch, `fill`, and so on.

    `fill` stops at `rows` rows, or before the record that would bring them above `data_bytes`: take them and `fill`
    again. Only records with offsets from `first_offset` up to but not `next_offset` become rows. `at_offset` tells
    which batch an error is about.
    """

    def __init__(self, columns: Iterable[str], rows: int, data_bytes: int, pool: Any = None) -> None:
        wanted = frozenset(columns)
        self.rows = rows
        self.data_bytes = data_bytes
        self.with_key = "key" in wanted
        self.with_value = "value" in wanted
        self.with_headers = "headers" in wanted
        self.wanted = wanted
        self.keys = Cells(rows if self.with_key else 0, pool)
        self.values = Cells(rows if self.with_value else 0, pool)
        self.headers = Cells(rows if self.with_headers else 0)
        self.header_names = Cells(16)
        self.header_values = Cells(16)
        self.start()

    def start(self) -> None:
        self.count = 0
        self.used = 0
        self.offset_buffer = fresh(8 * self.rows)
        self.timestamp_buffer = fresh(8 * self.rows)
        self.constants = {name: fresh(width * self.rows) for name, width in CONSTANTS.items() if name in self.wanted}

    def begin(
        self,
        records: View,
        first_offset: int,
        next_offset: int,
        checked: bool = False,
        hidden: frozenset[int] | None = None,
    ) -> None:
        """Go on with this record set, held until the next one begins. `checked`: its CRCs are known to be right.
        Batches whose base offset is in `hidden` are passed over (see `isolation`)."""
        self.hidden = hidden or None
        self.records = self.payload = self.view = memoryview(records)
        self.checked = checked
        self.records_end = len(self.view)
        self.batch_end = self.nth = self.record_count = 0
        self.expected_offset = self.at_offset = self.first_offset = first_offset
        self.next_offset = next_offset

    def advance(self) -> bool:
        """Open the next batch with records of the span, its CRC checked; False at the end or before a cut batch."""
        if cython.compiled:
            data = cython.address(self.records[0])
        else:
            data = self.records
        while self.records_end - self.batch_end >= HEADER_BYTES:
            start = self.batch_end
            self.at_offset = self.expected_offset
            size = number(data, start + 8, 4) + LENGTH_END
            if data[start + MAGIC_AT] != MAGIC or size < HEADER_BYTES:
                read_header(self.view, start)
            if size > self.records_end - start:
                return False
            self.base_offset = number(data, start, 8)
            self.at_offset = self.base_offset
            self.last_delta = number(data, start + 23, 4)
            self.batch_end = start + size
            attributes = number(data, start + ATTRIBUTES_AT, 2)
            if not 0 <= self.base_offset < MOST:
                refuse_impossible(read_header(self.view, start), size)
            self.expected_offset = self.base_offset + self.last_delta + 1
            if self.base_offset >= self.next_offset:
                continue
            self.record_count = number(data, start + 57, 4)
            # What is wrong is told by the functions that the rest of the broker uses.
            crc = number(data, start + CRC_AT, 4) & 0xFFFFFFFF
            wrong = not self.checked and crc32c(self.view[start + ATTRIBUTES_AT : self.batch_end]) != crc
            if wrong or not 0 <= self.record_count <= self.last_delta + 1:
                check(self.view, start)
            shown = attributes & CONTROL == 0 and (self.hidden is None or self.base_offset not in self.hidden)
            if shown and self.base_offset + self.last_delta >= self.first_offset:
                self.open(data, start, size, attributes)
                return True
        return False

    def open(self, data: Any, start: int, size: int, attributes: int) -> None:
        self.leader_epoch = number(data, start + 12, 4)
        self.base_ms = number(data, start + 27, 8)
        self.append_ms = number(data, start + 35, 8)
        self.append_time = attributes & APPEND_TIME != 0
        self.producer_id = number(data, start + 43, 8)
        self.producer_epoch = number(data, start + 51, 2)
        self.base_sequence = number(data, start + 53, 4)
        self.nth = 0
        self.previous_delta = -1
        if attributes & CODEC_MASK == 0 and size <= MAX_UNPACKED_BYTES:
            self.payload = self.records
            self.pos = start + HEADER_BYTES
            self.end = start + size
        else:
            payload = decompress(attributes & CODEC_MASK, self.view[start + HEADER_BYTES : start + size])
            self.payload = memoryview(payload)
            self.pos = 0
            self.end = len(payload)
        if (
            self.record_count > (self.end - self.pos) // LEAST_RECORD_BYTES
            or not -MOST < self.base_ms < MOST
            or not -MOST < self.append_ms < MOST
        ):
            refuse_impossible(read_header(self.view, start), self.end - self.pos)

    def fill(self) -> bool:
        """Whether the batch is used up; InvalidRecord at a record that is malformed."""
        if cython.compiled:
            data = cython.address(self.payload[0])
        else:
            data = self.payload
        offsets = longs(self.offset_buffer)
        timestamps = longs(self.timestamp_buffer)
        before = self.count
        while self.nth < self.record_count:
            start = self.pos
            length, pos = varint(data, start, self.end)
            record_end = skip(pos, length, self.end)
            delta_ms, pos = varint(data, pos + 1, record_end)
            delta, pos = varint(data, pos, record_end)
            key_length, key_at = varint(data, pos, record_end)
            pos = skip(key_at, key_length, record_end)
            value_length, value_at = varint(data, pos, record_end)
            pos = skip(value_at, value_length, record_end)
            header_count, headers_at = varint(data, pos, record_end)
            pos = headers_at if header_count == 0 else skip_headers(data, headers_at, header_count, record_end)
            if pos < 0 or pos != record_end or delta <= self.previous_delta or delta > self.last_delta:
                raise InvalidRecord(f"record {self.nth} of the batch is malformed")
            if delta_ms <= -MOST or delta_ms >= MOST:
                raise InvalidRecord(f"record {self.nth} of the batch has timestamp delta {delta_ms}")
            offset = self.base_offset + delta
            if self.first_offset <= offset < self.next_offset:
                size = record_end - start
                if self.count == self.rows or (self.used + size > self.data_bytes and self.count > 0):
                    break
                self.used += size
                offsets[self.count] = offset
                timestamps[self.count] = microseconds(self.append_ms if self.append_time else self.base_ms + delta_ms)
                if self.with_key:
                    self.keys.put(data, key_at, key_length)
                if self.with_value:
                    self.values.put(data, value_at, value_length)
                if self.with_headers:
                    self.put_headers(data, headers_at, header_count, record_end)
                self.count += 1
            self.pos = pos
            self.previous_delta = delta
            self.nth += 1
        self.put_constants(before)
        if self.nth == self.record_count and self.pos != self.end:
            raise InvalidRecord(f"{self.end - self.pos} bytes follow the last record of the batch")
        return self.nth == self.record_count

    def put_headers(self, data: Any, pos: int, count: int, end: int) -> None:
        """The headers of one record, checked already. A name that is not UTF-8 is shown with marks, as elsewhere."""
        self.headers.put_length(-1 if count == 0 else count)
        for _ in range(count):
            length, pos = varint(data, pos, end)
            if is_ascii(data, pos, length):
                self.header_names.put(data, pos, length)
            else:
                name = bytes(data[pos : pos + length]).decode(errors="replace").encode()
                self.header_names.put(name, 0, len(name))
            length, pos = varint(data, pos + length, end)
            self.header_values.put(data, pos, length)
            pos = skip(pos, length, end)

    def put_constants(self, before: int) -> None:
        """What all rows from `before` on have in common, since they are of one batch."""
        for name, buffer in self.constants.items():
            if name == "timestampType":
                fill_ints(buffer, before, self.count, 1 if self.append_time else 0)
            elif name == "producerId":
                fill_longs(buffer, before, self.count, self.producer_id)
            elif name == "producerEpoch":
                fill_ints(buffer, before, self.count, self.producer_epoch)
            elif name == "leaderEpoch":
                fill_ints(buffer, before, self.count, self.leader_epoch)
            else:
                self.put_sequences(buffer, before, self.base_sequence)

    def put_sequences(self, buffer: bytearray, before: int, base_sequence: int) -> None:
        sequences = ints(buffer)
        offsets = longs(self.offset_buffer)
        for row in range(before, self.count):
            delta = offsets[row] - self.base_offset
            sequences[row] = -1 if base_sequence < 0 else (base_sequence + delta) & SEQUENCE_MASK

    def take_numbers(self) -> dict[str, bytearray]:
        """Columns of numbers by name; call it last, for it begins the next rows."""
        found = {name: trimmed(buffer, CONSTANTS[name] * self.count) for name, buffer in self.constants.items()}
        found["offset"] = trimmed(self.offset_buffer, 8 * self.count)
        found["timestamp"] = trimmed(self.timestamp_buffer, 8 * self.count)
        self.start()
        return found


def microseconds(timestamp_ms: int) -> int:
    if timestamp_ms < LEAST_MS:
        return LEAST_MS * 1000
    if timestamp_ms > MOST_MS:
        return MOST_MS * 1000
    return timestamp_ms * 1000


def fill_ints(buffer: bytearray, start: int, end: int, value: int) -> None:
    out = ints(buffer)
    for row in range(start, end):
        out[row] = value


def fill_longs(buffer: bytearray, start: int, end: int, value: int) -> None:
    out = longs(buffer)
    for row in range(start, end):
        out[row] = value
