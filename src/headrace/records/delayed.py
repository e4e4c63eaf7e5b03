"""Delayed records: how they wait in the log of their own partition, and how they are delivered there.

A producer asks for it by a header of the record, in decimal text:

    headrace.deliver.at      when, in ms since 1970
    headrace.deliver.after   how many ms from when the broker takes it

A batch that has such a record is *held*: the log has it as a control batch, which Kafka's consumers pass over, with the
producer's id, epoch and sequence and as many offsets as it has records. Each of these offsets is the *handle* of its
record. When records are due they are *delivered*: appended again as a plain batch, behind. A record can be *recalled*
before. Those that wait where retention wants to delete are *carried*: held again, behind. All of it is in one log, so
one order, one leader and one watermark decide what has become of a record.

What is held, carried or recalled is a control batch of one record. Big-endian:

    key    version int16 (0), type int16 (HELD, CARRIED or RECALLED; Kafka has types up to 6)
    value  of HELD:      version int16 (0), broker's ms when it was taken int64, the batch as it was produced
           of CARRIED:   version int16 (0), count int32, of each record: due ms int64, handle int64, offset of the batch
                         that held it int64; then a batch of these records
           of RECALLED:  version int16 (0), of each record: handle int64, offset of the batch that held it int64

A delivery has the bit DELIVERED among its attributes, of those that Kafka leaves free, and no producer. Its records
have lost the headers above and have others instead, in decimal text: by the first one a reader of the log knows
that the handle is delivered.

    headrace.delayed.offset     the handle
    headrace.delayed.place      the offset of the batch that held it last, where that was carried
    headrace.delayed.due        when it was due, in ms since 1970
    headrace.delayed.timestamp  the time that its producer gave it; its own is that of the delivery
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from headrace.errors import InvalidRecord
from headrace.records import batch, codecs, kernel
from headrace.records.batch import CONTROL, HEADER_BYTES, MAGIC, TRANSACTIONAL, BatchHeader, View
from headrace.records.record import Header, NewRecord, Record
from headrace.records.varints import varint

DELIVER_AT: Final = "headrace.deliver.at"
DELIVER_AFTER: Final = "headrace.deliver.after"
DELAYED_OFFSET: Final = "headrace.delayed.offset"
DELAYED_PLACE: Final = "headrace.delayed.place"
DELAYED_DUE: Final = "headrace.delayed.due"
DELAYED_TIMESTAMP: Final = "headrace.delayed.timestamp"
OWN_HEADERS: Final = frozenset(
    {DELIVER_AT, DELIVER_AFTER, DELAYED_OFFSET, DELAYED_PLACE, DELAYED_DUE, DELAYED_TIMESTAMP}
)

DELIVERED: Final = 0x4000
HELD: Final = 0x4801
CARRIED: Final = 0x4802
RECALLED: Final = 0x4803
VERSION: Final = 0
NO_PRODUCER: Final = (batch.NO_PRODUCER, -1, -1)
DIGITS_MAX: Final = 18
COLUMN_BYTES: Final = 80
"""Of a record, beside what it is encoded in."""
WORDED_MAX: Final = 100
"""Records whose error has words of its own; those behind are named by their places alone."""

_MENTIONED: Final = re.compile(rb"headrace\.deliver\.a(?:t|fter)")
_KEY: Final = struct.Struct(">hh")
_HELD: Final = struct.Struct(">hq")
_CARRIED: Final = struct.Struct(">hi")
_CARRIED_RECORD: Final = struct.Struct(">qqq")
_RECALLED: Final = struct.Struct(">h")
_RECALLED_RECORD: Final = struct.Struct(">qq")

Entry = tuple[int, int, int]
"""When a record is due in ms, its handle, and the offset of the batch that holds it."""
Delivery = tuple[Entry, Record]
Place = tuple[int, int]
"""The handle of a record, and the offset of the batch that held it."""


class HeldBatch(NamedTuple):
    """Of records that wait."""

    base_offset: int
    taken_ms: int
    """What is due by then was due when it came."""
    batch: bytes
    """Its records, as they were produced."""
    carried: tuple[Entry, ...] | None = None
    """Where its records were held before; None: it was not carried."""

    def entries(self) -> list[Entry]:
        """Of each record, with this batch as the one that holds it."""
        place = self.base_offset
        if self.carried is not None:
            return [(due_ms, handle, place) for due_ms, handle, _ in self.carried]
        wanted = _wanted_times(kernel.records(self.batch), self.taken_ms, {})
        return [(max(self.taken_ms, due_ms), place + nth, place) for nth, due_ms in enumerate(wanted)]

    def records(self) -> HeldRecords:
        return HeldRecords(self)


class HeldRecords:
    """The records of a held batch, of which few are wanted at a time."""

    __slots__ = ("_base_offset", "_columns", "_places", "codec")

    def __init__(self, held: HeldBatch) -> None:
        self.codec = batch.read_header(held.batch).codec
        self._columns = kernel.columns(held.batch)
        self._base_offset = held.base_offset
        self._places = None if held.carried is None else {each[1]: nth for nth, each in enumerate(held.carried)}

    @property
    def size_bytes(self) -> int:
        """In memory, about."""
        return len(self._columns.payload) + COLUMN_BYTES * len(self._columns.offsets)

    def __getitem__(self, handle: int) -> Record:
        nth = handle - self._base_offset if self._places is None else self._places[handle]
        found = self._columns
        start, end = found.record_starts[nth], found.record_starts[nth + 1]
        payload = bytes(found.payload[start:end])
        headers = _read_headers(payload, found.header_starts[nth] - start, found.header_counts[nth])
        key_at, key_bytes = found.key_starts[nth] - start, found.key_lengths[nth]
        value_at, value_bytes = found.value_starts[nth] - start, found.value_lengths[nth]
        return Record(
            found.offsets[nth],
            found.timestamps_ms[nth],
            None if key_bytes < 0 else payload[key_at : key_at + key_bytes],
            None if value_bytes < 0 else payload[value_at : value_at + value_bytes],
            headers,
        )


def _read_headers(payload: bytes, pos: int, count: int) -> list[Header]:
    headers: list[Header] = []
    for _ in range(count):
        length, pos = varint(payload, pos, len(payload))
        name = payload[pos : pos + length].decode(errors="replace")
        length, pos = varint(payload, pos + length, len(payload))
        headers.append((name, None if length < 0 else payload[pos : pos + length]))
        pos += max(0, length)
    return headers


class RecalledRecords(NamedTuple):
    places: tuple[Place, ...]


def due_times(produced: View, header: BatchHeader, now_ms: int, delay_max_ms: int) -> list[int] | None:
    """When the records of a producer's batch are due, if any of them is delayed: `now_ms` for those that are not, or
    whose time has passed. InvalidRecord names those whose headers make no sense, or ask for more than is allowed."""
    if header.attributes & DELIVERED:
        raise InvalidRecord(f"attribute {DELIVERED:#x} is the broker's own: it has delivered delayed records")
    section = codecs.decompress(header.codec, memoryview(produced)[HEADER_BYTES:])
    if _MENTIONED.search(section) is None:
        return None
    records = kernel.records(produced)
    if not any(name in (DELIVER_AT, DELIVER_AFTER) for record in records for name, _ in record.headers):
        return None
    wrong: dict[int, str] = {}
    if header.attributes & TRANSACTIONAL:
        wrong = dict.fromkeys(range(len(records)), "a delay, which records of a transaction cannot have")
    times = _wanted_times(records, now_ms, wrong)
    for place, wanted in enumerate(times):
        if wanted - now_ms > delay_max_ms:
            wrong[place] = f"a delay of {wanted - now_ms} ms, and headrace.delay.max.ms is {delay_max_ms}"
    if wrong:
        places = sorted(wrong)
        more = "" if len(places) == 1 else f"; {len(places)} records are wrong"
        raise InvalidRecord(
            f"record {places[0]} of the batch has {wrong[places[0]]}{more}",
            [(place, wrong[place] if nth < WORDED_MAX else None) for nth, place in enumerate(places)],
        )
    return [max(now_ms, wanted) for wanted in times]


def _wanted_times(records: Sequence[Record], now_ms: int, wrong: dict[int, str]) -> list[int]:
    times: list[int] = []
    for place, record in enumerate(records):
        wanted_ms, asked = now_ms, 0
        for name, content in record.headers:
            if name not in (DELIVER_AT, DELIVER_AFTER):
                continue
            asked += 1
            if content is None or not 0 < len(content) <= DIGITS_MAX or not content.isdigit():
                wrong[place] = f"{name}={content!r}, which is no whole number of ms"
            else:
                wanted_ms = int(content) + (now_ms if name == DELIVER_AFTER else 0)
        if asked > 1:
            wrong[place] = f"{asked} headers that say when to deliver it"
        times.append(wanted_ms)
    return times


def held_batch(produced: View, header: BatchHeader, taken_ms: int) -> tuple[bytearray, BatchHeader]:
    """A producer's batch as it waits in the log, and its header."""
    value = _HELD.pack(VERSION, taken_ms) + bytes(produced)
    base_ms = header.base_timestamp_ms
    section = kernel.encode([(base_ms, _KEY.pack(VERSION, HELD), value, ())], base_ms)
    held = BatchHeader(
        0, 0, -1, MAGIC, 0, CONTROL, header.last_offset_delta, base_ms, header.max_timestamp_ms,
        header.producer_id, header.producer_epoch, header.base_sequence, 1,
    )  # fmt: skip
    return kernel.assemble(held, section)


