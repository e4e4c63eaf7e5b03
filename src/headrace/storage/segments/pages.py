"""Entries of one size in a file that is not written any more: read a page at a time, and a few pages are kept.

Such files are not mapped into memory. A page of a mapping that the disk does not give back, or that a file which was
cut short does not have, ends the process; here it is `UnreadablePage`, and what is derived is made again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final

from headrace.ports.disk import MEDIUM_ERRORS, Disk, File

PAGE_BYTES: Final = 4096
PAGES_MAX: Final = 16


class UnreadablePage(OSError):
    """A file does not have, or give back, what was written to it."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EIO, "cannot be read any more", path)


class Pages:
    """Entries lie behind `head_bytes`; `kind` is the letter of what `memoryview.cast` makes of a page."""

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
