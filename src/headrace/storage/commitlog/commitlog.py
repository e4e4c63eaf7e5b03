"""The commit log of one broker: `<data>/@commitlog/<20-digit position>.log`, a sequence of frames (see `frames`).

Only the newest file is written, at its end, by pwritev. A frame never spans files; a file ends before the frame that
would make it larger than `file_bytes`, so only a single frame can. A file's name is the position of its first byte,
its number << 32. Files without anything wanted are set aside as `.deleted` and removed after a while, so numbers may be
missing. What is in the page cache outlives the process; what lies below `synced` outlives the machine.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from headrace.errors import HeadraceError
from headrace.ports.disk import Buffer, Disk, File
from headrace.storage import refusal, shortfall
from headrace.storage.commitlog import frames
from headrace.storage.commitlog.frames import BYTE_MASK, FRAME_BYTES, Frame
from headrace.storage.log import Tail

if TYPE_CHECKING:
    from headrace.storage.commitlog.log import SharedLog

FOLDER: Final = "@commitlog"
LOG: Final = ".log"
DELETED: Final = ".deleted"
DIGITS: Final = 20
FILE_BYTES: Final = 1 << 30
FILE_BYTES_MAX: Final = 1 << 31
OPEN_FILES_MAX: Final = 512


class CommitLog:
    """`end` and `synced` are positions; `sizes` has every file by its number, the active one last."""

    def __init__(self, disk: Disk, data: str, file_bytes: int = FILE_BYTES) -> None:
        assert file_bytes <= FILE_BYTES_MAX
        self._disk = disk
        self.folder = f"{data}/{FOLDER}"
        self.file_bytes = file_bytes
        self.sizes: dict[int, int] = {}
        self.number = 0
        self.end = 0
        self.synced = 0
        self._active: File | None = None
        self._open: dict[int, File] = {}
        self._unsynced: dict[int, File] = {}
        self._folder_file: File | None = None
        self._asked = 0

    def path(self, number: int) -> str:
        return f"{self.folder}/{number << 32:0{DIGITS}d}{LOG}"

    def find_files(self) -> None:
        """Learn what is on disk; leftovers of removals go."""
        if not self._disk.exists(self.folder):
            self._disk.make_folder(self.folder)
        names = self._disk.list(self.folder)
        for name in names:
            if name.endswith(DELETED):
                self._disk.remove(f"{self.folder}/{name}")
        numbers = sorted(int(name[:DIGITS]) >> 32 for name in names if name.endswith(LOG) and name[:DIGITS].isdigit())
        self.sizes = {number: self._disk.size(self.path(number)) for number in numbers}
        self.number = numbers[-1] if numbers else 0
        self.end = frames.position(self.number, self.sizes.get(self.number, 0))

    @property
    def active(self) -> File:
        if self._active is None:
            fresh = not self.sizes
            folder = self._disk.open(self.folder) if fresh else None
            self._active = self._disk.open(self.path(self.number), create=fresh, writable=True)
            if fresh:
                self.sizes[self.number] = 0
                self._folder_file = folder
        return self._active

    def file(self, number: int) -> File:
        """One that is there; the longest open are dropped first."""
        if number == self.number:
            return self.active
        file = self._open.get(number)
        if file is None:
            if number not in self.sizes:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path(number))
            file = self._open[number] = self._disk.open(self.path(number))
            if len(self._open) > OPEN_FILES_MAX:
                del self._open[next(iter(self._open))]
        return file

    @property
    def room(self) -> int:
        """How many bytes more the active file takes, one mark of what is synced aside."""
        return self.file_bytes - (self.end & BYTE_MASK) - FRAME_BYTES

    def is_full(self, count: int) -> bool:
        """Whether so many bytes more need a new file."""
        used = self.end & BYTE_MASK
        return used > 0 and used + count > self.file_bytes

    def write(self, parts: Sequence[Buffer], count: int) -> int:
        """Put the parts at the end; answers the byte where they begin. After an OSError the file is as it was; if
        even that fails, the error is not one that passes."""
        file, byte = self.active, self.end & BYTE_MASK
        try:
            file.pwritev(parts, byte)
        except OSError:
            file.truncate(byte)
            raise
        self.end += count
        self.sizes[self.number] = byte + count
        if self.number not in self._unsynced:
            self._unsynced[self.number] = file
        return byte

    def roll(self, parts: Sequence[Buffer], count: int) -> None:
        """Begin the next file with these frames. After an OSError the old one is still the active one."""
        number = self.number + 1
        folder = self._disk.open(self.folder)  # first: once the file is active, its name must be synced
        file = self._disk.open(self.path(number), create=True, writable=True)
        try:
            file.truncate(0)
            file.pwritev(parts, 0)
        except OSError:
            self._disk.remove(self.path(number))
            raise
        if self._active is not None:
            self._open[self.number] = self._active
        self.number, self._active = number, file
        self.sizes[number] = count
        self.end = frames.position(number, count)
        self._unsynced[number] = file
        self._folder_file = folder

    def tail_found(self, tail: Tail) -> None:
        """The log ends in this, which is about to be cut."""
        shortfall.note_cut(self._disk, self.folder, tail)

    def cut(self, number: int, byte: int) -> None:
        """Drop everything from a position on, for recovery."""
        for later in [each for each in self.sizes if each > number]:
            self._disk.remove(self.path(later))
            del self.sizes[later]
            self._unsynced.pop(later, None)
        self._open.clear()
        self._active = None
        self.number, self.end = number, frames.position(number, byte)
        self.sizes[number] = byte
        self.active.truncate(byte)
        self.doubt(min(self.synced, self.end))

    # Syncing.

    def doubt(self, upto: int) -> None:
        """What lies behind the position may not be synced."""
        self.synced = upto
        if self.sizes:
            for number in self.sizes:
                if number >= upto >> 32:
                    self._unsynced[number] = self.file(number)
            self._folder_file = self._disk.open(self.folder)

    def unsynced(self) -> list[File]:
        """Files to sync so that everything written is safe."""
        files = list(self._unsynced.values())
        if self._folder_file is not None:
            files.append(self._folder_file)
        return files

    def synced_to(self, upto: int) -> None:
        """Everything below the position, at which `unsynced` was called, is safe."""
        if upto <= self.synced:
            return
        self.synced = upto
        if upto >= self.end:
            self._unsynced.clear()
        elif len(self._unsynced) > 1:
            for number in [each for each in self._unsynced if each < upto >> 32]:
                del self._unsynced[number]
        if self._folder_file is not None and upto >> 32 == self.number:
            self._folder_file = None

    def ask(self) -> list[File]:
        """`unsynced` for a group commit, of which there is one at a time."""
        self._asked = self.end
        return self.unsynced()

    def answered(self) -> None:
        """The group commit has come back."""
        self.synced_to(self._asked)

    # Removing.

    def set_aside(self, numbers: Iterable[int]) -> list[str]:
        """Files in which nothing is wanted; answers what they are called now."""
        paths: list[str] = []
        for number in numbers:
            assert number != self.number
            path = self.path(number)
            self._disk.rename(path, path + DELETED)
            paths.append(path + DELETED)
            del self.sizes[number]
            self._open.pop(number, None)
            self._unsynced.pop(number, None)
        return paths

    def close(self) -> None:
        self._active = self._folder_file = None
        self._open.clear()
        self._unsynced.clear()


log = logging.getLogger(__name__)

MARK_BYTES: Final = 1 << 20

Failure = tuple["SharedLog", HeadraceError]


class FrameWriter:
    """Writing what all logs have staged: one frame a log, one vectored write for all of them."""

    def __init__(self, commit_log: CommitLog, logs: Callable[[], Iterable[SharedLog]]) -> None:
        self._commit_log = commit_log
        self._logs = logs
        self.marked = 0
        """The commit log itself says that everything below this position is synced..."""
        self.mark_end = 0
        """...in a frame that ends before this position."""
        self.short_of_room = False
        """Whether the last write found no room."""
        self._no_file: OSError | None = None

    def write(self, logs: Iterable[SharedLog]) -> list[Failure]:
        """Write the frames of these logs; those that could not be written are rolled back and named."""
        failures: list[Failure] = []
        ready: list[tuple[SharedLog, int]] = []
        parts: list[Buffer] = []
        room, count = self._commit_log.room, 0
        for each in logs:
            error = each.prepare()
            if error is not None:
                failures.append((each, error))
                continue
            more = each.frame_bytes
            if not more:
                continue
            if count + more > room:
                if count:
                    failures += self._put(parts, count, ready)
                    ready, parts, count = [], [], 0
                room = self._next_file(more)
            ready.append((each, count + each.frames(parts)))
            count += more
        if ready:
            failures += self._put(parts, count, ready)
        return failures

    def _next_file(self, count: int) -> int:
        """Begin another file for so many bytes, if they do not fit; answers the room that there is. Where it cannot be
        begun, the write will say why."""
        if self._commit_log.is_full(count):
            try:
                self._roll()
            except OSError as error:
                self._no_file = error
        return self._commit_log.room

    def _put(self, parts: list[Buffer], count: int, ready: list[tuple[SharedLog, int]]) -> list[Failure]:
        """Write these parts; every log has its batches behind so many bytes of them."""
        commit_log = self._commit_log
        try:
            if self._no_file is not None:
                error, self._no_file = self._no_file, None
                raise error
            if commit_log.synced - self.marked >= MARK_BYTES:
                self._mark()
            byte, number = commit_log.write(parts, count), commit_log.number
        except OSError as error:
            self.short_of_room = error.errno in refusal.NO_ROOM
            return [(each, each.take_back(error)) for each, _ in ready]
        self.short_of_room = False
        for each, payload in ready:
            each.wrote(number, byte + payload)
        return []

    def write_frame(self, frame: Frame, payload: Buffer) -> int:
        """One frame by itself; answers the byte where it begins."""
        count = FRAME_BYTES + frame.size
        if self._commit_log.is_full(count):
            self._roll()
        header = frames.pack(
            frame.kind, frame.size, frame.topic_id, frame.partition, frame.first_offset, frame.next_offset
        )
        return self._commit_log.write([header, payload], count)

    def _roll(self) -> None:
        """The next file begins with what was synced, and bounds and epochs of all logs."""
        synced = self._commit_log.synced
        parts = [frames.synced(synced, self._commit_log.end)]
        for each in self._logs():
            parts += each.opening_frames()
        self._commit_log.roll(parts, len(parts) * FRAME_BYTES)
        self.marked, self.mark_end = synced, self._commit_log.end

    def mark(self) -> None:
        """Have the commit log say what is synced, if there is room."""
        if self._commit_log.synced > self.marked:
            try:
                self._mark()
            except OSError as error:
                log.warning("%s", error)

    def _mark(self) -> None:
        synced = self._commit_log.synced
        self._commit_log.write([frames.synced(synced)], FRAME_BYTES)
        self.marked, self.mark_end = synced, self._commit_log.end