def carried_batch(carried: Sequence[Delivery], now_ms: int, codec: int) -> tuple[bytearray, BatchHeader]:
    """At least one record that goes on waiting here, instead of where its entry says."""
    inner = kernel.build([(each.timestamp_ms, each.key, each.value, each.headers) for _, each in carried], codec)
    places = b"".join([_CARRIED_RECORD.pack(*entry) for entry, _ in carried])
    return _control(CARRIED, _CARRIED.pack(VERSION, len(carried)) + places + inner, now_ms)


def recall_batch(places: Sequence[Place], now_ms: int) -> tuple[bytearray, BatchHeader]:
    value = _RECALLED.pack(VERSION) + b"".join([_RECALLED_RECORD.pack(*place) for place in places])
    return _control(RECALLED, value, now_ms)


def _control(kind: int, value: bytes, now_ms: int) -> tuple[bytearray, BatchHeader]:
    new: list[NewRecord] = [(now_ms, _KEY.pack(VERSION, kind), value, ())]
    return kernel.build_with_header(new, CONTROL)


def read_control(view: View, header: BatchHeader) -> HeldBatch | RecalledRecords | None:
    """None: another control batch. CorruptBatch and InvalidRecord if its bytes are no record."""
    if header.attributes & (CONTROL | TRANSACTIONAL) != CONTROL or header.record_count != 1:
        return None
    (record,) = kernel.records(view)
    key, value = record.key, record.value
    if key is None or value is None or len(key) < _KEY.size:
        return None
    _, kind = _KEY.unpack_from(key)
    if kind == HELD:
        _, taken_ms = _HELD.unpack_from(value)
        return HeldBatch(header.base_offset, taken_ms, value[_HELD.size :])
    if kind == CARRIED:
        _, count = _CARRIED.unpack_from(value)
        end = _CARRIED.size + count * _CARRIED_RECORD.size
        carried = tuple(_CARRIED_RECORD.iter_unpack(value[_CARRIED.size : end]))
        return HeldBatch(header.base_offset, -1, value[end:], carried)
    if kind == RECALLED:
        return RecalledRecords(tuple(_RECALLED_RECORD.iter_unpack(value[_RECALLED.size :])))
    return None


