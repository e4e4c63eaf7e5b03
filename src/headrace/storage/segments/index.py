"""The two sparse indexes of a segment.

`.index`      8 bytes an entry, little-endian: position uint32, then relative offset uint32 of the batch there; read
              as one number (offset << 32 | position) the entries rise, so a binary search runs over them as they lie
`.timeindex`  12 bytes an entry, little-endian: timestamp int64, relative offset uint32: every batch before that
              offset has a greatest timestamp not above that timestamp

The first batch of a segment has no entry, so an entry of zeros is the unused rest of an active index. An active index
is mapped into memory. It is given its blocks before it is written, a page at first and four times as many when they are
used up, so that a mapped write cannot meet a full disk. When the segment is closed, and on a clean stop, it is cut to
its used size and gets a last entry with the CRC-32C of the log's size (uint64) and the entries: offset 0xffffffff with
the CRC as position, or timestamp 2^63-1 with the CRC as offset. So one that was whole when its log was shorter or
longer is not believed. After a crash an active index is not believed but rebuilt from the log; so is any that does not
agree with its CRC.

A closed index may lie on the disk for long, and is not mapped: its pages are read (see `Pages`), and if the disk has
lost one, the index is made again from the log.
"""

from __future__ import annotations

import errno
import logging
import struct
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Final, TypeVar

from crc32c import crc32c

from headrace.ports.disk import MEDIUM_ERRORS, Disk, File, read_derived

log = logging.getLogger(__name__)

FIRST_BYTES: Final = 4096
GROWTH: Final = 4
LOW_HALF: Final = 0xFFFFFFFF
OFFSET_ENTRY_BYTES: Final = 8
LAST_TIMESTAMP_MS: Final = (1 << 63) - 1
TIME_ENTRY: Final = struct.Struct("<qI")

Answer = TypeVar("Answer")


PAGE_BYTES: Final = 4096
PAGES_MAX: Final = 16


