"""One file for the whole store, `@checkpoint`: what is safe of each log, so that a start reads no more than it must.

Line 1: CRC-32C of line 2, in hex. Line 2: JSON, {"version": 3, "logs": [[topic, partition, topic id in hex, clean,
recovery point, start offset, end offset, active segment, its bytes, wall ms of its first append, [[compacted up to,
wall ms], ...], truncations], ...]}. Version 1 has no truncations.

It is replaced whole; a crash leaves the old or the new one. `clean` is true only between a clean stop and the next
start. An old one costs time, never data: more is read again. Without one every log is read. A start offset inside a
segment (DeleteRecords) is written here at once; without it the folder's own word counts (`segments.truncation`), which
may be missing. So a broker without one joins its in-sync sets anew (`shortfall`).

`CheckpointWriter` writes it from time to time, and soon after something that only it remembers has changed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from crc32c import crc32c

from headrace.errors import HeadraceError, StorageFailed
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File, read_whole, write_atomically
from headrace.storage.log import TopicPartition

FILE_NAME: Final = "@checkpoint"
VERSION: Final = 3
VERSION_WITHOUT_CUTS: Final = 1


class LogPoint(NamedTuple):
    """What one log was like when the checkpoint was taken; `recovery_offset` and everything before it is safe."""

    topic: str
    partition: int
    topic_id: str
    clean: bool
    recovery_offset: int
    start_offset: int
    end_offset: int
    active_base: int
    active_bytes: int
    began_ms: int
    cleanings: list[tuple[int, int]]
    cuts: int
    """How many truncations it speaks of (see `segments.truncation`)."""


KINDS: Final = [str, int, str, bool, int, int, int, int, int, int]
Points = dict[TopicPartition, LogPoint]


def encode(points: Iterable[LogPoint]) -> bytes:
    return seal({"version": VERSION, "logs": list(points)})


def seal(content: dict[str, Any]) -> bytes:
    """The two lines of a checkpoint."""
    body = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x\n%b\n" % (crc32c(body), body)


def unseal(data: bytes) -> Any:
    """The content of a checkpoint; ValueError if it is not whole."""
    crc, _, body = data.partition(b"\n")
    body = body.removesuffix(b"\n")
    if crc != b"%08x" % crc32c(body):
        raise ValueError("wrong CRC")
    return json.loads(body)


def decode(data: bytes) -> Points | None:
    """None if it is not whole."""
    try:
        content = unseal(data)
        if content["version"] not in (VERSION, VERSION_WITHOUT_CUTS):
            return None
        more = [0] if content["version"] == VERSION_WITHOUT_CUTS else []
        points = [_point([*fields, *more]) for fields in content["logs"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return {TopicPartition(point.topic, point.partition): point for point in points}


def _point(fields: list[Any]) -> LogPoint:
    *plain, cleanings, cuts = fields
    if [type(field) for field in plain] != KINDS or type(cleanings) is not list or type(cuts) is not int:
        raise TypeError("a field is missing, or of another kind")
    return LogPoint._make([*plain, [(int(cleaned_to), int(at_ms)) for cleaned_to, at_ms in cleanings], cuts])


def read(disk: Disk, folder: str) -> Points | None:
    """An empty one if there is none; None if it is damaged."""
    path = f"{folder}/{FILE_NAME}"
    return decode(read_whole(disk, path)) if disk.exists(path) else {}


log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0

Done = Callable[[HeadraceError | None], None]


class Contents(Protocol):
    """What is written, and what must be safe before it counts."""

    def encode(self) -> bytes:
        """OSError where nothing can be promised now."""
        ...

    def files_to_sync(self) -> Sequence[File]:
        """Files that must be synced with the checkpoint that was just encoded."""
        ...

    def synced(self, error: OSError | None) -> None:
        """They were, or why not. OSError if the checkpoint must not count all the same."""
        ...


class CheckpointWriter:
    """None is written before the store is open: until then nobody knows all that it has to speak of. One is written at
    a time: to a temporary file, which is synced, gets its name, and the name is synced, because after a truncation the
    old one is wrong. One that could not be written is tried again; until then the old one stays."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        data: str,
        contents: Contents,
        interval_ms: int,
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._data = data
        self._path = f"{data}/{FILE_NAME}"
        self._contents = contents
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
            self._disk.request_sync([file, *self._contents.files_to_sync()], self._name)
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
