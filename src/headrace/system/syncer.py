"""Who waits for the disk in the loop's place: the helper process, or a thread where there is none.

A request holds its files until it is answered, on the loop. When the helper dies, the requests that it has not answered
go to the thread; but a sync that failed is told once only, so those whose files bear its mark have failed. A syncfs
leaves no mark, and is not tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.ports.disk import SYNC_FAILED, File, Range, SyncDone, SyncFailed
from headrace.system import sync_helper

HELPER_STOP_SECONDS: Final = 5.0


@dataclass(slots=True)
class SyncRequest:
    """One sync or read-ahead; it holds its files, so that their descriptors stay open until it is answered."""

    number: int
    kind: bytes
    files: tuple[File, ...]
    ranges: Sequence[Range]
    done: Callable[[OSError | None], None]

    def packet(self) -> bytes:
        return sync_helper.pack(self.kind, self.number, self.ranges)


class SyncProcess:
    """The other process: requests out as packets, answers in on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, died: Callable[[Sequence[SyncRequest]], None]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", "-s", sync_helper.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={},
            )
        ours.setblocking(False)
        self._socket = ours
        self._loop = loop
        self._died = died
        self._waiting: dict[int, SyncRequest] = {}
        self._unsent: deque[SyncRequest] = deque()
        loop.add_reader(ours.fileno(), self._answers)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, request: SyncRequest) -> None:
        self._waiting[request.number] = request
        self._unsent.append(request)
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._unsent:
            request = self._unsent[0]
            try:
                socket.send_fds(self._socket, [request.packet()], [file.fileno() for file in request.files])
            except BlockingIOError:
                return  # the next answer makes room
            except OSError:
                self._end()
                return
            self._unsent.popleft()

    def _answers(self) -> None:
        for request, error in self._received():
            request.done(error)
        self._send_waiting()

    def _received(self) -> Iterator[tuple[SyncRequest, OSError | None]]:
        """What is answered by now. When the helper has died, all that it has not answered ends here."""
        while True:
            try:
                packet = self._socket.recv(sync_helper.ANSWER.size)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._end()
                return
            number, *outcome = sync_helper.ANSWER.unpack(packet)
            request = self._waiting.pop(number)
            yield request, failure(request.files, *outcome)

    def wait(self) -> None:
        """Until all syncs that were asked for are done; who asked is told by the loop, as always."""
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        while any(request.kind != sync_helper.READ_AHEAD for request in self._waiting.values()):
            self._send_waiting()
            readable.poll()
            for request, error in self._received():
                self._loop.call_soon(request.done, error)

    def _end(self) -> None:
        waiting = list(self._waiting.values())
        self._waiting.clear()
        self._unsent.clear()
        self.close()
        self._died(waiting)

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        with contextlib.suppress(RuntimeError):
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        try:
            self._process.wait(HELPER_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class SyncThread:
    """The same work in a thread, for when there is no helper process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: queue.SimpleQueue[SyncRequest | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sync", daemon=True)
        self._thread.start()

    def send(self, request: SyncRequest) -> None:
        self._queue.put(request)

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            if isinstance(request, threading.Event):
                request.set()
                continue
            descriptors = [file.fileno() for file in request.files]
            error = None
            if request.kind == sync_helper.READ_AHEAD:
                sync_helper.read_ahead(descriptors[0], request.ranges)
            else:
                error = failure(request.files, *sync_helper.sync(request.kind, descriptors))
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for the answer
                self._loop.call_soon_threadsafe(request.done, error)

    def wait(self) -> None:
        """Until all that was asked is done."""
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(HELPER_STOP_SECONDS)


def unless_marked(request: SyncRequest) -> SyncDone:
    """The helper may have died after a sync that failed, which no second one would tell of: it left its mark first."""
    told = request.done

    def done(error: OSError | None) -> None:
        if error is None and request.kind == sync_helper.DATASYNC:
            lost = [file for file in request.files if os.path.exists(f"{_folder_of(file.path)}/{SYNC_FAILED}")]
            error = SyncFailed(errno.EIO, lost) if lost else None
        told(error)

    return done


def _folder_of(path: str) -> str:
    return path if os.path.isdir(path) else os.path.dirname(path)


def failure(files: Sequence[File], number: int, failed: int) -> SyncFailed | None:
    """What the helper answered: an errno, and a bit for each file that failed."""
    if not number:
        return None
    return SyncFailed(number, [file for place, file in enumerate(files) if failed >> place & 1])
