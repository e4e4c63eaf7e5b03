"""The process that waits for the disk, so that the broker's loop never does.

Run as a script, without site and environment, to stay small: `python -S -E -s sync_helper.py <descriptor>`.
The descriptor is one end of a Unix SOCK_SEQPACKET pair. A request is one packet, with the files as passed descriptors:

    kind      1 byte   b"D" fdatasync each, b"F" syncfs each, b"R" read ahead
    request   uint64   number that the answer repeats
    then for each range of a read-ahead: position uint64, count uint64

The answer is one packet: request uint64, errno int32 (0: done; else the first failure, the rest was still tried),
failed uint64 (bit n: the file n could not be synced).
A sync that failed is never tried again: the kernel reports a lost page once. Because the broker may be dead before it
hears of it, a failed fdatasync first leaves an empty file `sync-failed` in the folder of the file (`ports.disk`).
The process ends when the socket does.
"""

from __future__ import annotations

import _thread
import errno
import os
import socket
import stat
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

REQUEST = struct.Struct("<cQ")
RANGE = struct.Struct("<QQ")
RANGES_MAX = 1024
ANSWER = struct.Struct("<QiQ")
FILES_MAX = 64
ALL_FAILED = (1 << FILES_MAX) - 1
CHUNK_BYTES = 1 << 20
READERS_MAX = 4
READS_WAITING_MAX = 256

MARKER = "sync-failed"
DATASYNC = b"D"
SYNC_FILE_SYSTEM = b"F"
READ_AHEAD = b"R"


def sync_file_system(descriptor: int) -> None:
    """syncfs(2), which the standard library does not have."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def mark(descriptor: int) -> None:
    """Leave word of a failed sync in the folder of the file, or in the folder that it is."""
    try:
        mode = os.fstat(descriptor).st_mode
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if stat.S_ISREG(mode):
            path = path.rpartition("/")[0]
        elif not stat.S_ISDIR(mode):
            return
        os.close(os.open(f"{path}/{MARKER}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    except OSError:
        return  # the broker hears of the failure all the same


def sync(kind: bytes, descriptors: list[int]) -> tuple[int, int]:
    """Sync all of them; the errno of the first that failed, or 0, and a bit for each that did."""
    number = failed = 0
    for place, descriptor in enumerate(descriptors):
        try:
            if kind == SYNC_FILE_SYSTEM:
                sync_file_system(descriptor)
            else:
                os.fdatasync(descriptor)
        except OSError as error:
            if kind == DATASYNC:
                mark(descriptor)
            number = number or error.errno or errno.EIO
            failed |= 1 << place
    return number, failed


def pack(kind: bytes, request: int, ranges: Sequence[tuple[int, int]]) -> bytes:
    return REQUEST.pack(kind, request) + b"".join([RANGE.pack(*each) for each in ranges])


def read_ahead(descriptor: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Read the ranges and throw them away; the page cache keeps them. What cannot be read is found by who sends it."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if len(ranges) > 1:  # the disk may as well work on all of them at once
            for position, count in ranges:
                os.posix_fadvise(descriptor, position, count, os.POSIX_FADV_WILLNEED)
        for position, count in ranges:
            _read_range(descriptor, nowhere, position, position + count)
    except OSError:
        return
    finally:
        os.close(nowhere)


def _read_range(descriptor: int, nowhere: int, position: int, end: int) -> None:
    while position < end:
        # Unlike a read, this copies nothing: a quarter of the processor time.
        got = os.sendfile(nowhere, descriptor, position, min(CHUNK_BYTES, end - position))
        if not got:
            return
        position += got


class Readers:
    """A few threads that read ahead, because a read from a cold disk must not hold up a sync; they end when idle."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = _thread.allocate_lock()
        self._waiting: list[tuple[int, int, list[tuple[int, int]]]] = []
        self._running = 0

    def add(self, request: int, descriptor: int, ranges: list[tuple[int, int]]) -> None:
        with self._lock:
            too_many = len(self._waiting) >= READS_WAITING_MAX
            if not too_many:
                self._waiting.append((request, descriptor, ranges))
            needed = not too_many and self._running < READERS_MAX
            self._running += needed
        if too_many:  # only a hint: whoever sends the bytes reads them then
            self._answer(request, descriptor)
        elif needed:
            try:
                _thread.start_new_thread(self._work, ())
            except RuntimeError:  # no thread to be had
                self._work()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                request, descriptor, ranges = self._waiting.pop(0)
            read_ahead(descriptor, ranges)
            self._answer(request, descriptor)

    def _answer(self, request: int, descriptor: int) -> None:
        os.close(descriptor)
        try:
            self._channel.send(ANSWER.pack(request, 0, 0))
        except OSError:
            return  # the broker has gone


def serve(channel: socket.socket) -> None:
    readers = Readers(channel)
    while True:
        packet, descriptors, flags, _ = socket.recv_fds(channel, REQUEST.size + RANGES_MAX * RANGE.size, FILES_MAX)
        if not packet:
            return
        kind, request = REQUEST.unpack_from(packet)
        if kind == READ_AHEAD and descriptors:
            readers.add(request, descriptors[0], list(RANGE.iter_unpack(packet[REQUEST.size :])))
            continue
        number, failed = sync(kind, descriptors) if kind != READ_AHEAD else (0, 0)
        if flags & socket.MSG_CTRUNC and kind != READ_AHEAD:
            number, failed = number or errno.EMFILE, ALL_FAILED  # not all of the files have arrived
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(ANSWER.pack(request, number, failed))


if __name__ == "__main__":
    try:
        serve(socket.socket(fileno=int(sys.argv[1])))
    except (ConnectionError, BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)