class UnreadablePage(OSError):
    """A file does not have, or give back, what was written to it."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EIO, "cannot be read any more", path)


class Pages:
    """Entries of one size in a file that is not written any more: read a page at a time, and a few pages are kept.

    Such files are not mapped into memory. A page of a mapping that the disk does not give back, or that a file which
    was cut short does not have, ends the process; here it is `UnreadablePage`, and what is derived is made again.
    Entries lie behind `head_bytes`; `kind` is the letter of what `memoryview.cast` makes of a page.
    """

    __slots__ = ("_disk", "_entry_bytes", "_file", "_head_bytes", "_kept", "_kind", "page_entries", "path")

    def __init__(self, disk: Disk, path: str, entry_bytes: int, kind: str, head_bytes: int = 0) -> None:
        self._disk = disk
        self.path = path
        self._entry_bytes = entry_bytes
        self._head_bytes = head_bytes
        self._kind = kind
        self.page_entries = PAGE_BYTES // entry_bytes
        self._file: File | None = None
        self._kept: dict[int, memoryview] = {}

    def page(self, number: int, count: int) -> memoryview:
        """Entries of a page of a file that has `count` of them."""
        found = self._kept.get(number)
        if found is None:
            if len(self._kept) >= PAGES_MAX:
                del self._kept[next(iter(self._kept))]
            first = number * self.page_entries
            data = self.read(first, min(count, first + self.page_entries))
            found = self._kept[number] = memoryview(data).cast(self._kind)  # type: ignore[call-overload]
        return found

    def read(self, first: int, end: int) -> bytes:
        count = (end - first) * self._entry_bytes
        try:
            if self._file is None:
                self._file = self._disk.open(self.path)
            data = self._file.pread(count, self._head_bytes + first * self._entry_bytes)
        except OSError as error:
            if error.errno not in MEDIUM_ERRORS and error.errno != errno.ENOENT:
                raise
            raise UnreadablePage(self.path) from error
        if len(data) < count:
            raise UnreadablePage(self.path)
        return data

    def upto(self, count: int, is_upto: Callable[[memoryview], bool]) -> int:
        """How many pages begin with an entry of which that is so; it is so of the first ones, and not of the others."""
        low, high = 0, -(-count // self.page_entries)
        while low < high:
            middle = (low + high) // 2
            if is_upto(self.page(middle, count)):
                low = middle + 1
            else:
                high = middle
        return low

    def drop(self) -> None:
        self._file = None
        self._kept.clear()


class SegmentIndex(ABC):
    """The file under an index: mapped and grown while it is written, cut when it is closed, and then read by pages.
    `remake` makes it again from the log."""

    __slots__ = (
        "_disk",
        "_entry_bytes",
        "_most_bytes",
        "_pages",
        "_remake",
        "_view",
        "_writable_bytes",
        "count",
        "path",
    )

    def __init__(
        self,
        disk: Disk,
        path: str,
        entry_bytes: int,
        kind: str,
        most_bytes: int,
        count: int,
        remake: Callable[[], None],
    ) -> None:
        self._disk = disk
        self.path = path
        self._entry_bytes = entry_bytes
        self._most_bytes = max(entry_bytes, most_bytes)
        self._remake = remake
        self._view: memoryview | None = None
        self._pages = Pages(disk, path, entry_bytes, kind)
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
    @abstractmethod
    def last_entry(crc: int) -> bytes:
        """What a closed index ends with."""

    def drop(self) -> None:
        """Let go of the file; it keeps its spare room."""
        self._release()

    @property
    def writable(self) -> bool:
        return self._writable_bytes > 0

    def _take(self, view: memoryview) -> None:
        self._view = view

    def _release(self) -> None:
        self._view = None
        self._writable_bytes = 0
        self._pages.drop()

    def _look(self, find: Callable[[], Answer]) -> Answer:
        """What is found; in an index that is made again from its log, if the disk has lost this one."""
        try:
            return find()
        except UnreadablePage as error:
            log.warning("%s, and is made again from its log (%r)", error, error.__cause__)
            self._remake()
            return find()


class OffsetIndex(SegmentIndex):
    """Relative offset of a batch -> its position."""

    __slots__ = ("_entries",)

    def __init__(
        self, disk: Disk, path: str, most_bytes: int, count: int = 0, remake: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(disk, path, OFFSET_ENTRY_BYTES, "Q", most_bytes, count, remake)
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
        return self._look(lambda: self._last_of(self._upto(relative_offset << 32 | LOW_HALF)))

    def at_or_below_position(self, position: int) -> tuple[int, int]:
        """The last entry whose position is not above the one asked for; (0, 0) if there is none."""
        return self._look(lambda: self._last_of(self._upto(position, _position)))

    def entries_below(self, position: int) -> int:
        """How many entries point below the position."""
        return self._look(lambda: self._upto(position - 1, _position))

    def entry(self, at: int) -> tuple[int, int]:
        return self._look(lambda: self._last_of(at + 1))

    def _upto(self, most: int, key: Callable[[int], int] | None = None) -> int:
        """How many entries, or keys of them, are not above this."""
        if self._entries is not None:
            return bisect_right(self._entries, most, 0, self.count, key=key)
        pages = self._pages
        number = pages.upto(self.count, lambda page: (key(page[0]) if key else page[0]) <= most) - 1
        if number < 0:
            return 0
        before, page = number * pages.page_entries, pages.page(number, self.count)
        return before + bisect_right(page, most, 0, min(len(page), self.count - before), key=key)

    def _last_of(self, count: int) -> tuple[int, int]:
        if not count:
            return 0, 0
        if self._entries is not None:
            entry = self._entries[count - 1]
        else:
            number, at = divmod(count - 1, self._pages.page_entries)
            entry = self._pages.page(number, self.count)[at]
        return entry >> 32, entry & LOW_HALF


class TimeIndex(SegmentIndex):
    """Greatest timestamp before a relative offset; both rise."""

    __slots__ = ()

    def __init__(
        self, disk: Disk, path: str, most_bytes: int, count: int = 0, remake: Callable[[], None] = lambda: None
    ) -> None:
        most_bytes = most_bytes // OFFSET_ENTRY_BYTES * TIME_ENTRY.size
        super().__init__(disk, path, TIME_ENTRY.size, "B", most_bytes, count, remake)

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
        return self._look(lambda: self._entry(at))

    def _entry(self, at: int) -> tuple[int, int]:
        view = self._view
        if view is None:
            number, at = divmod(at, self._pages.page_entries)
            view = self._pages.page(number, self.count)
        timestamp_ms, relative_offset = TIME_ENTRY.unpack_from(view, at * TIME_ENTRY.size)
        return timestamp_ms, relative_offset

    def last_below(self, timestamp_ms: int) -> tuple[int, int] | None:
        """The last entry with a smaller timestamp: nothing before its offset can be what is looked for."""

        def find() -> tuple[int, int] | None:
            at = bisect_left(range(self.count), timestamp_ms, key=lambda i: self._entry(i)[0])
            return self._entry(at - 1) if at else None

        return self._look(find)

    def entries_upto(self, relative_offset: int) -> int:
        """How many entries speak only of what lies before the offset."""
        return self._look(lambda: bisect_right(range(self.count), relative_offset, key=lambda i: self._entry(i)[1]))


def closing_crc(entries: bytes, log_bytes: int) -> int:
    return crc32c(entries, crc32c(log_bytes.to_bytes(8, "big")))


def closed(entries: bytes, kind: type[SegmentIndex], log_bytes: int) -> bytes:
    """The content of an index that is not written any more, of a log of this size."""
    return entries + kind.last_entry(closing_crc(entries, log_bytes))


def closed_entries(data: bytes, kind: type[SegmentIndex], log_bytes: int) -> bytes | None:
    """The entries of a closed index file; None if its last entry does not agree with them and with the log's size."""
    entry_bytes = len(kind.last_entry(0))
    entries = data[:-entry_bytes]
    if len(data) % entry_bytes or kind.last_entry(closing_crc(entries, log_bytes)) != data[len(entries) :]:
        return None
    return entries


def _position(entry: int) -> int:
    return entry & LOW_HALF
