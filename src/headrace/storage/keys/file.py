"""One file of a key index, `<20-digit first offset>.keys`, mapped into memory; little-endian:

    512 bytes   header: magic "HRKY", version, slots, most entries, first offset, base time, hash mask, next offset of
                the file before; then what was safe when it was written: count of entries, CRC-32C of them and of the
                slots, next offset, and of the last batch base offset, CRC and leader epoch; last the header's CRC-32C
    4 bytes     a slot, as many as the header says  } see `records.key_hashes`
    20 bytes    an entry, with room to spare        }

Entries are only added, so those that a header counts stay as they were: what comes behind them is not believed after a
crash, and made again from the log. Slots are believed if they agree with their CRC, which they do after a clean stop
and in a full file; else they are made again from the entries. A header is written when the entries it counts are
synced. A file whose header or entries do not agree with their CRC is not believed at all. Room is given in advance, so
that a mapped write cannot meet a full disk.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from crc32c import crc32c

from headrace.ports.disk import MEDIUM_ERRORS, Disk, File
from headrace.records.key_hashes import KeyTable
from headrace.storage.keys.steps import Steps

ENDING: Final = ".keys"
DIGITS: Final = 20
HEADER_BYTES: Final = 512
SLOT_BYTES: Final = 4
ENTRY_BYTES: Final = 20
SPARE_BYTES_LEAST: Final = 4096
SPARE_BYTES_MOST: Final = 16 << 20
CHECK_BYTES: Final = 4 << 20
LINK_ENTRIES: Final = 1 << 16
MAGIC: Final = b"HRKY"
VERSION: Final = 1

_HEADER = struct.Struct("<4sIIIqqQqIIIqqIi")
_CRC = struct.Struct("<I")


class Mark(NamedTuple):
    """How far an index has come, and the last batch before that: the log must still have it."""

    next_offset: int
    base_offset: int
    crc: int
    epoch: int


class Damaged(Exception):
    """A file that does not agree with itself; it is made again from the log."""


class KeyFile:
    def __init__(self, disk: Disk, path: str, slots: int, capacity: int, follows: int, table: KeyTable) -> None:
        self.path = path
        self.follows = follows
        """Next offset of the file before when this one was begun; its own first offset if there was none."""
        self.slots = slots
        self.capacity = capacity
        self.table = table
        self.verified = False
        self.crc = 0
        """Of the entries that are in."""
        self._disk = disk
        self._view: memoryview | None = None
        self._claimed_crc = 0
        self._claimed_slots_crc = 0
        """0: not known."""

    @property
    def first_offset(self) -> int:
        return self.table.first_offset

    @property
    def next_offset(self) -> int:
        return self.table.next_offset

    @property
    def mark(self) -> Mark:
        table = self.table
        return Mark(table.next_offset, table.last_base, table.last_crc, table.last_epoch)

    @property
    def size_bytes(self) -> int:
        return self._entries_at + self.table.count * ENTRY_BYTES

    @property
    def _entries_at(self) -> int:
        return HEADER_BYTES + self.slots * SLOT_BYTES

    @classmethod
    def create(
        cls, disk: Disk, folder: str, first_offset: int, before: Mark | None, slots: int, capacity: int, table: KeyTable
    ) -> KeyFile:
        """A new file without entries, behind one that has come to `before`; OSError when the disk has no room."""
        path = f"{folder}/{first_offset:0{DIGITS}d}{ENDING}"
        created = cls(disk, path, slots, capacity, first_offset if before is None else before.next_offset, table)
        if before is not None:
            table.last_base, table.last_crc, table.last_epoch = before[1:]
        file = disk.open(path, create=True, writable=True)
        try:
            file.truncate(0)
        finally:
            file.close()
        created.verified = True
        created.make_room(1)
        created.write_header(created.mark, 0, 0)
        return created

    @classmethod
    def load(cls, disk: Disk, path: str) -> KeyFile | None:
        """The file as its header tells; None if that cannot be believed. Its entries are still to be checked."""
        file = disk.open(path)
        try:
            header, size = file.pread(HEADER_BYTES, 0), file.size()
        except OSError as error:
            if error.errno not in MEDIUM_ERRORS:
                raise
            return None
        finally:
            file.close()
        if len(header) < HEADER_BYTES or _CRC.unpack_from(header, HEADER_BYTES - 4)[0] != crc32c(header[:-4]):
            return None
        magic, version, slots, capacity, first_offset, base_ms, hash_mask, follows, *claimed = _HEADER.unpack_from(
            header
        )
        count, entries_crc, slots_crc, next_offset, last_base, last_crc, last_epoch = claimed
        if magic != MAGIC or version != VERSION or not path.endswith(f"{first_offset:0{DIGITS}d}{ENDING}"):
            return None
        loaded = cls(disk, path, slots, capacity, follows, KeyTable(first_offset, base_ms, hash_mask))
        if size < loaded._entries_at + max(1, count) * ENTRY_BYTES:
            return None
        table = loaded.table
        table.count = count
        table.next_offset, table.last_base, table.last_crc, table.last_epoch = (
            next_offset, last_base, last_crc, last_epoch,
        )  # fmt: skip
        loaded._claimed_crc, loaded._claimed_slots_crc = entries_crc, slots_crc
        return loaded

    def verify(self) -> Steps:
        """Check the entries, make the slots again if they do not agree; Damaged if the entries do not."""
        self.crc = 0
        file = self._disk.open(self.path, writable=True)
        try:
            yield from self._bring_in(file)
            self._map(file, max(self.size_bytes, self._entries_at + ENTRY_BYTES))
        finally:
            file.close()
        for at in range(0, self.table.count * ENTRY_BYTES, CHECK_BYTES):
            self.crc = crc32c(self._entries(at, at + CHECK_BYTES), self.crc)
            yield None
        if self.crc != self._claimed_crc:
            raise Damaged(f"{self.path}: its entries do not agree with their CRC")
        if not self._claimed_slots_crc or crc32c(self._slots()) != self._claimed_slots_crc:
            yield from self._link()
        self.verified = True

    def _bring_in(self, file: File) -> Steps:
        """Read the file ahead, so that its pages are not met cold."""
        came: list[int] = []
        for at in range(0, self.size_bytes, CHECK_BYTES):
            count = min(CHECK_BYTES, self.size_bytes - at)
            if not file.in_cache(at, count):
                came.clear()
                self._disk.read_ahead(file, [(at, count)], lambda: came.append(1))
                yield lambda: bool(came)

    def _link(self) -> Steps:
        slots = self._slots()
        slots[:] = bytes(len(slots))
        for first in range(0, self.table.count, LINK_ENTRIES):
            if not self.table.link(first, min(first + LINK_ENTRIES, self.table.count)):
                raise Damaged(f"{self.path}: its entries do not lead to each other")
            yield None

    def make_room(self, wanted: int) -> None:
        """Memory for so many more entries. OSError when the disk has none; nothing has changed then."""
        count = self.table.count
        if self._view is not None and count + wanted <= self.table.room:
            return
        used = count * ENTRY_BYTES
        spare = min(max(used, SPARE_BYTES_LEAST), SPARE_BYTES_MOST)
        entries = max(count + wanted, min(self.capacity, count + spare // ENTRY_BYTES))
        size = self._entries_at + entries * ENTRY_BYTES
        before = 0 if self._view is None else len(self._view)
        file = self._disk.open(self.path, writable=True)
        try:
            self._release()
            file.allocate(size)
            self._map(file, size)
        except OSError:
            if before:
                self._map(file, before)
            raise
        finally:
            file.close()

    def added(self, before: int) -> None:
        """Entries from `before` on have been put in."""
        self.crc = crc32c(self._entries(before * ENTRY_BYTES, self.table.count * ENTRY_BYTES), self.crc)

    def cut(self, mark: Mark) -> Steps:
        """Go back to where the index was then."""
        while not self.table.cut(mark.next_offset, LINK_ENTRIES):
            yield None
        table = self.table
        table.next_offset, table.last_base, table.last_crc, table.last_epoch = mark
        self.crc = 0
        for at in range(0, table.count * ENTRY_BYTES, CHECK_BYTES):
            self.crc = crc32c(self._entries(at, min(at + CHECK_BYTES, table.count * ENTRY_BYTES)), self.crc)
            yield None

    def write_header(self, mark: Mark, count: int, crc: int, slots_crc: int = 0) -> None:
        """Say what may be believed from now on; the entries counted are synced, or the file is closed with care."""
        header = bytearray(HEADER_BYTES)
        table = self.table
        _HEADER.pack_into(
            header, 0, MAGIC, VERSION, self.slots, self.capacity, table.first_offset, table.base_ms, table.hash_mask,
            self.follows, count, crc, slots_crc, *mark,
        )  # fmt: skip
        _CRC.pack_into(header, HEADER_BYTES - 4, crc32c(header[:-4]))
        assert self._view is not None
        self._view[:HEADER_BYTES] = header

    def finish(self) -> File:
        """Give back spare room and say that all of it may be believed; the file, to be synced and closed."""
        self.write_header(self.mark, self.table.count, self.crc, crc32c(self._slots()))
        size = max(self.size_bytes, self._entries_at + ENTRY_BYTES)
        file = self._disk.open(self.path, writable=True)
        self._release()
        file.truncate(size)
        self._map(file, size)
        return file

    def release(self) -> None:
        """Unmap; the file is of no further use here."""
        self._release()
        self.verified = False

    def _slots(self) -> memoryview:
        assert self._view is not None
        return self._view[HEADER_BYTES : self._entries_at]

    def _entries(self, start: int, end: int) -> memoryview:
        assert self._view is not None
        used = self._entries_at + self.table.count * ENTRY_BYTES
        return self._view[self._entries_at + start : min(self._entries_at + end, used)]

    def _map(self, file: File, size: int) -> None:
        self._view = file.map(size, writable=True, populate=False)
        end = self._entries_at + (size - self._entries_at) // ENTRY_BYTES * ENTRY_BYTES
        self.table.attach(self._slots().cast("I"), self._view[self._entries_at : end].cast("I"))

    def _release(self) -> None:
        self.table.detach()
        self._view = None
