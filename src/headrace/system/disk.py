"""The real disk: pwritev, preallocated mapped files, and syncs in a helper process.

A sync must not run on the loop, and a thread's sync starves on the interpreter lock under load, so descriptors go over
a Unix socket to `sync_helper`. A few files are synced one by one, more of them by one syncfs per file system. When
that fails, the files are synced one by one after all: each reports what it has lost itself, and the failure may have
been of a file that is not ours. Before Linux 5.8 syncfs tells of no page that could not be written: there all files
are synced one by one.
Without the helper (switched off, or dead: one log line) a thread does the same work. A failed sync is never retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import platform
import re
import resource
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from headrace.ports.disk import Buffer, File, Range, SyncDone, SyncFailed
from headrace.system import sync_helper
from headrace.system.syncer import SyncProcess, SyncRequest, SyncThread, failure, unless_marked

log = logging.getLogger(__name__)

IOV_MAX: Final = 1024
DATASYNC_FILES_MAX: Final = 8
SYNCFS_TELLS_SINCE: Final = (5, 8)
PROBE_BYTES: Final = 128 << 10
SHORT_BYTES: Final = 16 << 10
"""A range that one probe stands for: it came into the page cache, and leaves it, as one."""

_PROBE: Final = [bytearray(1)]
_libc: Final = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE: Final = 1
"""FALLOC_FL_KEEP_SIZE of fallocate(2), which the standard library does not have."""


class SystemFile:
    """A descriptor that closes itself when the last reference goes."""

    __slots__ = ("_descriptor", "device", "path")

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.device = os.fstat(descriptor).st_dev

    def fileno(self) -> int:
        return self._descriptor

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def pwritev(self, parts: Sequence[Buffer], position: int) -> int:
        if len(parts) <= IOV_MAX:
            total = sum(map(len, parts))
            if os.pwritev(self._descriptor, parts, position) == total:
                return total
        return self._pwritev_slowly(parts, position)

    def _pwritev_slowly(self, parts: Sequence[Buffer], position: int) -> int:
        """Many parts, or a first try that came out short: the next try then says what is wrong."""
        start = position
        rest = deque(memoryview(part).cast("B") for part in parts if len(part))
        while rest:
            some = [rest[i] for i in range(min(len(rest), IOV_MAX))]
            written = os.pwritev(self._descriptor, some, position)
            if written == 0:
                raise OSError(errno.EIO, "write made no progress", self.path)
            position += written
            while rest and written >= len(rest[0]):
                written -= len(rest.popleft())
            if written:
                rest[0] = rest[0][written:]
        return position - start

    def pread(self, count: int, position: int) -> bytes:
        data = os.pread(self._descriptor, count, position)
        if len(data) == count or not data:
            return data
        parts = [data]
        while data and sum(map(len, parts)) < count:
            done = sum(map(len, parts))
            data = os.pread(self._descriptor, count - done, position + done)
            parts.append(data)
        return b"".join(parts)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def allocate(self, size: int) -> None:
        if size > 0:
            os.posix_fallocate(self._descriptor, 0, size)

    def reserve(self, size: int) -> None:
        if _libc.fallocate(self._descriptor, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
            number = ctypes.get_errno()
            if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(number, os.strerror(number), self.path)

    def map(self, size: int, *, writable: bool, populate: bool) -> memoryview:
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return memoryview(mmap.mmap(self._descriptor, size, flags=flags, prot=protection))

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def in_cache(self, position: int, count: int) -> bool:
        last = position + count - 1
        try:
            os.preadv(self._descriptor, _PROBE, last, os.RWF_NOWAIT)
            if count > SHORT_BYTES:
                for at in range(position, last, PROBE_BYTES):
                    os.preadv(self._descriptor, _PROBE, at, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            # A file system that cannot answer without waiting (tmpfs among them) is asked no further.
            return error.errno == errno.EOPNOTSUPP
        return True

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()


class SystemDisk:
    """The file system of this machine.

    Without a loop (offline tools) `request_sync` and `read_ahead` do their work at once and answer before they return.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        sync_helper: bool = True,
        kernel: str = platform.release(),
    ) -> None:
        raise_open_files_limit()
        self._syncfs_tells = syncfs_tells(kernel)
        self._loop = loop
        self._numbers = 0
        self.unanswered = 0
        self._thread: SyncThread | None = None
        self._helper = SyncProcess(loop, self._helper_died) if loop is not None and sync_helper else None

    @property
    def helper_pid(self) -> int | None:
        return self._helper.pid if self._helper else None

    def open(self, path: str, *, create: bool = False, writable: bool = False) -> SystemFile:
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT if create else 0) | os.O_CLOEXEC
        return SystemFile(path, os.open(path, flags, 0o644))

    def lock(self, path: str) -> SystemFile:
        file = self.open(path, create=True, writable=True)
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise
        return file

    def exists(self, path: str) -> bool:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False  # any other error says nothing of whether it is there
        return True

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def changed_ms(self, path: str) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000

    def list(self, folder: str) -> list[str]:
        return os.listdir(folder)

    def make_folder(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def remove(self, path: str) -> None:
        os.remove(path)

    def remove_folder(self, path: str) -> None:
        shutil.rmtree(path)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def sync_folder(self, path: str) -> None:
        file = self.open(path)
        try:
            os.fsync(file.fileno())
        finally:
            file.close()

    def free_bytes(self, path: str) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def request_sync(self, files: Sequence[File], done: SyncDone) -> None:
        if not files:
            self._soon(done, None)
            return
        kind, chosen = self._how_to_sync(files)
        if kind == sync_helper.DATASYNC and len(chosen) <= DATASYNC_FILES_MAX:
            self._send(kind, chosen, done)
            return
        if kind == sync_helper.DATASYNC:
            self._sync_each(deque(chosen), deque(), done)
            return

        def synced(error: OSError | None) -> None:
            if error is None:
                done(None)
            else:
                self._sync_each(deque(files), deque(), done)

        self._send(kind, chosen, synced)

    def _sync_each(self, files: deque[File], failures: deque[SyncFailed], done: SyncDone) -> None:
        """A few at a time; each file knows whether something of it was lost."""
        some = tuple(files.popleft() for _ in range(min(len(files), DATASYNC_FILES_MAX)))

        def synced(error: OSError | None) -> None:
            if error is not None:
                failed = error if isinstance(error, SyncFailed) else SyncFailed(error.errno or errno.EIO, some)
                failures.append(failed)
            if files:
                self._sync_each(files, failures, done)
            else:
                done(_together(failures))

        self._send(sync_helper.DATASYNC, some, synced)

    def sync_now(self, files: Sequence[File]) -> None:
        # A sync under way may take the only word of a failure: it has left its mark when it is done.
        if self._helper:
            self._helper.wait()
        if self._thread:
            self._thread.wait()
        kind, chosen = self._how_to_sync(files)
        number, failed = sync_helper.sync(kind, [file.fileno() for file in chosen])
        if number and kind == sync_helper.SYNC_FILE_SYSTEM:
            chosen = tuple(files)
            number, failed = sync_helper.sync(sync_helper.DATASYNC, [file.fileno() for file in chosen])
        error = failure(chosen, number, failed)
        if error is not None:
            raise error

    def _how_to_sync(self, files: Sequence[File]) -> tuple[bytes, tuple[File, ...]]:
        if len(files) <= DATASYNC_FILES_MAX or not self._syncfs_tells:
            return sync_helper.DATASYNC, tuple(files)
        by_device: dict[int, File] = {}
        for file in files:
            assert isinstance(file, SystemFile)
            by_device.setdefault(file.device, file)
        return sync_helper.SYNC_FILE_SYSTEM, tuple(by_device.values())

    def read_ahead(self, file: File, ranges: Sequence[Range], done: Callable[[], None]) -> None:
        # What is left out is read by whoever sends it: this is only a hint.
        self._send(sync_helper.READ_AHEAD, (file,), lambda _: done(), ranges[: sync_helper.RANGES_MAX])

    def close(self) -> None:
        if self._helper:
            self._helper.close()
        if self._thread:
            self._thread.close()
        self._helper = self._thread = None

    def _soon(self, done: SyncDone, error: OSError | None) -> None:
        if self._loop is None:
            done(error)
        else:
            self._loop.call_soon(done, error)

    def _send(self, kind: bytes, files: tuple[File, ...], done: SyncDone, ranges: Sequence[Range] = ()) -> None:
        if self._loop is None:
            self._at_once(kind, files, done, ranges)
            return
        self._numbers += 1
        self.unanswered += 1
        request = SyncRequest(self._numbers, kind, files, ranges, self._answering(done))
        if self._helper:
            self._helper.send(request)
        else:
            self._to_thread(request)

    def _answering(self, done: SyncDone) -> SyncDone:
        def answered(error: OSError | None) -> None:
            self.unanswered -= 1
            done(error)

        return answered

    def _to_thread(self, request: SyncRequest) -> None:
        if self._thread is None:
            assert self._loop is not None
            self._thread = SyncThread(self._loop)
        self._thread.send(request)

    def _at_once(self, kind: bytes, files: tuple[File, ...], done: SyncDone, ranges: Sequence[Range]) -> None:
        error = None
        if kind == sync_helper.READ_AHEAD:
            sync_helper.read_ahead(files[0].fileno(), ranges)
        else:
            error = failure(files, *sync_helper.sync(kind, [file.fileno() for file in files]))
        done(error)

    def _helper_died(self, unanswered: Sequence[SyncRequest]) -> None:
        """Requests without an answer go to the thread: a sync that was not answered has not failed. Only a syncfs may
        have without leaving a mark: it is answered as failed, so that its files are synced one by one.
        """
        log.error("the sync helper process has ended; syncs go on in a thread, slower, until the broker is restarted")
        self._helper = None
        for request in unanswered:
            if request.kind == sync_helper.SYNC_FILE_SYSTEM:
                self._soon(request.done, OSError(errno.EIO, os.strerror(errno.EIO)))
                continue
            request.done = unless_marked(request)
            self._to_thread(request)


def _together(failures: Sequence[SyncFailed]) -> SyncFailed | None:
    if not failures:
        return None
    assert failures[0].errno is not None
    return SyncFailed(failures[0].errno, [file for failure in failures for file in failure.files])


def syncfs_tells(release: str) -> bool:
    """Whether syncfs(2) of this kernel tells of pages that could not be written: since 5.8."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is not None and (int(found[1]), int(found[2])) >= SYNCFS_TELLS_SINCE


def raise_open_files_limit() -> None:
    """Segments, maps and connections each take a descriptor; the soft limit is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
