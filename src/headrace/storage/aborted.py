"""The index of a log's aborted transactions: who reads only what is committed is told which records to leave out.

    <20-digit offset>.txnindex   per transaction, big-endian: producer id int64, its first offset int64, the marker's
                                 offset int64, the last stable offset behind the marker int64

One file for the markers of a segment, named after it; in the layout `shared` one for so many transactions, named after
the first marker. Entries rise by the marker's offset and are only added. The last stable offset is the first offset of
a transaction that was still open then: all that end later begin there or behind, so a search need not go on.

All of it is derived from the log. It is written with the snapshots of producers, each of which says how many entries of
which files belong to it, and their CRC-32C (`storage.producers`). A start takes the newest snapshot to which that
applies, and finds the rest in the batches behind it; so a file that is lost, torn or of before a truncation only makes
the start read more. Until then, and as long as the process lives, all entries are in memory, 40 bytes each.

Compaction takes the records of aborted transactions, and their markers later. An entry must not outlive its marker:
readers would leave out what the producer wrote later. So it goes when the marker does, and a start looks whether the
markers of a compacted log are there.
"""

from __future__ import annotations

import logging
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from headrace.ports.disk import Disk, read_derived
from headrace.storage.folder import stem

log = logging.getLogger(__name__)

TXN_INDEX: Final = ".txnindex"
FileOf = Callable[[int, "AbortedEntries | None"], int]
"""From the offset of a marker, and the file before it, to the offset that its file is named after."""
FILE_ENTRIES: Final = 4096
"""In a file of the layout `shared`."""

ENTRY: Final = struct.Struct(">qqqq")


class AbortedTransaction(NamedTuple):
    producer_id: int
    first_offset: int
    marker_offset: int
    last_stable_offset: int


class IndexedFile(NamedTuple):
    """What a snapshot says of a file: entries up to there, the offset of the last marker, and their CRC."""

    base_offset: int
    last_marker: int
    entry_count: int
    crc: int


class AbortedEntries:
    """Those of one file, in memory."""

    __slots__ = ("base_offset", "markers", "packed", "written")

    def __init__(self, base_offset: int, packed: bytes = b"") -> None:
        self.base_offset = base_offset
        self.packed = bytearray(packed)
        self.markers = array("q", (marker for _, _, marker, _ in ENTRY.iter_unpack(packed)))
        self.written = len(self.markers)
        """Entries that are in the file."""

    def __len__(self) -> int:
        return len(self.markers)

    def add(self, entry: AbortedTransaction) -> None:
        self.packed += ENTRY.pack(*entry)
        self.markers.append(entry.marker_offset)

    def remove(self, at: int) -> None:
        del self.markers[at]
        del self.packed[at * ENTRY.size : (at + 1) * ENTRY.size]
        self.written = min(self.written, at)

    def from_marker(self, offset: int) -> Iterator[AbortedTransaction]:
        """Those whose marker is not before the offset."""
        for at in range(bisect_left(self.markers, offset), len(self.markers)):
            yield AbortedTransaction(*ENTRY.unpack_from(self.packed, at * ENTRY.size))

    def described(self, end_offset: int) -> IndexedFile | None:
        """Those whose marker is before the offset; None if there are none."""
        count = bisect_left(self.markers, end_offset)
        if not count:
            return None
        packed = memoryview(self.packed)[: count * ENTRY.size]
        return IndexedFile(self.base_offset, self.markers[count - 1], count, crc32c(packed))


