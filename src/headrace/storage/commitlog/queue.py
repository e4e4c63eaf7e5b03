"""A partition's queue: entries into the commit log in order of their offsets, over a few files (see `queuefile`).

It is derived from the commit log and follows every write to it. It also counts what it points to: the partition's
bytes, and how many of them lie in each commit file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from headrace.errors import CorruptBatch
from headrace.ports.disk import Disk, File
from headrace.storage.commitlog import queuefile
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.frames import FRAME_BYTES
from headrace.storage.commitlog.queuefile import (
    DAMAGED,
    ENTRIES_MAX,
    ENTRY_BYTES,
    GONE,
    NO_TIMESTAMP,
    OLD,
    QUEUE,
    Columns,
    Entry,
    OpenQueues,
    Patch,
    QueueFile,
    Replacement,
    Run,
)
from headrace.storage.scan import find, read_log, walk

Place = tuple[QueueFile, int]
"""A file, and the number of an entry in it, perhaps one that is still to come."""


DIGITS: Final = 20


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


class Queue:
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

    def sync_again(self) -> None:
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

    def find_front(self, start_offset: int) -> None:
        """Nothing before the entry that speaks for the start counts, and none of it is counted."""
        if not self._firsts or start_offset <= self._firsts[0]:
            return
        place = self.place(start_offset)
        if place is not None:
            nth = self._files.index(place[0])
            self._front = place[1]
            place[0].release()
            if nth:
                self._remove_files(0, nth)

    def speaks_from(self, start_offset: int) -> bool:
        """Whether there is a file for the start, if there is anything behind it."""
        return start_offset >= self.end_offset if self.is_empty else self._firsts[0] <= start_offset

    # Finding.

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

    # Dropping.

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
        base = int.from_bytes(read_log(file, 8, at), "big")
        run = Run(entry.number, entry.byte, at - entry.byte, entry.offset, _greatest_ms(file, entry.byte, at))
        return False, min(offset, base), run

    # Replacing.

    def splice(self, replacements: Sequence[Replacement]) -> None:
        """Other runs for some offsets; replacements are in order. After an OSError those before the one that failed
        were made."""
        waiting = list(replacements)
        while waiting:
            first_offset, next_offset, _ = waiting[0]
            if first_offset >= self.end_offset or self.is_empty:
                self._add_behind(waiting.pop(0))
                continue
            if next_offset <= self._files[0].offset_at(self._front):  # dropped meanwhile
                del waiting[0]
                continue
            nth, count = self._in_one_file(waiting)
            patches = self._patches(nth, waiting[:count])
            if not patches or not self._patch(nth, patches):
                patches = self._write_anew(waiting)
            del waiting[: len(patches)]

    def _add_behind(self, replacement: Replacement) -> None:
        runs, end_offset = replacement.runs, max(self.end_offset, replacement.next_offset)
        for run in runs:
            self.add_roomy(run, end_offset)
        self.end_offset = end_offset

    def _in_one_file(self, replacements: list[Replacement]) -> tuple[int, int]:
        """Which file the first of them lies in, and how many lie wholly in it."""
        nth, count = self._nth(replacements[0].first_offset), 0
        end = self._firsts[nth + 1] if nth + 1 < len(self._files) else self.end_offset
        while count < len(replacements) and replacements[count].next_offset <= end:
            count += 1
        return nth, count

    def _patches(self, nth: int, replacements: list[Replacement]) -> list[Patch]:
        """For as many of them as touch no entry twice."""
        file, front = self._files[nth], self._front if nth == 0 else 0
        patches: list[Patch] = []
        for first_offset, next_offset, runs in replacements:
            first = max(front, file.at_or_before(first_offset))
            last = file.at_or_before(next_offset - 1) + 1
            if patches and first < patches[-1].last:
                break
            head, tail = Run(*file.raw(first)), Run(*file.raw(last - 1))
            whole = list(runs)
            if head.offset < first_offset:
                whole.insert(0, self._head(head, first_offset))
            if self._next_offset(file, last - 1) > next_offset:
                whole.append(self._tail(tail, next_offset))
            patches.append(Patch(first, last, whole))
        return patches

    def _patch(self, nth: int, patches: list[Patch]) -> bool:
        """False: it cannot be done in one file."""
        file = self._files[nth]
        entries = queuefile.patched(file, patches)
        if entries is None or len(entries) > 2 * ENTRIES_MAX * ENTRY_BYTES or not entries:
            return False
        gone = [Run(*file.raw(at)) for patch in patches for at in range(patch.first, patch.last)]
        if self.scratch and not file.closed:
            at = patches[0].first
            file.put(at, entries[at * ENTRY_BYTES :])
        else:
            self._files[nth] = file.rewrite(entries, keep_old=not self.scratch)
            self.names_changed = True
        self._recount(gone, patches)
        return True

    def _recount(self, gone: list[Run], patches: list[Patch]) -> None:
        for run in gone:
            self._uncount(run)
        for patch in patches:
            for run in patch.runs:
                self._count(run)

    def _write_anew(self, replacements: list[Replacement]) -> list[Patch]:
        """Write all files anew that the first of them touches, as many files as it takes, with those that lie in the
        same ones; answers what was done. OSError if there is no room: nothing has changed then."""
        first, last = self._nth(replacements[0].first_offset), self._nth(replacements[0].next_offset - 1)
        rest = self._firsts[last + 1 :]
        end_offset = rest[0] if rest else max(self.end_offset, replacements[0].next_offset)
        old = Columns()
        for nth in range(first, last + 1):
            old.take_file(self._files[nth], self._front if nth == 0 else 0)
        patches = self._column_patches(old, end_offset, replacements)
        gone = [old.run(at) for patch in patches for at in range(patch.first, patch.last)]
        new = old.patched(patches)
        parts = list(new.parts(min(self._firsts[first], new.offsets[0]), ENTRIES_MAX))
        following = [*(part[0] for part in parts[1:]), rest[0] if rest else None]
        files: list[QueueFile] = []
        try:
            for (offset, base_ms, entries), next_first_offset in zip(parts, following, strict=True):
                file = self._new_file(offset)
                file.write_new(base_ms, entries, next_first_offset)
                files.append(file)
        except OSError:
            for file in files:
                file.drop_new()
            raise
        self._take_places(first, last, files)
        self._recount(gone, patches)
        if not rest:
            self.end_offset = end_offset
        return patches

    def _column_patches(self, old: Columns, end_offset: int, replacements: list[Replacement]) -> list[Patch]:
        patches: list[Patch] = []
        for first_offset, next_offset, runs in replacements:
            first = max(0, bisect_right(old.offsets, first_offset) - 1)
            last = bisect_right(old.offsets, next_offset - 1)
            if next_offset > end_offset or (patches and first < patches[-1].last):
                break
            whole = list(runs)
            if old.offsets[first] < first_offset:
                whole.insert(0, self._head(old.run(first), first_offset))
            if (old.offsets[last] if last < len(old.offsets) else end_offset) > next_offset:
                whole.append(self._tail(old.run(last - 1), next_offset))
            patches.append(Patch(first, last, whole))
        return patches

    def _take_places(self, first: int, last: int, files: list[QueueFile]) -> None:
        """Files that were written beside these take their names."""
        old = self._files[first : last + 1]
        kept = old[-1].first_offset if not self.scratch and not old[-1].closed else None
        names = {file.first_offset for file in files}
        self.broken = True
        for file in files:
            file.take_place(keep_old=file.first_offset == kept)
        for file in old:
            if file.first_offset in names:
                file.replaced()
            else:
                file.remove()
        self._files[first : last + 1] = files
        self._firsts[first : last + 1] = [file.first_offset for file in files]
        self._front = self._front if first else 0
        self.names_changed = True
        self.broken = False

    def _nth(self, offset: int) -> int:
        """Which file speaks for the offset."""
        at = max(0, bisect_right(self._firsts, offset) - 1)
        return at if self._files[at].count else max(0, at - 1)

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
