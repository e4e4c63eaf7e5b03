# cython: boundscheck=False, wraparound=False, cdivision=True
"""Records of a consumer: from the bytes of a Fetch answer to one object a record.

    ReceivedRecord(topic, partition, offset, timestamp_ms, key=None, value=None, headers=(), leader_epoch=-1,
                   delivery_count=0)
        attributes of the same names; `headers` is a list of (str, bytes | None), made when first asked for
        .delivery_count   how often it was delivered, to a member of a share group; 0 outside of one
        .size_bytes   of key, value and headers as they came
    RecordSet(records, topic, partition, from_offset, end_offset=2**62, check_crc=True, hidden=None)
        .take(into: list, max_records, max_bytes=2**62) -> how many records were appended; none after those that reach
                       max_bytes
        .taken_bytes   of all records that were appended, as `size_bytes` has it
        .next_offset   where to go on: after the last record taken, after the last whole batch once all are
        .finished      nothing is left but, maybe, a batch that was cut
    receive(records, topic, partition, from_offset, end_offset, into, check_crc=True, hidden=None) -> next offset
        all of a record set at once

Records with offsets from `from_offset` up to but not `end_offset` are given; control batches are passed over, and those
whose base offset is in `hidden` (see `isolation`). A cut batch at the end is left for the next fetch. A batch whose CRC
or header is wrong is a CorruptBatch, a record that is malformed an InvalidRecord, both with topic, partition and
offset; what came before was appended, `next_offset` stays at the record concerned, and asking again says the same.

The record set keeps the bytes it was given until it is dropped; keys and values are copies.

The same file runs as Python and, with the C types of `consumer_records.pxd`, compiled: `compiled` tells which one runs.
The format of a record is in `kernel`; as there, positions are checked before a byte is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from crc32c import crc32c

from headrace.errors import CorruptBatch, HeadraceError, InvalidRecord
from headrace.records.batch import View, check, read_header
from headrace.records.codecs import decompress
from headrace.records.kernel import refuse_impossible
from headrace.records.record import Header

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
    from headrace.records.memory import number
    from headrace.records.varints import skip, skip_headers, varint

compiled: Final = not __file__.endswith((".py", ".pyc"))


def piece(data: Any, pos: int, length: int) -> bytes | None:
    """A copy of bytes known to be there; None for a null."""
    if length < 0:
        return None
    if cython.compiled:
        return PyBytes_FromStringAndSize(cython.cast("const char*", data + pos), length)  # type: ignore[name-defined,no-any-return] # noqa: F821
    return bytes(data[pos : pos + length])


def headers_of(raw: bytes) -> list[Header]:
    """Headers as they are written, checked before. A name that is not UTF-8 is shown with marks, as elsewhere."""
    found: list[Header] = []
    data = raw
    pos = 0
    end = len(raw)
    while pos < end:
        length, pos = varint(data, pos, end)
        name = raw[pos : pos + length].decode(errors="replace")
        length, pos = varint(data, pos + length, end)
        found.append((name, piece(data, pos, length)))
        pos = skip(pos, length, end)
    return found


@cython.no_gc
@cython.freelist(4096)
@cython.cclass
class ReceivedRecord:
    """One record as a consumer gets it."""

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        timestamp_ms: int,
        key: bytes | None = None,
        value: Any = None,
        headers: Iterable[Header] = (),
        leader_epoch: int = -1,
        delivery_count: int = 0,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.timestamp_ms = timestamp_ms
        self.key = key
        self.value = value
        self.raw_headers: bytes | None = None
        self.header_list: list[Header] | None = list(headers)
        self.leader_epoch = leader_epoch
        self.delivery_count = delivery_count

    @property
    def headers(self) -> list[Header]:
        """Names and values, in their order; a name may be there more than once."""
        if self.header_list is None:
            self.header_list = [] if self.raw_headers is None else headers_of(self.raw_headers)
            self.raw_headers = None
        return self.header_list

    @property
    def size_bytes(self) -> int:
        """Of key, value and headers; of a value that is no bytes any more, nothing."""
        size = len(self.key) if self.key is not None else 0
        if isinstance(self.value, bytes):
            size += len(self.value)
        if self.raw_headers is not None:
            size += len(self.raw_headers)
        elif self.header_list:
            size += sum(len(name) + len(value or b"") for name, value in self.header_list)
        return size

    def __repr__(self) -> str:
        return (
            f"Record(topic={self.topic!r}, partition={self.partition}, offset={self.offset}, "
            f"timestamp_ms={self.timestamp_ms}, key={self.key!r}, value={self.value!r}, headers={self.headers!r})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReceivedRecord):
            return NotImplemented
        return self.fields() == other.fields()

    def __hash__(self) -> int:
        return hash((self.topic, self.partition, self.offset))

    def __reduce__(self) -> tuple[Any, ...]:
        return ReceivedRecord, self.fields()

    def fields(self) -> tuple[Any, ...]:
        """As the constructor takes them."""
        return (
            self.topic,
            self.partition,
            self.offset,
            self.timestamp_ms,
            self.key,
            self.value,
            self.headers,
            self.leader_epoch,
            self.delivery_count,
        )


class RecordSet:
    """The record batches that one Fetch answer brought for a partition, read step by step; see the module."""

    def __init__(
        self,
        records: View,
        topic: str,
        partition: int,
        from_offset: int,
        end_offset: int = MOST,
        check_crc: bool = True,
        hidden: frozenset[int] | None = None,
    ) -> None:
        self.hidden = hidden or None
        self.view = memoryview(records)
        self.records = self.payload = self.view
        self.records_end = len(self.view)
        self.topic = topic
        self.partition = partition
        self.next_offset = from_offset
        self.end_offset = end_offset
        self.check_crc = check_crc
        self.finished = False
        self.taken_bytes = 0
        self.failed: HeadraceError | None = None
        self.batch_end = 0
        self.nth = 0
        self.record_count = 0
        self.after_batch = from_offset

    def take(self, into: list[Any], max_records: int, max_bytes: int = MOST) -> int:
        """Append up to `max_records` records to `into`, and tell how many they were."""
        if self.failed is not None:
            raise self.failed
        before = len(into)
        most_bytes = self.taken_bytes + max_bytes
        try:
            while len(into) - before < max_records and self.taken_bytes < most_bytes:
                if self.nth == self.record_count and not self.advance():
                    self.finished = True
                    break
                self.fill(into, max_records - (len(into) - before), most_bytes)
        except HeadraceError as error:
            self.failed = self.placed(error)
            raise self.failed from None
        return len(into) - before

    def placed(self, error: HeadraceError) -> HeadraceError:
        kind = CorruptBatch if isinstance(error, CorruptBatch) else InvalidRecord
        return kind(
            f"{self.topic}-{self.partition} at offset {self.next_offset}: {error}; read the partition from another "
            "replica, or seek past it"
        )

    def advance(self) -> bool:
        """Open the next batch with records of the span; False at the end or before a cut batch."""
        if cython.compiled:
            data = cython.address(self.records[0]) if self.records_end > 0 else cython.NULL
        else:
            data = self.records
        while self.records_end - self.batch_end >= HEADER_BYTES:
            start = self.batch_end
            size = number(data, start + 8, 4) + LENGTH_END
            if data[start + MAGIC_AT] != MAGIC or size < HEADER_BYTES:
                read_header(self.view, start)
            if size > self.records_end - start:
                return False
            self.base_offset = number(data, start, 8)
            self.last_delta = number(data, start + 23, 4)
            self.record_count = 0
            self.nth = 0
            count = number(data, start + 57, 4)
            if not 0 <= self.base_offset < MOST:
                refuse_impossible(read_header(self.view, start), size)
            # What is wrong is told by the functions that the rest of the broker uses.
            crc = number(data, start + CRC_AT, 4) & 0xFFFFFFFF
            wrong = self.check_crc and crc32c(self.view[start + ATTRIBUTES_AT : start + size]) != crc
            if wrong or not 0 <= count <= self.last_delta + 1:
                check(self.view, start)
                raise InvalidRecord(f"batch counts {count} records, but its last offset delta is {self.last_delta}")
            if self.base_offset >= self.end_offset:
                self.next_offset = max(self.next_offset, self.end_offset)
                return False
            attributes = number(data, start + ATTRIBUTES_AT, 2)
            self.after_batch = self.base_offset + self.last_delta + 1
            shown = attributes & CONTROL == 0 and (self.hidden is None or self.base_offset not in self.hidden)
            if shown and self.after_batch > self.next_offset and count > 0:
                self.open(data, start, size, attributes, count)
                self.batch_end = start + size
                return True
            self.batch_end = start + size
            self.pass_over()
        return False

    def pass_over(self) -> None:
        """Go on behind the batch, but not behind the end asked for."""
        after = min(self.after_batch, self.end_offset)
        self.next_offset = max(self.next_offset, after)

    def open(self, data: Any, start: int, size: int, attributes: int, count: int) -> None:
        self.leader_epoch = number(data, start + 12, 4)
        self.base_ms = number(data, start + 27, 8)
        self.append_ms = number(data, start + 35, 8)
        self.append_time = attributes & APPEND_TIME != 0
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
            count > (self.end - self.pos) // LEAST_RECORD_BYTES
            or not -MOST < self.base_ms < MOST
            or not -MOST < self.append_ms < MOST
        ):
            refuse_impossible(read_header(self.view, start), self.end - self.pos)
        self.record_count = count

    def fill(self, into: list[Any], most: int, most_bytes: int) -> None:
        """Records of the open batch, up to `most`; none after `most_bytes` of all."""
        if cython.compiled:
            data = cython.address(self.payload[0])
        else:
            data = self.payload
        topic = self.topic
        while self.nth < self.record_count and most > 0 and self.taken_bytes < most_bytes:
            length, pos = varint(data, self.pos, self.end)
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
                raise InvalidRecord(f"record {self.nth} of the batch at offset {self.base_offset} is malformed")
            if delta_ms <= -MOST or delta_ms >= MOST:
                raise InvalidRecord(
                    f"record {self.nth} of the batch at offset {self.base_offset} has timestamp delta {delta_ms}"
                )
            offset = self.base_offset + delta
            if self.next_offset <= offset < self.end_offset:
                record: ReceivedRecord = ReceivedRecord.__new__(ReceivedRecord)
                record.topic = topic
                record.partition = self.partition
                record.offset = offset
                record.timestamp_ms = self.append_ms if self.append_time else self.base_ms + delta_ms
                record.key = piece(data, key_at, key_length)
                record.value = piece(data, value_at, value_length)
                record.raw_headers = None if header_count == 0 else piece(data, headers_at, record_end - headers_at)
                record.header_list = None
                record.leader_epoch = self.leader_epoch
                record.delivery_count = 0
                into.append(record)
                self.next_offset = offset + 1
                self.taken_bytes += max(key_length, 0) + max(value_length, 0)
                if header_count > 0:
                    self.taken_bytes += record_end - headers_at
                most -= 1
            self.pos = pos
            self.previous_delta = delta
            self.nth += 1
        if self.nth == self.record_count:
            if self.pos != self.end:
                raise InvalidRecord(
                    f"{self.end - self.pos} bytes follow the last record of the batch at offset {self.base_offset}"
                )
            self.pass_over()


def receive(
    records: View,
    topic: str,
    partition: int,
    from_offset: int,
    end_offset: int,
    into: list[Any],
    check_crc: bool = True,
    hidden: frozenset[int] | None = None,
) -> int:
    """Append every record of the whole batches to `into`; the offset to go on from."""
    found = RecordSet(records, topic, partition, from_offset, end_offset, check_crc, hidden)
    while not found.finished:
        found.take(into, MOST)
    return found.next_offset
