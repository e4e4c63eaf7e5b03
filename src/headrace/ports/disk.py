"""The disk port: every byte that storage keeps goes through it, so that a faulty disk can stand in.

Real: system.disk. Fault-injecting (drops unsynced bytes, fills up, flips bytes, fails a sync): virtual.disk.
All calls but `request_sync` are synchronous and short: they touch the page cache. Errors are OSError.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

SYNC_FAILED: Final = "sync-failed"
"""Name of the empty file that a failed sync leaves in the folder of a file, before anybody is told of it."""

MEDIUM_ERRORS: Final = frozenset(
    {errno.EIO, errno.ENODATA, errno.EREMOTEIO, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN}
)
"""What a disk answers that cannot give back what was written to it. Other errors of a read say nothing about the bytes,
and may pass: no descriptors, no memory."""

Buffer = bytes | bytearray | memoryview
SyncDone = Callable[[OSError | None], None]
Range = tuple[int, int]
"""Position and count of bytes in a file."""


class File(Protocol):
    """One open file."""

    path: str

    def fileno(self) -> int:
        """The descriptor, for sendfile. A disk without descriptors answers -1 and its slices are read instead."""
        ...

    def size(self) -> int: ...

    def pwritev(self, parts: Sequence[Buffer], position: int) -> int:
        """Write all parts at the position; a short write is completed or raised as OSError, never hidden."""
        ...

    def pread(self, count: int, position: int) -> bytes: ...

    def truncate(self, size: int) -> None: ...

    def allocate(self, size: int) -> None:
        """Give the file its size and its blocks now, so that a later mapped write cannot meet a full disk."""
        ...

    def reserve(self, size: int) -> None:
        """Give the file blocks for this size, and leave its size as it is. Nothing where the disk cannot."""
        ...

    def map(self, size: int, *, writable: bool, populate: bool) -> memoryview:
        """The file's first `size` bytes as memory. Release the view to unmap."""
        ...

    def sync(self) -> None:
        """Synchronous fdatasync, for start, stop and small metadata files only."""
        ...

    def in_cache(self, position: int, count: int) -> bool:
        """Whether pages throughout the range, its last among them, are in the page cache, so that sending it hardly
        stalls the loop."""
        ...

    def close(self) -> None: ...


class Source(Protocol):
    """Whoever gave out a slice of a file."""

    def doubt(self) -> None:
        """Bytes that it gave out could not be read after all: what it gives out next is looked at before."""
        ...


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A range of a file on its way to a socket; never read unless the channel has to (TLS, small, no descriptor)."""

    file: File
    position: int
    count: int
    source: Source | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return self.count

    def part(self, first: int, count: int) -> FileSlice:
        return FileSlice(self.file, self.position + first, count, self.source)

    def read(self) -> bytes:
        """All of its bytes; OSError if the file does not have or give them."""
        try:
            data = self.file.pread(self.count, self.position)
        except OSError as error:
            self.failed(error)
            raise
        if len(data) != self.count:
            raise self.ended()
        return data

    def failed(self, error: OSError) -> None:
        """It could not be read."""
        if self.source is not None and error.errno in MEDIUM_ERRORS:
            self.source.doubt()

    def ended(self) -> OSError:
        """The file is shorter than it was."""
        error = OSError(errno.EIO, f"{self.file.path} ends before position {self.position + self.count}")
        self.failed(error)
        return error


class SyncFailed(OSError):
    """Some files of a sync could not be made durable; the others were."""

    def __init__(self, number: int, files: Sequence[File]) -> None:
        super().__init__(number, os.strerror(number), files[0].path)
        self.files = tuple(files)


class Disk(Protocol):
    """A file system. Paths are absolute strings."""

    def open(self, path: str, *, create: bool = False, writable: bool = False) -> File:
        """A file, or a folder to be synced: syncing it does what `sync_folder` does.

        A file that nobody refers to any more is closed by itself, so a slice keeps its file open as long as it lives.
        """
        ...

    def lock(self, path: str) -> File:
        """Open the file, created if need be, and hold it for this process alone until it is closed.
        BlockingIOError: another process holds it."""
        ...

    def exists(self, path: str) -> bool:
        """False only where that is known; who cannot find out is told the error."""
        ...

    def size(self, path: str) -> int: ...

    def changed_ms(self, path: str) -> int:
        """Wall time of the last write to the file."""
        ...

    def list(self, folder: str) -> list[str]: ...

    def make_folder(self, path: str) -> None:
        """Create the folder and its parents; fine if it is there."""
        ...

    def remove(self, path: str) -> None: ...

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomic; replaces the target. Works for folders too."""
        ...

    def sync_folder(self, path: str) -> None:
        """Make creations, removals and renames in this folder durable."""
        ...

    def free_bytes(self, path: str) -> int: ...

    def request_sync(self, files: Sequence[File], done: SyncDone) -> None:
        """Make all that was written to the files so far durable, without blocking the loop; `done` runs on the loop,
        with SyncFailed if that names the files that are not. Each of those has left SYNC_FAILED in its folder by then:
        who asked may be dead before the answer comes."""
        ...

    def sync_now(self, files: Sequence[File]) -> None:
        """The same, but waiting for it, for start and stop only. Many files cost little more than one. Syncs that were
        asked for before are done by then: of files that were in those too, the failure may be told by their mark alone.
        """
        ...

    def read_ahead(self, file: File, ranges: Sequence[Range], done: Callable[[], None]) -> None:
        """Bring ranges into the page cache without blocking the loop; `done` runs on the loop."""
        ...

    def close(self) -> None: ...


def write_atomically(disk: Disk, path: str, content: bytes) -> None:
    """Replace a small file so that a crash leaves the old or the new one, whole."""
    temporary = path + ".tmp"
    file = disk.open(temporary, create=True, writable=True)
    try:
        file.truncate(0)
        file.pwritev([content], 0)
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, path)
    disk.sync_folder(path.rpartition("/")[0])


def read_whole(disk: Disk, path: str) -> bytes:
    file = disk.open(path)
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()


def read_derived(disk: Disk, path: str) -> bytes | None:
    """A file that can be made again; None if the disk does not give it back."""
    try:
        return read_whole(disk, path)
    except OSError as error:
        if error.errno not in MEDIUM_ERRORS:
            raise
        return None
