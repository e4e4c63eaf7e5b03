"""The key index of one partition: files one behind the other, each larger than the last, made from the log alone.

    <data>/<topic>/<topic>-<n>/<20-digit offset>.keys    keys of the records from that offset on (see `file`)

A file that is full is closed, and the next one has room for four times as much, up to the limits. What was built is
compared with the log before anything is added to it: its last batch must still be there, unchanged. If it is not, the
log was cut since, and the index goes back to the last place that agrees. A file that is lost or damaged goes with all
behind it, and is made again. Files wholly below the log's start are removed. Nothing here is needed to recover a log.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import Final

from headrace.errors import HeadraceError
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File
from headrace.records.batch import read_header
from headrace.records.key_hashes import RANGE, ROOM, KeyTable
from headrace.storage.keys.file import DIGITS, ENDING, Damaged, KeyFile, Mark
from headrace.storage.keys.steps import Steps
from headrace.storage.log import Log, ReadResult
from headrace.storage.page_cache import are_warm

logger = logging.getLogger(__name__)

FIRST_ENTRIES: Final = 4096
GROWTH: Final = 4
READ_BYTES: Final = 1 << 19
MARKS_MAX: Final = 256
SYNC_SECONDS: Final = 10.0
SYNCS_MAX: Final = 16
ALL_BITS: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Of one file. `hash_mask` makes different keys look alike, for tests."""

    entries: int = 20_000_000
    slots: int = 5_000_000
    hash_mask: int = ALL_BITS


@dataclass(slots=True)
class Syncs:
    """How many indexes are being synced: each holds a file open."""

    under_way: int = 0


