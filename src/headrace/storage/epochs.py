"""Leader epoch -> first offset written in it, one small file per partition: `leader-epochs`.

Entries of 16 bytes, big-endian, in rising order of both: epoch uint32, first offset uint64, CRC-32C of those uint32.
New entries are written behind the old ones and synced with the batches that brought them; after a crash the whole
entries count, and what recovery reads from the log itself is added. A file that is gone is rebuilt from the log.

Compaction takes batches away, and with them what the log says of its epochs: so a follower is told its leader's starts
and keeps them. Where only batches are left to tell, an epoch counts from the end of the batch before its first. That is
never above its true start, and between the two nothing is left: a replica that is measured by it may have to copy
something again, but keeps nothing that was never committed.
"""

from __future__ import annotations

import logging
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from crc32c import crc32c

from headrace.ports.disk import Disk, File
from headrace.records.batch import BatchHeader
from headrace.storage.log import EpochEnd

log = logging.getLogger(__name__)

FILE_NAME: Final = "leader-epochs"
ENTRY: Final = struct.Struct(">IQI")
_BODY = struct.Struct(">IQ")


class EpochHistory:
    """Epochs in memory, loaded at first use; `save` writes what is new."""

    __slots__ = ("_changed", "_disk", "_entries", "_from_log", "_path", "_saved", "was_rebuilt")

    def __init__(self, disk: Disk, folder: str, *, fresh: bool = False) -> None:
        self._disk = disk
        self._from_log: Callable[[], Iterable[tuple[int, int]]] = tuple
        self._path = f"{folder}/{FILE_NAME}"
        self._entries: list[tuple[int, int]] | None = [] if fresh else None
        self._saved = 0
        self._changed = False
        self.was_rebuilt = False
        """Whether the file was missing or not whole, so that the log tells its epochs and not the file."""

    @property
    def entries(self) -> list[tuple[int, int]]:
        return self.load() if self._entries is None else self._entries

    def load(self) -> list[tuple[int, int]]:
        """Read the file, unless that was done; OSError if it cannot be read."""
        if self._entries is None:
            self._entries, wrong = read_entries(self._disk, self._path)
            self._saved = len(self._entries)
            if wrong or not self._entries:
                self._rebuild(wrong)
        return self._entries

    def _rebuild(self, wrong: str) -> None:
        """Without a file nothing is wrong if the log has no batches either."""
        self._changed, self.was_rebuilt = bool(wrong), True
        for epoch, offset in self._from_log():
            self.begin(epoch, offset)
        if self._changed:
            log.error("%s %s: rebuilt from the log", self._path, wrong or "is missing or empty")

    def rebuild_from(self, from_log: Callable[[], Iterable[tuple[int, int]]]) -> None:
        """Where to find epoch and least start of every batch, if the file is missing or not whole when it is loaded."""
        self._from_log = from_log

    def last_epoch(self) -> int:
        entries = self.entries
        return entries[-1][0] if entries else -1

    def begin(self, epoch: int, offset: int) -> None:
        """From this offset on it is this epoch; only a new one is kept."""
        entries = self.entries
        if epoch >= 0 and (not entries or epoch > entries[-1][0]):
            entries.append((epoch, offset))
            self._changed = True

    def crc_below(self, offset: int) -> int:
        """Of the epochs that began before the offset."""
        return crc32c(b"".join(_encode(entry) for entry in self.entries if entry[1] < offset))

    def epoch_at(self, offset: int) -> int | None:
        entries = self.entries
        at = bisect_right(entries, offset, key=_start)
        return entries[at - 1][0] if at else None

    def end_of(self, epoch: int, start_offset: int, end_offset: int) -> EpochEnd | None:
        entries = self.entries
        at = bisect_right(entries, epoch, key=_epoch)
        if not at:
            return None
        end = entries[at][1] if at < len(entries) else end_offset
        return EpochEnd(entries[at - 1][0], end) if end >= start_offset else None

    def truncate(self, end_offset: int) -> None:
        """Forget epochs that began at or after the offset."""
        self.cut(bisect_left(self.entries, end_offset, key=_start))

    def cut(self, count: int) -> None:
        """Forget all but the first `count` entries, which were there before a write that failed."""
        if count < len(self.entries):
            del self.entries[count:]
            self._saved = min(self._saved, count)
            self._changed = True

    def save(self) -> File | None:
        """Bring the file up to date; the file if it changed, to be synced by the caller."""
        if not self._changed:
            return None
        entries, saved = self.entries, self._saved
        file = self._disk.open(self._path, create=True, writable=True)
        file.truncate(saved * ENTRY.size)
        if saved < len(entries):
            file.pwritev([b"".join(map(_encode, entries[saved:]))], saved * ENTRY.size)
        self._saved, self._changed = len(entries), False
        return file


def starts_in(headers: Iterable[BatchHeader], from_offset: int) -> Iterator[tuple[int, int]]:
    """Epoch and least start of every batch, in order; nothing lies between the first one and `from_offset`."""
    end = from_offset
    for header in headers:
        yield header.leader_epoch, min(end, header.base_offset)
        end = header.next_offset


def reconciled(saved: Sequence[tuple[int, int]], seen: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Epochs that were seen, each with its least start and its first batch; what the file says of it, and of others
    before it that left no batches, counts as far as it fits between the two. None begins before the one before it: of
    batches that were deleted nobody knows where the next could begin at least, but the file may."""
    starts: list[tuple[int, int]] = []
    last = -1
    for epoch, least, first in seen:
        least = max(least, starts[-1][1]) if starts else least
        new = [entry for entry in saved if last < entry[0] <= epoch]
        fits = bool(new) and new[-1][0] == epoch and least <= new[0][1] and new[-1][1] <= first
        starts += new if fits else [(epoch, least)]
        last = epoch
    return starts


def read_entries(disk: Disk, path: str) -> tuple[list[tuple[int, int]], str]:
    """The whole entries, and what is wrong behind them ("" if nothing)."""
    if not disk.exists(path):
        return [], ""
    file = disk.open(path)
    try:
        data = file.pread(file.size(), 0)
    finally:
        file.close()
    entries: list[tuple[int, int]] = []
    for at in range(0, len(data), ENTRY.size):
        if at + ENTRY.size > len(data):
            return entries, f"at byte {at}: {len(data) - at} bytes are no whole entry"
        epoch, offset, crc = ENTRY.unpack_from(data, at)
        if crc32c(data[at : at + _BODY.size]) != crc:
            return entries, f"at byte {at}: entry has a wrong CRC"
        if entries and (epoch <= entries[-1][0] or offset < entries[-1][1]):
            return entries, f"at byte {at}: epoch {epoch} from offset {offset} does not rise"
        entries.append((epoch, offset))
    return entries, ""


def _encode(entry: tuple[int, int]) -> bytes:
    body = _BODY.pack(*entry)
    return body + crc32c(body).to_bytes(4, "big")


def _start(entry: tuple[int, int]) -> int:
    return entry[1]


def _epoch(entry: tuple[int, int]) -> int:
    return entry[0]
