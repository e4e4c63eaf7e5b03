"""When the checkpoint is written: from time to time, and soon after something that only it remembers has changed.

None is written before the store is open: until then nobody knows all that it has to speak of. One is written at a time:
to a temporary file, which is synced, gets its name, and the name is synced, because after a truncation the old one is
wrong. One that could not be written is tried again; until then the old one stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from headrace.errors import HeadraceError, StorageFailed
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File, write_atomically
from headrace.storage import checkpoint
from headrace.storage.checkpoint import LogPoint

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0

Done = Callable[[HeadraceError | None], None]


class Contents(Protocol):
    """What is written, and what must be safe before it counts."""

    def encode(self) -> bytes:
        """OSError where nothing can be promised now."""
        ...

    def beside(self) -> Sequence[File]:
        """Files that must be synced with the checkpoint that was just encoded."""
        ...

    def synced(self, error: OSError | None) -> None:
        """They were, or why not. OSError if the checkpoint must not count all the same."""
        ...


class _Points:
    """Points of logs whose files are synced by themselves."""

    def __init__(self, points: Callable[[], Iterator[LogPoint]]) -> None:
        self._points = points

    def encode(self) -> bytes:
        return checkpoint.encode(self._points())

    def beside(self) -> Sequence[File]:
        return ()

    def synced(self, error: OSError | None) -> None:
        return None


class CheckpointWriter:
    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        data: str,
        contents: Contents | Callable[[], Iterator[LogPoint]],
        interval_ms: int,
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._data = data
        self._path = f"{data}/{checkpoint.FILE_NAME}"
        self._contents: Contents = _Points(contents) if callable(contents) else contents
        self._interval_seconds = interval_ms / 1000
        self._next = clock.now() + self._interval_seconds
        self._open = self._wanted = self._running = self._closed = False
        self._waiting: list[Done] = []
        self._served: list[Done] = []

    def open(self) -> None:
        """Every log of the folder is there: a checkpoint speaks for all of them from now on."""
        self._open = True
        if self._wanted:
            self._clock.call_soon(self._begin)

    def tick(self, now: float) -> None:
        if now >= self._next:
            self.soon()

    def soon(self, done: Done | None = None) -> None:
        """Write one after this turn; several wishes give one. `done` hears when what is true now is safe."""
        if self._closed:
            return
        if done is not None:
            self._waiting.append(done)
        if not self._wanted:
            self._wanted = True
            if self._open:
                self._clock.call_soon(self._begin)

    def write_now(self) -> None:
        assert self._open, "a checkpoint of a store that is not open"
        write_atomically(self._disk, self._path, self._contents.encode())

    def close(self) -> None:
        """Nothing is written any more, and who waits hears nothing."""
        self._closed = True

    def _begin(self) -> None:
        if self._running or self._closed or not self._wanted:
            return  # the end of the running one looks again
        self._wanted, self._running = False, True
        self._served, self._waiting = self._waiting, []
        self._next = self._clock.now() + self._interval_seconds
        try:
            file = self._disk.open(self._path + ".tmp", create=True, writable=True)
            file.truncate(0)
            file.pwritev([self._contents.encode()], 0)
            self._disk.request_sync([file, *self._contents.beside()], self._name)
        except OSError as error:
            self._end(error)

    def _name(self, error: OSError | None) -> None:
        if self._closed:
            return
        try:
            self._contents.synced(error)
            if error is not None:
                raise error
            self._disk.rename(self._path + ".tmp", self._path)
            self._disk.request_sync([self._disk.open(self._data)], self._end)
        except OSError as failure:
            self._end(failure)

    def _end(self, error: OSError | None) -> None:
        if self._closed:
            return
        self._running = False
        served, self._served = self._served, []
        if error is not None:
            log.warning("checkpoint not written, the old one stays; tried again soon: %s", error)
            self._wanted = True
            self._clock.call_later(RETRY_SECONDS, self._begin)
        elif self._wanted:
            self._begin()
        reason = StorageFailed(f"{self._path} could not be written: {error.strerror}") if error is not None else None
        for done in served:
            done(reason)