def delivery_batch(
    deliveries: Sequence[Delivery], now_ms: int, codec: int = codecs.Codec.NONE
) -> tuple[bytearray, BatchHeader]:
    """At least one record, delivered now."""
    return kernel.build_with_header([_delivered(*each, now_ms) for each in deliveries], DELIVERED | codec)


def _delivered(entry: Entry, record: Record, now_ms: int) -> NewRecord:
    due_ms, handle, place = entry
    headers: list[Header] = [header for header in record.headers if header[0] not in OWN_HEADERS]
    headers.append((DELAYED_OFFSET, b"%d" % handle))
    if place > handle:
        headers.append((DELAYED_PLACE, b"%d" % place))
    headers += [(DELAYED_DUE, b"%d" % due_ms), (DELAYED_TIMESTAMP, b"%d" % record.timestamp_ms)]
    return now_ms, record.key, record.value, headers


def delivered_entries(view: View) -> Iterator[Entry]:
    """What a delivery has delivered. Of a batch that was not carried the place is the handle itself: near enough."""
    for record in kernel.records(view):
        found = {name: content for name, content in record.headers if name in OWN_HEADERS and content is not None}
        handle, due_ms = found.get(DELAYED_OFFSET), found.get(DELAYED_DUE)
        if handle is not None and due_ms is not None:
            yield int(due_ms), int(handle), int(found.get(DELAYED_PLACE, handle))
