"""The two sparse indexes of a segment, mapped into memory.

`.index`      8 bytes an entry, little-endian: position uint32, then relative offset uint32 of the batch there; read
              as one number (offset << 32 | position) the entries rise, so a binary search runs over the map itself
`.timeindex`  12 bytes an entry, little-endian: timestamp int64, relative offset uint32: every batch before that
              offset has a greatest timestamp not above that timestamp

The first batch of a segment has no entry, so an entry of zeros is the unused rest of an active index. An active index
is given its blocks before it is written, a page at first and four times as many when they are used up, so that a mapped
write cannot meet a full disk. When the segment is closed, and on a clean stop, it is cut to its used size and gets a
last entry with the CRC-32C of the log's size (uint64) and the entries: offset 0xffffffff with the CRC as position, or
timestamp 2^63-1 with the CRC as offset. So one that was whole when its log was shorter or longer is not believed.
After a crash an active index is not believed but rebuilt from the log; so is any that does not agree with its CRC.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from typing import Final

from crc32c import crc32c

from headrace.ports.disk import Disk, read_derived

FIRST_BYTES: Final = 4096
GROWTH: Final = 4
LOW_HALF: Final = 0xFFFFFFFF
OFFSET_ENTRY_BYTES: Final = 8
LAST_TIMESTAMP_MS: Final = (1 << 63) - 1
TIME_ENTRY: Final = struct.Struct("<qI")


class MappedIndex:
    """The file under an index: opened at first use, grown while it is written, cut when it is closed."""

    __slots__ = ("_disk", "_entry_bytes", "_most_bytes", "_view", "_writable_bytes", "count", "path")

    def __init__(self, disk: Disk, path: str, entry_bytes: int, most_bytes: int, count: int) -> None:
        self._disk = disk
        self.path = path
        self._entry_bytes = entry_bytes
        self._most_bytes = max(entry_bytes, most_bytes)
        self._view: memoryview | None = None
        self._writable_bytes = 0
        self.count = count

    @property
    def full(self) -> bool:
        return (self.count + 1) * self._entry_bytes > self._most_bytes

    def make_room(self) -> None:
        """Room for one more entry. OSError when the disk has none; nothing has changed then."""
        used = self.count * self._entry_bytes
        if used + self._entry_bytes <= self._writable_bytes:
            return
        wanted = FIRST_BYTES
        while wanted < used + self._entry_bytes:
            wanted *= GROWTH
        wanted = max(used + self._entry_bytes, min(wanted, self._most_bytes))
        file = self._disk.open(self.path, create=True, writable=True)
        try:
            self._release()
            if file.size() > used and self._writable_bytes == 0:
                file.truncate(used)  # leftovers of a crash must not look like entries
            file.allocate(wanted)
            self._take(file.map(wanted, writable=True, populate=True))
            self._writable_bytes = wanted
        finally:
            file.close()

    def open_for_reading(self) -> None:
        if self._view is None and self.count:
            file = self._disk.open(self.path)
            try:
                self._take(file.map(self.count * self._entry_bytes, writable=False, populate=False))
            finally:
                file.close()

    def cut(self, log_bytes: int) -> None:
        """Unmap, give the file its used size and close it with its CRC, for a log of so many bytes."""
        self._release()
        used = self.count * self._entry_bytes
        file = self._disk.open(self.path, create=True, writable=True)
        try:
            file.truncate(used)
            file.pwritev([self.last_entry(closing_crc(file.pread(used, 0), log_bytes))], used)
        finally:
            file.close()

    def load(self, log_bytes: int) -> bool:
        """Count the entries of a file that was cut; False if it is not whole, or not of a log of so many bytes."""
        if not self._disk.exists(self.path):
            return False
        data = read_derived(self._disk, self.path)
        entries = closed_entries(data, type(self), log_bytes) if data is not None else None
        if entries is None:
            return False
        self.count = len(entries) // self._entry_bytes
        return True

    @staticmethod
    def last_entry(crc: int) -> bytes:
        raise NotImplementedError

    def drop(self) -> None:
        """Unmap; the file keeps its spare room."""
        self._release()

    @property
    def writable(self) -> bool:
        return self._writable_bytes > 0

    def _take(self, view: memoryview) -> None:
        self._view = view

    def _release(self) -> None:
        self._view = None
        self._writable_bytes = 0


class OffsetIndex(MappedIndex):
    """Relative offset of a batch -> its position."""

    __slots__ = ("_entries",)

    def __init__(self, disk: Disk, path: str, most_bytes: int, count: int = 0) -> None:
        super().__init__(disk, path, OFFSET_ENTRY_BYTES, most_bytes, count)
        self._entries: memoryview | None = None

    @staticmethod
    def last_entry(crc: int) -> bytes:
        return (LOW_HALF << 32 | crc).to_bytes(OFFSET_ENTRY_BYTES, "little")

    def _take(self, view: memoryview) -> None:
        self._view = view
        self._entries = view[: len(view) // 8 * 8].cast("Q")

    def _release(self) -> None:
        self._entries = None
        super()._release()

    def append(self, relative_offset: int, position: int) -> None:
        self.make_room()
        assert self._entries is not None
        self._entries[self.count] = relative_offset << 32 | position
        self.count += 1

    def at_or_before(self, relative_offset: int) -> tuple[int, int]:
        """The last entry whose offset is not above the one asked for; (0, 0), the segment's start, if there is none."""
        if not self.count:
            return 0, 0
        self.open_for_reading()
        assert self._entries is not None
        at = bisect_right(self._entries, relative_offset << 32 | LOW_HALF, 0, self.count)
        entry = self._entries[at - 1] if at else 0
        return entry >> 32, entry & LOW_HALF

    def at_or_below_position(self, position: int) -> tuple[int, int]:
        """The last entry whose position is not above the one asked for; (0, 0) if there is none."""
        if not self.count:
            return 0, 0
        self.open_for_reading()
        assert self._entries is not None
        at = bisect_right(self._entries, position, 0, self.count, key=_position)
        entry = self._entries[at - 1] if at else 0
        return entry >> 32, entry & LOW_HALF

    def entries_below(self, position: int) -> int:
        """How many entries point below the position."""
        if not self.count:
            return 0
        self.open_for_reading()
        assert self._entries is not None
        return bisect_left(self._entries, position, 0, self.count, key=_position)

    def entry(self, at: int) -> tuple[int, int]:
        self.open_for_reading()
        assert self._entries is not None
        entry = self._entries[at]
        return entry >> 32, entry & LOW_HALF