class PartitionKeys:
    """`steps` brings it up to what the log has; everything else reads. `cuts` counts what was taken back or dropped."""

    def __init__(self, disk: Disk, clock: Clock, log: Log, folder: str, limits: KeyLimits, syncs: Syncs) -> None:
        self.log = log
        self.files: list[KeyFile] = []
        self.cuts = 0
        self.opened = False
        self.closed = False
        self.error: HeadraceError | None = None
        """Why it did not come further when it last tried."""
        self._disk = disk
        self._clock = clock
        self._folder = folder
        self._limits = limits
        self._syncs = syncs
        self._marks: deque[Mark] = deque(maxlen=MARKS_MAX)
        self._sync_due = 0.0
        self._syncing = False
        self._safe_count = 0

    @property
    def next_offset(self) -> int:
        """Everything in the log before it can be found."""
        if not self.opened:
            return self.log.start_offset
        return max(self.log.start_offset, self.files[-1].next_offset) if self.files else self.log.start_offset

    @property
    def behind(self) -> int:
        return max(0, self.goal - self.next_offset)

    @property
    def goal(self) -> int:
        """Only what is committed is taken: the rest may still be cut."""
        return min(self.log.written_offset, self.log.committed_offset)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def work(self) -> bool:
        """Whether there is anything to do."""
        if self.log.offline is not None or self.closed:
            return False
        if not self.opened:
            return True
        if not self.files:
            return self.goal > self.log.start_offset
        if self.files[-1].next_offset < self.goal or self.files[-1].next_offset > self.log.written_offset:
            return True
        return len(self.files) > 1 and self.files[1].first_offset <= self.log.start_offset

    def steps(self) -> Steps:
        """Open, check, and catch up. HeadraceError where the log cannot be read, OSError where there is no room."""
        if not self.opened:
            yield from self._open()
        while not self.closed:
            yield from self._go_back()
            self._forget_old()
            if self.log.offline is not None or self.next_offset >= self.goal:
                break
            yield from self._read_some()
            self.sync_sometimes()
        self.error = None

    # What is there already.

    def _open(self) -> Steps:
        paths = [
            f"{self._folder}/{name}"
            for name in sorted(self._disk.list(self._folder))
            if name.endswith(ENDING) and name[:DIGITS].isdigit() and len(name) == DIGITS + len(ENDING)
        ]
        loaded = [KeyFile.load(self._disk, path) for path in paths]
        chain: list[KeyFile] = []
        for file in loaded:
            if file is None or (chain and chain[-1].next_offset != file.follows):
                break
            if not chain and file.first_offset > self.log.start_offset:
                break
            chain.append(file)
        for path in paths[len(chain) :]:
            logger.warning("%s is damaged, or does not follow what is before it: made again from the log", path)
            self._remove(path)
        self.files = chain
        while self.files and not self._has(self.files[-1].mark):
            self._drop_from(len(self.files) - 1)
        for nth in reversed(range(len(self.files))):
            try:
                yield from self.files[nth].verify()
            except (Damaged, OSError, ValueError) as error:
                logger.warning("%s; made again from the log", error)
                self._drop_from(nth)
        self.opened = True

    def agrees(self) -> bool:
        return not self.files or self._has(self.files[-1].mark)

    def _has(self, mark: Mark) -> bool:
        """Whether the log still has what the index was made from, as far as its last batch tells."""
        log = self.log
        if mark.base_offset < 0:
            return log.start_offset <= mark.next_offset <= log.written_offset
        if mark.next_offset <= log.start_offset or mark.next_offset > log.written_offset:
            return False
        if log.settings.compact:  # batches come and go, but what an epoch once had stays its own
            end = log.epoch_end(mark.epoch)
            return end is not None and end.epoch == mark.epoch and end.end_offset > mark.base_offset
        for header, _ in log.headers(max(mark.base_offset, log.start_offset)):
            return (header.base_offset, header.crc, header.leader_epoch) == mark[1:]
        return False

    # The log was cut, or has forgotten its beginning.

    def _go_back(self) -> Steps:
        if self.agrees():
            return
        self.cuts += 1
        while self._marks and not self._has(self._marks[-1]):
            self._marks.pop()
        keep = self._marks[-1] if self._marks else None
        while self.files and (
            self.files[-1].first_offset >= keep.next_offset if keep is not None else not self._has(self.files[-1].mark)
        ):
            self._drop_from(len(self.files) - 1)
        if self.files and keep is not None:
            yield from self.files[-1].cut(keep)
            self._safe_count = min(self._safe_count, self.files[-1].table.count)
            self.cuts += 1

    def _drop_from(self, nth: int) -> None:
        self.cuts += 1
        for file in self.files[nth:]:
            file.release()
            self._remove(file.path)
        del self.files[nth:]
        self._safe_count = self.files[-1].table.count if self.files else 0

    def start_again(self) -> None:
        """Believe nothing of what is there."""
        self._drop_from(0)
        self._marks.clear()

    def _forget_old(self) -> None:
        while len(self.files) > 1 and self.files[1].first_offset <= self.log.start_offset:
            old = self.files.pop(0)
            old.release()
            self._remove(old.path)
            self.cuts += 1

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(path)

    # Catching up.

    def _read_some(self) -> Steps:
        """One piece of the log, read and taken without a pause between the two."""
        log, warm = self.log, False
        while True:
            found = log.read(self.next_offset, READ_BYTES, self.goal, warm=warm)
            waiting = found.slices or found.wanted
            came: list[bool] = []
            if are_warm(self._disk, waiting, lambda came=came: came.append(True)):  # type: ignore[misc]
                if found.slices or found.unchecked is None:
                    break
                yield None
            else:
                yield lambda came=came: bool(came)  # type: ignore[misc]
            warm = True
            if self.closed or not self.agrees() or self.next_offset >= self.goal:
                return
        self._take(found)
        yield None

    def _take(self, found: ReadResult) -> None:
        data = b"".join([piece.read() for piece in found.slices])
        if not data:  # compaction has left nothing up to the end
            if not self.files:
                self._begin(self.next_offset, 1)
            self.files[-1].table.next_offset = self.goal
            self._marks.append(self.files[-1].mark)
            return
        view, at = memoryview(data), 0
        if not self.files:
            self._begin(read_header(view).base_offset, 1)
        while True:
            file = self.files[-1]
            table, before = file.table, file.table.count
            try:
                at += table.add(view[at:])
            finally:
                file.added(before)
            if table.stopped == ROOM and table.count + table.wanted <= file.capacity:
                file.make_room(table.wanted)
            elif table.stopped in (ROOM, RANGE):
                self._roll(read_header(view, at).base_offset, table.wanted if table.stopped == ROOM else 1)
            else:
                break
        self._marks.append(self.files[-1].mark)

    def _begin(self, first_offset: int, wanted: int) -> None:
        last = self.files[-1] if self.files else None
        capacity = FIRST_ENTRIES if last is None else GROWTH * last.capacity
        capacity = max(min(capacity, self._limits.entries), wanted)
        slots = max(1, capacity * self._limits.slots // self._limits.entries)
        table = KeyTable(first_offset, self._clock.wall_ms(), self._limits.hash_mask)
        before = None if last is None else last.mark
        self.files.append(KeyFile.create(self._disk, self._folder, first_offset, before, slots, capacity, table))
        self._safe_count = 0

    def _roll(self, first_offset: int, wanted: int) -> None:
        """Close the newest file for good and begin the next."""
        old = self.files[-1]
        if old.first_offset == first_offset:  # its first batch alone is more than it may hold
            old.release()
            self.files.pop()
            self._begin(first_offset, wanted)
            return
        self._begin(first_offset, wanted)
        files = [old.finish(), self._disk.open(self._folder)]
        self._disk.request_sync(files, lambda error: self._finished(old, files, error))

    def _finished(self, old: KeyFile, files: list[File], error: OSError | None) -> None:
        for file in files:
            file.close()
        if error is not None:
            # It is believed by its CRC alone: what did not reach the disk is found out at the next start.
            logger.warning("%s could not be synced: %s", old.path, error)

    # What survives a crash.

    def sync_sometimes(self) -> None:
        """Let the newest file be synced, then say in its header how far it may be believed."""
        now = self._clock.now()
        if self._syncing or now < self._sync_due or not self.opened or not self.files:
            return
        if self._syncs.under_way >= SYNCS_MAX:
            return
        file, count = self.files[-1], self.files[-1].table.count
        if count == self._safe_count:
            return
        self._sync_due = now + SYNC_SECONDS
        try:
            synced = self._disk.open(file.path, writable=True)
        except OSError as error:
            logger.warning("%s is not synced now: %s", file.path, error)
            return
        self._syncing = True
        self._syncs.under_way += 1
        mark, crc, cuts = file.mark, file.crc, self.cuts

        def done(error: OSError | None) -> None:
            self._syncing = False
            self._syncs.under_way -= 1
            synced.close()
            if error is None and not self.closed and self.cuts == cuts and self.files and self.files[-1] is file:
                file.write_header(mark, count, crc)
                self._safe_count = count

        self._disk.request_sync([synced], done)

    def close(self) -> list[File]:
        """Take nothing more; the files that are to be synced, so that a start can believe all of them."""
        changed = [file.finish() for file in self.files[-1:] if file.verified]
        self.let_go()
        return changed

    def let_go(self) -> None:
        """Unmap all files as they are."""
        self.closed = True
        for file in self.files:
            file.release()


def remove_files(disk: Disk, folder: str) -> int:
    """Remove what an index that was turned off has left; answers how many files that was."""
    names = [name for name in disk.list(folder) if name.endswith(ENDING) and name[:DIGITS].isdigit()]
    for name in names:
        disk.remove(f"{folder}/{name}")
    return len(names)
