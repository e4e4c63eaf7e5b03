# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Keys of record batches into a hash table of numbers, and back to offsets, without an object per record.

A table is two arrays of unsigned 32-bit numbers. `slots` holds, by hash, the newest entry there (counted from 1; 0 is
none). `entries` holds five numbers for each record that has a key, in the order of their offsets:

    low half of the key's hash, high half, offset less the table's first offset,
    seconds since the table's base time (signed; the least and the greatest number mean "or beyond"),
    the entry before in the same slot (counted from 1; 0 is none)

An entry is never changed once it is written, and points only to older ones: slots can be made again from entries, and
taken back entry by entry. The hash is FNV-1a of 64 bits, its bits then mixed once more.

The same file runs as Python and, with the C types of `key_hashes.pxd`, compiled: `compiled` tells which one runs. As
in `kernel`, positions are checked before a byte is read.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.errors import CorruptBatch, InvalidRecord
from headrace.records.batch import View, read_header
from headrace.records.codecs import decompress

try:
    import cython
except ImportError:
    from headrace.records import cython_stub as cython

if not cython.compiled:  # else they are constants and inlined functions, as the .pxd says
    from headrace.records.batch import APPEND_TIME, CODEC_MASK, CONTROL, HEADER_BYTES, LENGTH_END, MAGIC, MAGIC_AT, MOST
    from headrace.records.memory import number
    from headrace.records.varints import varint

compiled: Final = not __file__.endswith((".py", ".pyc"))


FIELDS: Final = 5
ALL_BITS: Final = (1 << 64) - 1
LOW_HALF: Final = (1 << 32) - 1
MOST_SECONDS: Final = (1 << 31) - 1
LEAST_SECONDS: Final = -(1 << 31)
BASIS: Final = 0xCBF29CE484222325
PRIME: Final = 0x100000001B3
MIX: Final = 0xFF51AFD7ED558CCD

WHOLE: Final = 0
ROOM: Final = 1
RANGE: Final = 2
"""Why `KeyTable.add` stopped: all whole batches are in; the next needs more entries, or offsets, than there is room."""


def hash_of(data: Any, pos: int, length: int) -> int:
    found = BASIS
    for at in range(pos, pos + length):
        found = ((found ^ data[at]) * PRIME) & ALL_BITS
    found ^= found >> 33
    found = (found * MIX) & ALL_BITS
    return found ^ (found >> 33)


def key_hash(key: bytes) -> int:
    return hash_of(key, 0, len(key))


