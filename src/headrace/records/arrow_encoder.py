# cython: boundscheck=False, wraparound=False
"""Arrow's buffers straight into records, their digests and partitions, without an object per row.

`Cells` looks at a column of binary, or at the ends of a column of lists, in Arrow's layout (see `arrow_decoder`). The
same file runs as Python and, with the C types of `arrow_encoder.pxd`, compiled: `compiled` tells which one runs.

A digest is 64 bits over the fields key, value, and then name and value of each header. A field is taken in as its
length plus one (0 for a null), then its bytes, eight at a time, as little-endian numbers, the last one filled up with
zeros. The lengths keep a null from an empty field, and one field from the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from headrace.errors import BatchTooLarge, InvalidRecord
from headrace.records.record import Header

try:
    import cython
except ImportError:
    from headrace.records import cython_stub as cython

if not cython.compiled:  # else they are constants and inlined functions, as the .pxd says
    from headrace.records.arrow_decoder import fresh
    from headrace.records.batch import MOST
    from headrace.records.memory import copy, ints, longs, octets
    from headrace.records.partitioner import murmur2
    from headrace.records.varints import put_varint, varint_size

compiled: Final = not __file__.endswith((".py", ".pyc"))

MOST_SECTION_BYTES: Final = 2**31 - 1 - 61
LEAST_ROOM_BYTES: Final = 4096
SEED: Final = 0x9E3779B97F4A7C15
FACTOR: Final = 0xD6E8FEB86659FD93
WORD: Final = 0xFFFFFFFFFFFFFFFF


class Cells:
    """A column of `count` cells from `first` on: views of Arrow's buffers, `ends` as int32.

    Without a bitmap nothing is null, without ends everything is.
    """

    def __init__(self, count: int, first: int = 0, valid: Any = None, ends: Any = None, data: Any = None) -> None:
        self.count = count
        self.first = first
        self.absent = ends is None
        self.nullable = valid is not None
        self.valid = b"" if valid is None else valid
        self.ends = memoryview(bytes(4)).cast("i") if ends is None else ends
        self.data = memoryview(b"" if data is None else data)

    def length(self, row: int) -> int:
        """Bytes of a cell, or items of a list; -1 for a null."""
        if self.absent:
            return -1
        row += self.first
        if self.nullable and not self.valid[row >> 3] >> (row & 7) & 1:
            return -1
        return self.ends[row + 1] - self.ends[row]

    def start(self, row: int) -> int:
        return self.ends[row + self.first]

    def pointer(self) -> Any:
        if cython.compiled:
            return cython.address(self.data[0])
        return self.data


class Table:
    """Rows to be sent: columns that are not there are all null. `times` are int64 ms."""

    def __init__(
        self, key: Cells, value: Cells, lists: Cells, names: Cells, contents: Cells, times: Any = None
    ) -> None:
        self.count = value.count
        self.key = key
        self.value = value
        self.lists = lists
        self.names = names
        self.contents = contents
        self.timed = times is not None
        self.times = memoryview(bytes(8)).cast("q") if times is None else times


def cell_size(length: int) -> int:
    return varint_size(length) + (length if length > 0 else 0)


def put_cell(out: Any, pos: int, cells: Cells, row: int) -> int:
    length = cells.length(row)
    pos = put_varint(out, pos, length)
    if length > 0:
        copy(out, pos, cells.pointer(), cells.start(row), length)
        pos += length
    return pos


class Encoder:
    """Writes the records section of batches, one after the other, from the rows of a table in the order given."""

    def __init__(self, table: Table, order: Any) -> None:
        self.table = table
        self.order = order

    def encode(self, first: int, end: int, max_bytes: int, now_ms: int) -> bytearray:
        """A section of the rows at places `first` up to `end` of the order, or as many as `max_bytes` hold, but one.

        `taken` rows are in it, with timestamps from `base_ms`, the first one's, up to `max_ms`.
        """
        table = self.table
        room = LEAST_ROOM_BYTES
        buffer = fresh(room)
        out = octets(buffer)
        pos = 0
        place = first
        while place < end:
            row = self.order[place]
            at_ms = table.times[row] if table.timed else now_ms
            if not -MOST < at_ms < MOST:
                raise InvalidRecord(f"row {row} has timestamp {at_ms} ms, out of range")
            if place == first:
                self.base_ms = at_ms
                self.max_ms = at_ms
            length = 1 + varint_size(at_ms - self.base_ms) + varint_size(place - first)
            length += cell_size(table.key.length(row)) + cell_size(table.value.length(row)) + self.headers_size(row)
            size = length + varint_size(length)
            if pos + size > max_bytes and place > first:
                break
            if pos + size > MOST_SECTION_BYTES:
                raise BatchTooLarge(f"row {row} makes a batch of {pos + size} bytes: the format ends before")
            if pos + size > room:
                room = max(2 * room, pos + size)
                before = buffer
                buffer = fresh(room)
                out = octets(buffer)
                copy(out, 0, octets(before), 0, pos)
            pos = put_varint(out, pos, length)
            out[pos] = 0
            pos = put_varint(out, pos + 1, at_ms - self.base_ms)
            pos = put_varint(out, pos, place - first)
            pos = put_cell(out, pos, table.key, row)
            pos = put_cell(out, pos, table.value, row)
            pos = self.put_headers(out, pos, row)
            self.max_ms = max(self.max_ms, at_ms)
            place += 1
        self.taken = place - first
        del buffer[pos:]
        return buffer

    def headers_size(self, row: int) -> int:
        lists = self.table.lists
        count = lists.length(row)
        if count <= 0:
            return 1
        size = varint_size(count)
        start = lists.start(row)
        for item in range(start, start + count):
            length = self.table.names.length(item)
            if length < 0:
                raise InvalidRecord(f"row {row} has a header without a name")
            size += cell_size(length) + cell_size(self.table.contents.length(item))
        return size

    def put_headers(self, out: Any, pos: int, row: int) -> int:
        lists = self.table.lists
        count = lists.length(row)
        if count <= 0:
            return put_varint(out, pos, 0)
        pos = put_varint(out, pos, count)
        start = lists.start(row)
        for item in range(start, start + count):
            pos = put_cell(out, pos, self.table.names, item)
            pos = put_cell(out, pos, self.table.contents, item)
        return pos


def mixed(state: int, number: int) -> int:
    number = number * FACTOR & WORD
    state = (state ^ number ^ number >> 32) * FACTOR & WORD
    return state ^ state >> 29


def word(data: Any, pos: int, size: int) -> int:
    """Up to eight bytes as a little-endian number."""
    if cython.compiled:
        raw = 0
        memcpy(cython.address(raw), data + pos, size)  # type: ignore[name-defined] # noqa: F821
        return raw
    return int.from_bytes(data[pos : pos + size], "little")


def take_in(state: int, data: Any, pos: int, length: int) -> int:
    state = mixed(state, length + 1)
    while length >= 8:
        state = mixed(state, word(data, pos, 8))
        pos += 8
        length -= 8
    return mixed(state, word(data, pos, length)) if length > 0 else state


def take_in_bytes(state: int, field: bytes | None) -> int:
    if field is None:
        return take_in(state, b"", 0, -1)
    return take_in(state, field, 0, len(field))


def take_in_cell(state: int, cells: Cells, row: int) -> int:
    length = cells.length(row)
    return take_in(state, cells.pointer(), 0 if length < 0 else cells.start(row), length)


def finished(state: int) -> int:
    state = mixed(mixed(state, 0), 0)
    if cython.compiled:
        return state
    return state - (1 << 64) if state >> 63 else state


def digest(key: bytes | None, value: bytes | None, headers: Sequence[Header]) -> int:
    state = take_in_bytes(take_in_bytes(SEED, key), value)
    for name, content in headers:
        state = take_in_bytes(take_in_bytes(state, name.encode()), content)
    return finished(state)


def digests(table: Table) -> bytearray:
    """The digest of each row, as int64."""
    buffer = fresh(8 * table.count)
    out = longs(buffer)
    lists = table.lists
    for row in range(table.count):
        state = take_in_cell(take_in_cell(SEED, table.key, row), table.value, row)
        count = lists.length(row)
        if count > 0:
            start = lists.start(row)
            for item in range(start, start + count):
                state = take_in_cell(take_in_cell(state, table.names, item), table.contents, item)
        out[row] = finished(state)
    return buffer


def partitions_of(keys: Cells, partition_count: int, turn: int = 0, run: int = 1) -> bytearray:
    """The partition of each key, as int32. Rows without a key go to the partitions in turn, `run` of them at a time.

    `turn` counts the rows without a key that came before.
    """
    buffer = fresh(4 * keys.count)
    out = ints(buffer)
    for row in range(keys.count):
        length = keys.length(row)
        if length < 0:
            out[row] = turn // run % partition_count
            turn += 1
        else:
            out[row] = (murmur2(keys.pointer(), keys.start(row), length) & 0x7FFFFFFF) % partition_count
    return buffer


def by_partition(partitions: Any, count: int, partition_count: int) -> tuple[bytearray, list[int]]:
    """Rows by partition, each partition's in their order, as int32; and where each begins and the last ends."""
    starts = [0] * (partition_count + 1)
    tally_buffer = bytearray(4 * (partition_count + 1))
    tally = ints(tally_buffer)
    for row in range(count):
        if not 0 <= partitions[row] < partition_count:
            raise InvalidRecord(
                f"row {row} is for partition {partitions[row]}, and there are 0 to {partition_count - 1}"
            )
        tally[partitions[row] + 1] += 1
    for partition in range(partition_count):
        tally[partition + 1] += tally[partition]
        starts[partition + 1] = tally[partition + 1]
    buffer = fresh(4 * count)
    order = ints(buffer)
    for row in range(count):
        order[tally[partitions[row]]] = row
        tally[partitions[row]] += 1
    return buffer, starts


def put_offsets(out: Any, order: Any, first: int, end: int, base_offset: int) -> None:
    """Give the rows at places `first` up to `end` of the order the offsets from `base_offset` on."""
    for place in range(first, end):
        out[order[place]] = base_offset + place - first