class AbortedTransactions:
    """All that a log knows of, in the order of their markers."""

    __slots__ = ("_file_of", "files")

    def __init__(self, file_of: FileOf, files: Iterable[AbortedEntries] = ()) -> None:
        self._file_of = file_of
        self.files = list(files)

    def __len__(self) -> int:
        return sum(map(len, self.files))

    def __iter__(self) -> Iterator[AbortedTransaction]:
        for entries in self.files:
            yield from entries.from_marker(0)

    def add(self, entry: AbortedTransaction) -> None:
        files = self.files
        last = files[-1] if files else None
        base_offset = self._file_of(entry.marker_offset, last)
        if last is None or base_offset != last.base_offset:
            last = AbortedEntries(base_offset)
            files.append(last)
        last.add(entry)

    def remove(self, marker_offset: int) -> None:
        """The marker is not there, or about to go."""
        for nth, entries in enumerate(self.files):
            at = bisect_left(entries.markers, marker_offset)
            if at < len(entries) and entries.markers[at] == marker_offset:
                entries.remove(at)
                if not entries:
                    del self.files[nth]
                return

    def drop_before(self, offset: int) -> None:
        """Files all of whose markers are before the offset: the log begins there."""
        self.files = [entries for entries in self.files if entries.markers[-1] >= offset]

    def between(self, from_offset: int, to_offset: int) -> Iterator[AbortedTransaction]:
        """Those of which records may lie between the offsets, in the order of their markers."""
        for entries in self.files:
            if entries.markers[-1] < from_offset:
                continue
            for entry in entries.from_marker(from_offset):
                if entry.first_offset < to_offset:
                    yield entry
                if entry.last_stable_offset >= to_offset:
                    return

    def described(self, end_offset: int) -> tuple[IndexedFile, ...]:
        """Those whose marker is before the offset."""
        found = (entries.described(end_offset) for entries in self.files)
        return tuple(each for each in found if each is not None)


def by_count(marker_offset: int, last: AbortedEntries | None) -> int:
    """In the layout `shared`: a file has so many entries, and the offset of its first marker."""
    return marker_offset if last is None or len(last) >= FILE_ENTRIES else last.base_offset


class AbortedIndex:
    """The files of one partition."""

    def __init__(self, disk: Disk, folder: str, bases: Iterable[int]) -> None:
        self._disk = disk
        self._folder = folder
        self._bases = set(bases)

    def path(self, base_offset: int) -> str:
        return stem(self._folder, base_offset) + TXN_INDEX

    def read(self, described: Sequence[IndexedFile], first_offset: int) -> list[AbortedEntries] | None:
        """What a snapshot has described, without what lies before the first offset of the log; None if it is not all
        there."""
        found: list[AbortedEntries] = []
        for each in described:
            if each.last_marker < first_offset:
                continue  # its file may have gone with what it tells of
            try:
                data = read_derived(self._disk, self.path(each.base_offset))
            except FileNotFoundError:
                data = None
            packed = b"" if data is None else data[: each.entry_count * ENTRY.size]
            if len(packed) != each.entry_count * ENTRY.size or crc32c(packed) != each.crc:
                log.warning("%s: not whole: left out, the log itself is read instead", self.path(each.base_offset))
                return None
            found.append(AbortedEntries(each.base_offset, packed))
        return found

    def write(self, aborted: AbortedTransactions) -> list[str]:
        """What the files do not have yet; answers the paths, to be synced."""
        paths: list[str] = []
        for entries in aborted.files:
            if entries.written == len(entries):
                continue
            path, position = self.path(entries.base_offset), entries.written * ENTRY.size
            file = self._disk.open(path, create=True, writable=True)
            try:
                file.truncate(position)  # what follows is of before a truncation, or of entries that have gone
                file.pwritev([entries.packed[position:]], position)
            finally:
                file.close()
            entries.written = len(entries)
            self._bases.add(entries.base_offset)
            paths.append(path)
        return paths

    @property
    def paths(self) -> list[str]:
        return [self.path(base_offset) for base_offset in self._bases]

    def tidy(self, aborted: AbortedTransactions) -> None:
        """Remove files that no entry is in, once a snapshot is written that does not need them."""
        for base_offset in self._bases.difference(entries.base_offset for entries in aborted.files):
            if self._disk.exists(self.path(base_offset)):
                self._disk.remove(self.path(base_offset))
            self._bases.discard(base_offset)