class TimeIndex(MappedIndex):
    """Greatest timestamp before a relative offset; both rise."""

    __slots__ = ()

    def __init__(self, disk: Disk, path: str, most_bytes: int, count: int = 0) -> None:
        super().__init__(disk, path, TIME_ENTRY.size, most_bytes // OFFSET_ENTRY_BYTES * TIME_ENTRY.size, count)

    @staticmethod
    def last_entry(crc: int) -> bytes:
        return TIME_ENTRY.pack(LAST_TIMESTAMP_MS, crc)

    def append(self, timestamp_ms: int, relative_offset: int) -> None:
        """Taken only when the timestamp is greater than the last one."""
        if self.count and self.entry(self.count - 1)[0] >= timestamp_ms:
            return
        self.make_room()
        assert self._view is not None
        TIME_ENTRY.pack_into(self._view, self.count * TIME_ENTRY.size, timestamp_ms, relative_offset)
        self.count += 1

    def entry(self, at: int) -> tuple[int, int]:
        self.open_for_reading()
        assert self._view is not None
        timestamp_ms, relative_offset = TIME_ENTRY.unpack_from(self._view, at * TIME_ENTRY.size)
        return timestamp_ms, relative_offset

    def last_below(self, timestamp_ms: int) -> tuple[int, int] | None:
        """The last entry with a smaller timestamp: nothing before its offset can be what is looked for."""
        at = bisect_left(range(self.count), timestamp_ms, key=lambda i: self.entry(i)[0])
        return self.entry(at - 1) if at else None

    def entries_upto(self, relative_offset: int) -> int:
        """How many entries speak only of what lies before the offset."""
        return bisect_right(range(self.count), relative_offset, key=lambda i: self.entry(i)[1])


def closing_crc(entries: bytes, log_bytes: int) -> int:
    return crc32c(entries, crc32c(log_bytes.to_bytes(8, "big")))


def closed_entries(data: bytes, kind: type[MappedIndex], log_bytes: int) -> bytes | None:
    """The entries of a closed index file; None if its last entry does not agree with them and with the log's size."""
    entry_bytes = len(kind.last_entry(0))
    entries = data[:-entry_bytes]
    if len(data) % entry_bytes or kind.last_entry(closing_crc(entries, log_bytes)) != data[len(entries) :]:
        return None
    return entries


def _position(entry: int) -> int:
    return entry & LOW_HALF