def whole_seconds(span_ms: int) -> int:
    """Rounded down; told so that C's division, which rounds towards zero, says the same as Python's."""
    if span_ms < 0:
        return -((999 - span_ms) // 1000)
    return span_ms // 1000


class KeyTable:
    """One table over memory of the caller's. `count` entries are in it; `room` is how many its memory can take.

    `add` leaves what it has come to in `next_offset` (after the last batch), `last_base`, `last_crc` and `last_epoch`
    (of that batch), `unreadable` (batches passed over so far) and `stopped`, with `wanted` the records of the batch
    that had no room. `hash_mask` makes different keys look alike, for tests.
    """

    def __init__(self, first_offset: int, base_ms: int, hash_mask: int = ALL_BITS) -> None:
        self.first_offset = first_offset
        self.base_ms = base_ms
        self.hash_mask = hash_mask
        self.count = 0
        self.room = 0
        self.slot_count = 0
        self.next_offset = first_offset
        self.last_base = -1
        self.last_crc = 0
        self.last_epoch = -1
        self.unreadable = 0
        self.stopped = WHOLE
        self.wanted = 0

    def attach(self, slots: memoryview, entries: memoryview) -> None:
        """Use this memory, both cast to unsigned 32-bit numbers."""
        self.slots = slots
        self.entries = entries
        self.slot_count = len(slots)
        self.room = len(entries) // FIELDS

    def detach(self) -> None:
        """Let go of the memory, so that it can be unmapped."""
        self.slots = None  # type: ignore[assignment]
        self.entries = None  # type: ignore[assignment]
        self.slot_count = 0
        self.room = 0

    def add(self, records: View) -> int:
        """Take the keys of all whole batches; answers how many bytes were taken."""
        view = memoryview(records)
        self.stopped = WHOLE
        end = len(view)
        if end < HEADER_BYTES:
            return 0
        self.payload = view
        if cython.compiled:
            data = cython.address(self.payload[0])
        else:
            data = view
        start = 0
        while end - start >= HEADER_BYTES:
            size = number(data, start + 8, 4) + LENGTH_END
            if data[start + MAGIC_AT] != MAGIC or size < HEADER_BYTES:
                read_header(view, start)
            if size > end - start:
                break
            base_offset = number(data, start, 8)
            last_delta = number(data, start + 23, 4)
            if not 0 <= base_offset < MOST or last_delta < 0:
                raise CorruptBatch(f"batch at byte {start} has offset {base_offset} and last delta {last_delta}")
            if base_offset >= self.next_offset:
                if base_offset + last_delta - self.first_offset > LOW_HALF:
                    self.stopped = RANGE
                    break
                record_count = number(data, start + 57, 4)
                if record_count > self.room - self.count:
                    self.stopped = ROOM
                    self.wanted = record_count
                    break
                if data[start + 22] & CONTROL == 0 and record_count > 0:
                    self.add_batch(view, data, start, size)
                self.next_offset = base_offset + last_delta + 1
                self.last_base = base_offset
                self.last_crc = number(data, start + 17, 4) & LOW_HALF
                self.last_epoch = number(data, start + 12, 4)
            start += size
        self.payload = None  # type: ignore[assignment]
        return start

    def add_batch(self, view: memoryview, data: Any, start: int, size: int) -> None:
        """One batch; one whose records cannot be read has nothing that could be found."""
        attributes = data[start + 22]
        before = self.count
        if attributes & CODEC_MASK == 0:
            whole = self.add_records(data, start, start + HEADER_BYTES, start + size, data)
        else:
            try:
                unpacked = memoryview(decompress(attributes & CODEC_MASK, view[start + HEADER_BYTES : start + size]))
            except (CorruptBatch, InvalidRecord):
                unpacked = memoryview(b"")
            self.unpacked = unpacked
            if len(unpacked) == 0:
                whole = False
            elif cython.compiled:
                whole = self.add_records(data, start, 0, len(unpacked), cython.address(self.unpacked[0]))
            else:
                whole = self.add_records(data, start, 0, len(unpacked), unpacked)
            self.unpacked = None  # type: ignore[assignment]
        if not whole:
            self.unreadable += 1
        self.chain(before)

    def add_records(self, head: Any, start: int, pos: int, end: int, data: Any) -> bool:
        """False where a record is malformed: what comes after it in its batch is left out."""
        base_ms = number(head, start + 27, 8)
        append_ms = number(head, start + 35, 8)
        append_time = head[start + 22] & APPEND_TIME != 0
        record_count = number(head, start + 57, 4)
        last_delta = number(head, start + 23, 4)
        relative = number(head, start, 8) - self.first_offset
        if not (-MOST < base_ms < MOST and -MOST < append_ms < MOST):
            return False
        previous_delta = -1
        for _ in range(record_count):
            length, pos = varint(data, pos, end)
            if pos < 0 or length < 0 or length > end - pos:
                return False
            record_end = pos + length
            delta_ms, pos = varint(data, pos + 1, record_end)
            delta, pos = varint(data, pos, record_end)
            length, pos = varint(data, pos, record_end)
            if pos < 0 or length > record_end - pos or delta <= previous_delta or delta > last_delta:
                return False
            if delta_ms <= -MOST or delta_ms >= MOST:
                return False
            previous_delta = delta
            if length >= 0:
                timestamp_ms = append_ms if append_time else base_ms + delta_ms
                self.put(hash_of(data, pos, length), relative + delta, timestamp_ms)
            pos = record_end
        return True

    def put(self, found: int, relative: int, timestamp_ms: int) -> None:
        """One more entry, not in its chain yet."""
        found &= self.hash_mask
        seconds = whole_seconds(timestamp_ms - self.base_ms)
        if seconds > MOST_SECONDS:
            seconds = MOST_SECONDS
        elif seconds < LEAST_SECONDS:
            seconds = LEAST_SECONDS
        at = self.count * FIELDS
        self.entries[at] = found & LOW_HALF
        self.entries[at + 1] = found >> 32
        self.entries[at + 2] = relative
        self.entries[at + 3] = seconds & LOW_HALF
        self.count += 1

    def chain(self, first: int) -> None:
        """Put the entries from `first` on into their chains: in a loop of its own, so that the processor can wait for
        many slots at once. They are all over the memory, and hardly ever in its caches."""
        slot_count = self.slot_count
        for nth in range(first, self.count):
            at = nth * FIELDS
            slot = self.entries[at] % slot_count
            self.entries[at + 4] = self.slots[slot]
            self.slots[slot] = nth + 1

    def newest(self, found: int) -> int:
        """The entry that a search for this hash begins with, 0 if there is none."""
        found &= self.hash_mask
        return self.slots[(found & LOW_HALF) % self.slot_count] if self.slot_count > 0 else 0

    def find(
        self, found: int, entry: int, first_offset: int, next_offset: int, from_ms: int, to_ms: int, steps: int
    ) -> tuple[int, list[int]]:
        """Go down a chain from `entry`, at most so many steps: the entry to go on with, 0 at the end, and the offsets
        between the two given, newest first, of records that may have this hash and a time from `from_ms` to before
        `to_ms`. ValueError where the chain is not one."""
        found &= self.hash_mask
        low = found & LOW_HALF
        high = found >> 32
        least = -MOST if from_ms <= -MOST else whole_seconds(from_ms - self.base_ms)
        greatest = MOST if to_ms >= MOST else whole_seconds(to_ms - 1 - self.base_ms)
        offsets: list[int] = []
        while entry > 0 and steps > 0:
            if entry > self.count or entry > self.room:
                raise ValueError(f"a chain leads to entry {entry} of {self.count}")
            at = (entry - 1) * FIELDS
            offset = self.first_offset + self.entries[at + 2]
            if offset < first_offset:
                return 0, offsets
            if self.entries[at] == low and self.entries[at + 1] == high and offset < next_offset:
                seconds = self.entries[at + 3]
                if seconds > MOST_SECONDS:
                    seconds -= LOW_HALF + 1
                if (seconds >= least or seconds == MOST_SECONDS) and (seconds <= greatest or seconds == LEAST_SECONDS):
                    offsets.append(offset)
            before = self.entries[at + 4]
            if before >= entry:
                raise ValueError(f"entry {entry} points to {before}")
            entry = before
            steps -= 1
        return entry, offsets

    def cut(self, offset: int, steps: int) -> bool:
        """Take back entries at and above the offset, at most so many; whether all are."""
        while steps > 0 and 0 < self.count <= self.room:
            at = (self.count - 1) * FIELDS
            if self.first_offset + self.entries[at + 2] < offset:
                return True
            self.slots[self.entries[at] % self.slot_count] = self.entries[at + 4]
            self.count -= 1
            steps -= 1
        return self.count == 0

    def link(self, first: int, end: int) -> bool:
        """Make the slots of entries first to end - 1 again, those before being made; False if the entries disagree."""
        if end > self.room:
            return False
        for nth in range(first, end):
            at = nth * FIELDS
            slot = self.entries[at] % self.slot_count
            if self.entries[at + 4] != self.slots[slot]:
                return False
            self.slots[slot] = nth + 1
        return True
