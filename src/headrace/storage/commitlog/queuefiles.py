"""The files of a partition's queue: loading them, adding entries behind the others, counting what they point to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from headrace.ports.disk import Disk, File
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.frames import FRAME_BYTES
from headrace.storage.commitlog.queuefile import DAMAGED, GONE, OLD, QUEUE, OpenQueues, QueueFile, Run

DIGITS: Final = 20


class QueueFiles:
    """In order of their offsets, the active one last. Entries of the first file before its front do not count."""

    def __init__(self, disk: Disk, commit_log: CommitLog, open_queues: OpenQueues, folder: str) -> None:
        self._disk = disk
        self._commit_log = commit_log
        self._open_queues = open_queues
        self.folder = folder
        self._files: list[QueueFile] = []
        self._firsts: list[int] = []
        self._front = 0
        self.end_offset = 0
        self.size_bytes = 0
        self.live: dict[int, int] = {}
        """Bytes that are wanted, by the number of the commit file that they lie in. Offsets that are gone or damaged
        count as a header: without the file nobody would know of them."""
        self.names_changed = False
        """Whether files came or went since the folder was last synced."""
        self.scratch = False
        """Whether it is being built anew, so that nobody needs its files as they are on disk."""
        self.broken = False
        """Whether a shortage came upon it at a moment at which it could not be left as it was."""

    # Files.

    def load(self, first_offset: int, count: int, crc: int) -> bool:
        """Take the files that a checkpoint tells of, the active one by its first offset; drop those that came later.
        False if one of them is not whole, or missing; those before the first one left are not missed."""
        on_disk = self._on_disk()
        for later in (each for each in on_disk if each > first_offset):
            self._new_file(later).remove()
        firsts = [each for each in on_disk if each <= first_offset]
        if first_offset < 0:
            return True
        if not firsts or firsts[-1] != first_offset:
            return False
        for first, following in pairwise(firsts):
            file = self._new_file(first)
            if not file.load(None) or file.next_first_offset != following:
                return False
            self._append(file)
        active = self._new_file(first_offset)
        if not active.load(count, crc) and not (active.take_old() and active.load(count, crc)):
            return False
        self._append(active)
        return True

    def clear_files(self) -> None:
        """Drop every file, whatever is in it."""
        for first in self._on_disk():
            self._new_file(first).remove()
        self._files, self._firsts, self._front = [], [], 0
        self.names_changed = self.scratch = True

    def _on_disk(self) -> list[int]:
        names = [name.removesuffix(OLD) for name in self._disk.list(self.folder)]
        return sorted({int(name[:DIGITS]) for name in names if name.endswith(QUEUE) and name[:DIGITS].isdigit()})

    def _new_file(self, first_offset: int) -> QueueFile:
        return QueueFile(self._disk, self._open_queues, self.folder, first_offset)

    def _append(self, file: QueueFile) -> None:
        self._files.append(file)
        self._firsts.append(file.first_offset)

    def _remove_files(self, first: int, last: int) -> None:
        for file in self._files[first:last]:
            file.remove()
        del self._files[first:last]
        del self._firsts[first:last]
        self.names_changed = True

    def active_point(self) -> tuple[int, int, int]:
        """First offset, count and CRC of the active file, for the checkpoint; -1 without one."""
        file = self._files[-1] if self._files else None
        return (file.first_offset, file.count, file.crc()) if file is not None else (-1, 0, 0)

    def unsynced(self) -> list[File]:
        """Files that are not on disk as they are in memory; they count as if they were from now on."""
        files: list[File] = []
        for file in self._files:
            if not file.synced:
                files.append(file.file)
                file.synced = True
        if self.names_changed:
            files.append(self._disk.open(self.folder))
            self.names_changed = False
        return files

    def drop_old(self) -> None:
        """No checkpoint tells of what a splice kept."""
        for file in self._files:
            file.drop_old()

    def doubt(self) -> None:
        """The files may not be on disk as they are in memory."""
        self.names_changed = True
        for file in self._files:
            file.synced = False

    def close(self) -> None:
        for file in self._files:
            self._open_queues.closed(file)
            file.release()

    def files(self) -> Iterator[tuple[QueueFile, int]]:
        """Every file, with the number of its first entry that counts."""
        for nth, file in enumerate(self._files):
            if file.count:
                yield file, self._front if nth == 0 else 0

    @property
    def is_empty(self) -> bool:
        return not self._files or (len(self._files) == 1 and self._files[0].count <= self._front)

    # Adding.

    def ready(self, more: int, first_offset: int, first_ms: int, last_offset: int, greatest_ms: int) -> bool:
        """Make room for entries. OSError if there is none. False if they do not fit one file together: then one entry
        has to speak for all."""
        if self._files:
            file = self._files[-1]
            if file.count and not file.closed and file.fits(last_offset, greatest_ms, more):
                if file.count + more > file.room:
                    file.make_room(more)
                return True
        self._begin(first_offset, first_ms)
        file = self._files[-1]
        if file.fits(last_offset, greatest_ms, more):
            file.make_room(more)
            return True
        self._begin(first_offset, greatest_ms)
        return False

    def _begin(self, first_offset: int, first_ms: int) -> None:
        """Close the active file and begin the next."""
        if self._files and not self._files[-1].count:
            self._remove_files(len(self._files) - 1, len(self._files))
        if self._files:
            self._files[-1].close(first_offset)
        file = self._new_file(first_offset)
        try:
            file.begin(first_ms)
        except OSError:
            file.remove()
            raise
        self._append(file)
        self.names_changed = True

    def add(self, run: Run, next_offset: int) -> None:
        """An entry behind the others, for which room was made."""
        self._files[-1].add(*run)
        self.end_offset = next_offset
        self._count(run)

    def _count(self, run: Run) -> None:
        number, _, size, _, _ = run
        if size in (GONE, DAMAGED):
            self.live[number] = self.live.get(number, 0) + FRAME_BYTES
        else:
            self.live[number] = self.live.get(number, 0) + size
            self.size_bytes += size

    def add_roomy(self, run: Run, next_offset: int) -> None:
        """The same, making room first."""
        self.ready(1, run.offset, run.greatest_ms, run.offset, run.greatest_ms)
        self.add(run, next_offset)

    # Counting.

    def _forget(self, file: QueueFile, first: int, last: int) -> None:
        """Entries that are not pointed to any more."""
        live, size_bytes = _totals(file, first, last)
        self.size_bytes -= size_bytes
        for number, count in live.items():
            self._take_off(number, count)

    def _uncount(self, run: Run) -> None:
        number, _, size, _, _ = run
        if size in (GONE, DAMAGED):
            size = FRAME_BYTES
        else:
            self.size_bytes -= size
        self._take_off(number, size)

    def _take_off(self, number: int, count: int) -> None:
        left = self.live.get(number, 0) - count
        if left > 0:
            self.live[number] = left
        else:
            self.live.pop(number, None)

    def count_anew(self) -> None:
        """Count what the entries point to."""
        self.live, self.size_bytes = {}, 0
        for file, front in self.files():
            live, size_bytes = _totals(file, front, file.count)
            self.size_bytes += size_bytes
            for number, count in live.items():
                self.live[number] = self.live.get(number, 0) + count


def _totals(file: QueueFile, first: int, last: int) -> tuple[dict[int, int], int]:
    """What some entries count: bytes in each commit file, and bytes of batches. Entries of one commit file mostly stand
    together, in rising order, and are counted together."""
    if first >= last:
        return {}, 0
    numbers, sizes = file.numbers_of(first, last), file.sizes_of(first, last)
    damaged = sizes.count(DAMAGED)
    size_bytes = sum(sizes) - damaged * DAMAGED
    if damaged or GONE in sizes:
        sizes = [FRAME_BYTES if size in (GONE, DAMAGED) else size for size in sizes]
    live: dict[int, int] = {}
    if numbers == sorted(numbers):
        at = 0
        while at < len(numbers):
            end = bisect_right(numbers, numbers[at], at)
            live[numbers[at]] = sum(sizes[at:end])
            at = end
    else:
        for number, size in zip(numbers, sizes, strict=True):
            live[number] = live.get(number, 0) + size
    return live, size_bytes
