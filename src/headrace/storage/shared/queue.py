"""A partition's queue: entries into the commit log in order of their offsets, over a few files (see `queuefile`).

It is derived from the commit log and follows every write to it. It also counts what it points to: the partition's
bytes, and how many of them lie in each commit file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from headrace.errors import CorruptBatch
from headrace.ports.disk import Disk, File
from headrace.storage.scan import find, walk
from headrace.storage.shared.commitlog import CommitLog
from headrace.storage.shared.frames import FRAME_BYTES
from headrace.storage.shared.queuefile import (
    DAMAGED,
    GONE,
    NO_TIMESTAMP,
    QUEUE,
    Entry,
    OpenQueues,
    QueueFile,
)

DIGITS: Final = 20


class Run(NamedTuple):
    """An entry to be: where its batches lie, its first offset, and the greatest timestamp among them."""

    number: int
    byte: int
    size: int
    offset: int
    greatest_ms: int


Place = tuple[QueueFile, int]
"""A file, and the number of an entry in it, perhaps one that is still to come."""


class Queue:
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
        """Bytes that are wanted, by the number of the commit file that they lie in."""
        self.names_changed = False
        """Whether files came or went since the folder was last synced."""

    # Files.

    def load(self, first_offset: int, count: int, crc: int) -> bool:
        """Take the files that a checkpoint tells of, the active one by its first offset; drop those that came later.
        False if one of them is missing or not whole."""
        on_disk = self._on_disk()
        for later in (each for each in on_disk if each > first_offset):
            self._new_file(later).remove()
        firsts = [each for each in on_disk if each <= first_offset]
        if first_offset < 0:
            return True
        if not firsts or firsts[-1] != first_offset:
            return False
        for first in firsts[:-1]:
            file = self._new_file(first)
            if not file.load(None):
                return False
            self._append(file)
        active = self._new_file(first_offset)
        if not active.load(count, crc):
            return False
        self._append(active)
        return True

    def find_front(self, start_offset: int) -> None:
        """Nothing before the entry that speaks for the start counts, and none of it is counted."""
        place = self.place(start_offset)
        if place is not None:
            nth = self._files.index(place[0])
            self._front = place[1]
            if nth:
                self._remove_files(0, nth)

    def clear_files(self) -> None:
        """Drop every file, whatever is in it."""
        for first in self._on_disk():
            self._new_file(first).remove()
        self._files, self._firsts, self._front = [], [], 0
        self.names_changed = True

    def _on_disk(self) -> list[int]:
        names = self._disk.list(self.folder)
        return sorted(int(name[:DIGITS]) for name in names if name.endswith(QUEUE) and name[:DIGITS].isdigit())

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

    def doubt(self) -> None:
        """The files may not be on disk as they are in memory."""
        self.names_changed = True
        for file in self._files:
            file.synced = False

    def close(self) -> None:
        for file in self._files:
            self._open_queues.closed(file)
            file.release()

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
        if self._files and not self._files[-1].closed:
            self._files[-1].close()
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
        number, _, size, _, _ = run
        self._files[-1].add(*run)
        self.end_offset = next_offset
        if size == GONE:
            self.live[number] = self.live.get(number, 0) + FRAME_BYTES
        elif size != DAMAGED:
            self.live[number] = self.live.get(number, 0) + size
            self.size_bytes += size

    def add_roomy(self, run: Run, next_offset: int) -> None:
        """The same, making room first."""
        self.ready(1, run.offset, run.greatest_ms, run.offset, run.greatest_ms)
        self.add(run, next_offset)

    # Finding.

    @property
    def is_empty(self) -> bool:
        return not self._files or (len(self._files) == 1 and self._files[0].count <= self._front)

    def place(self, offset: int) -> Place | None:
        """The entry that speaks for the offset, or the first one if that lies before it."""
        if self.is_empty:
            return None
        at = max(0, bisect_right(self._firsts, offset) - 1)
        if not self._files[at].count:
            at -= 1
        file = self._files[at]
        return file, max(self._front if at == 0 else 0, file.at_or_before(offset))

    def settle(self, place: Place) -> Place | None:
        """The place, or the next file's first if the file has ended before it; None if nothing has come yet."""
        file, at = place
        if at < file.count:
            return place
        following = bisect_right(self._firsts, file.first_offset)
        if following < len(self._files) and self._files[following].count:
            return self._files[following], 0
        return None

    def entry(self, place: Place) -> Entry:
        file, at = place
        number, byte, size, offset, greatest_ms = file.raw(at)
        return Entry(number, byte, size, offset, self._next_offset(file, at), greatest_ms)

    def _next_offset(self, file: QueueFile, at: int) -> int:
        if at + 1 < file.count:
            return file.offset_at(at + 1)
        following = bisect_right(self._firsts, file.first_offset)
        if following < len(self._files) and self._files[following].count:
            return self._firsts[following]
        return self.end_offset

    def entries(self, from_offset: int) -> Iterator[Entry]:
        """From the one that speaks for the offset on."""
        place = self.place(from_offset)
        while place is not None:
            yield self.entry(place)
            place = self.settle((place[0], place[1] + 1))

    def files(self) -> Iterator[tuple[QueueFile, int]]:
        """Every file, with the number of its first entry that counts."""
        for nth, file in enumerate(self._files):
            if file.count:
                yield file, self._front if nth == 0 else 0

    # Dropping.

    def _forget(self, file: QueueFile, first: int, last: int) -> None:
        """Entries that are not pointed to any more."""
        live = self.live
        for at in range(first, last):
            number, _, size, _, _ = file.raw(at)
            if size == DAMAGED:
                continue
            if size == GONE:
                size = FRAME_BYTES
            else:
                self.size_bytes -= size
            left = live.get(number, 0) - size
            if left > 0:
                live[number] = left
            else:
                live.pop(number, None)

    def drop_all(self, end_offset: int) -> None:
        self._remove_files(0, len(self._files))
        self._front = self.size_bytes = 0
        self.live.clear()
        self.end_offset = end_offset

    def drop_before(self, offset: int) -> None:
        """Drop the entries that speak only for lower offsets."""
        if offset >= self.end_offset:
            self.drop_all(self.end_offset)
            return
        place = self.place(offset)
        if place is None:
            return
        file, at = place
        nth = self._files.index(file)
        for each in range(nth):
            self._forget(self._files[each], self._front if each == 0 else 0, self._files[each].count)
        self._forget(file, self._front if nth == 0 else 0, at)
        self._front = at
        if nth:
            self._remove_files(0, nth)

    def cut(self, offset: int) -> int:
        """Drop what lies at and above the offset; a batch that spans it goes whole. Answers the new end."""
        if offset >= self.end_offset:
            return self.end_offset
        place = self.place(offset)
        if place is None:
            self.end_offset = offset
            return offset
        file, at = place
        entry = self.entry(place)
        keep, end, part = self._cut_run(entry, offset)
        nth = self._files.index(file)
        for later in self._files[nth + 1 :]:
            self._forget(later, 0, later.count)
        first = at + 1 if keep else at
        self._forget(file, first, file.count)
        self._remove_files(nth + 1, len(self._files))
        file.reopen()
        file.cut(first)
        self.end_offset = end
        if part is not None:
            file.make_room(1)
            self.add(part, end)
        elif not first or (nth == 0 and first <= self._front):
            self._remove_files(nth, nth + 1)
            self._front = self._front if nth else 0
        return end

    def _cut_run(self, entry: Entry, offset: int) -> tuple[bool, int, Run | None]:
        """Whether the entry stays as it is, where the queue ends then, and what is put in its place."""
        if offset <= entry.offset:
            return False, offset, None
        if not entry.has_batches:
            return True, offset, None
        file, end = self._commit_log.file(entry.number), entry.byte + entry.size
        at = find(file, entry.byte, end, entry.offset, offset, dense=True)
        if at == end:
            return True, offset, None
        if at <= entry.byte:  # it begins with the batch that spans the offset, or nobody knows what is in it
            return False, entry.offset, None
        base = int.from_bytes(file.pread(8, at), "big")
        run = Run(entry.number, entry.byte, at - entry.byte, entry.offset, _greatest_ms(file, entry.byte, at))
        return False, min(offset, base), run

    # Replacing.

    def splice(self, first_offset: int, next_offset: int, runs: Sequence[Run]) -> None:
        """These runs now speak for the offsets from first to next; they begin with the first. Files that are touched
        are written anew: after a crash in between the queue is built from the commit log."""
        if first_offset >= self.end_offset or self.is_empty:
            for run, following in zip(runs, [*(each.offset for each in runs[1:]), next_offset], strict=False):
                self.add_roomy(run, following)
            self.end_offset = max(self.end_offset, next_offset)
            return
        first, last = self._nth(first_offset), self._nth(next_offset - 1)
        before: list[Run] = []
        after: list[Run] = []
        for nth in range(first, last + 1):
            file, front = self._files[nth], self._front if nth == 0 else 0
            for at in range(front, file.count):
                run = Run(*file.raw(at))
                run_next = self._next_offset(file, at)
                if run.offset < first_offset:
                    before.append(run if run_next <= first_offset else self._head(run, first_offset))
                if run_next > next_offset:
                    after.append(run if run.offset >= next_offset else self._tail(run, next_offset))
            self._forget(file, front, file.count)
        rest, rest_firsts = self._files[last + 1 :], self._firsts[last + 1 :]
        del self._files[last + 1 :], self._firsts[last + 1 :]
        self._remove_files(first, last + 1)
        self._front = self._front if first else 0
        self._write([*before, *runs, *after], max(self.end_offset, next_offset), is_last=not rest)
        self._files += rest
        self._firsts += rest_firsts

    def _nth(self, offset: int) -> int:
        """Which file speaks for the offset."""
        at = max(0, bisect_right(self._firsts, offset) - 1)
        return at if self._files[at].count else max(0, at - 1)

    def _write(self, runs: list[Run], end_offset: int, *, is_last: bool) -> None:
        """New files behind those that are there."""
        for run in runs:
            self.add_roomy(run, end_offset)
        if not is_last and runs:
            self._files[-1].close()
        self.end_offset = end_offset

    def _head(self, run: Run, offset: int) -> Run:
        """What of the run lies below the offset, which is a batch's."""
        if run.size in (GONE, DAMAGED):
            return run
        return run._replace(size=self._find(run, offset) - run.byte)

    def _tail(self, run: Run, offset: int) -> Run:
        if run.size in (GONE, DAMAGED):
            return run._replace(offset=offset)
        at = self._find(run, offset)
        return run._replace(byte=at, size=run.byte + run.size - at, offset=offset)

    def _find(self, run: Run, offset: int) -> int:
        file, end = self._commit_log.file(run.number), run.byte + run.size
        at = find(file, run.byte, end, run.offset, offset, dense=True)
        if at < 0:
            raise CorruptBatch(f"{file.path} at byte {run.byte}: no batches from offset {run.offset} to {offset}")
        return at


def _greatest_ms(file: File, byte: int, end: int) -> int:
    return max((header.max_timestamp_ms for _, header in walk(file, byte, end)), default=NO_TIMESTAMP)
