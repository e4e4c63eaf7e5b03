"""The high watermarks of all partitions of a broker, one small file per data folder: `@watermarks`.

Sealed like `@checkpoint`. Line 1: CRC-32C of line 2, in hex. Line 2: JSON, {"version": 1, "watermarks": [[topic id in
hex, partition, offset], ...]}.

It is written to a temporary file, synced and given its name, every few seconds if something has changed, and at a clean
stop. A crash leaves an old one, or the one before that: a watermark that is too low costs waiting, never data, and a
broker must not believe one that is too high, so it is never believed beyond a log's end. Without the file, or if it is
damaged, nothing is known and a log's start counts. Topics are known by their ids, so that one made anew inherits
nothing. The file is not touched before every replica has taken what it says: a start that failed would forget it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File, read_whole, write_atomically
from headrace.storage.checkpoint import seal, unseal

log = logging.getLogger(__name__)

FILE_NAME: Final = "@watermarks"
VERSION: Final = 1
INTERVAL_MS: Final = 5000

Watermark = tuple[bytes, int, int]
"""Topic id, partition, offset."""
Key = tuple[bytes, int]
"""Topic id and partition."""


def encode(watermarks: Iterable[Watermark]) -> bytes:
    rows = [[topic_id.hex(), partition, offset] for topic_id, partition, offset in watermarks]
    return seal({"version": VERSION, "watermarks": rows})


def decode(data: bytes) -> dict[Key, int] | None:
    """None if it is not whole."""
    try:
        content = unseal(data)
        if content["version"] != VERSION:
            return None
        return dict(_row(*row) for row in content["watermarks"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _row(topic_id: Any, partition: Any, offset: Any) -> tuple[Key, int]:
    if [type(each) for each in (topic_id, partition, offset)] != [str, int, int] or offset < 0:
        raise TypeError("a field is of another kind")
    return (bytes.fromhex(topic_id), partition), offset


def read(disk: Disk, data: str) -> dict[Key, int]:
    """What was written last; nothing if there is no file or it is not whole."""
    path = f"{data}/{FILE_NAME}"
    if not disk.exists(path):
        return {}
    found = decode(read_whole(disk, path))
    if found is None:
        log.error("%s is damaged: every watermark begins at its log's start", path)
    return found or {}


class Watermarks:
    """`watermarks` answers what is true now, of all partitions of this broker."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        data: str,
        watermarks: Callable[[], Iterable[Watermark]],
        interval_ms: int = INTERVAL_MS,
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._data = data
        self._path = f"{data}/{FILE_NAME}"
        self._watermarks = watermarks
        self._interval_seconds = interval_ms / 1000
        self._next = clock.now() + self._interval_seconds
        self._written = b""
        self._writing = b""
        self._open = self._running = self._closed = False

    def read(self) -> Mapping[Key, int]:
        return read(self._disk, self._data)

    def open(self) -> None:
        """Every replica stands where the file, and its log, said: from now on what they say is written."""
        self._open = True

    def tick(self) -> None:
        """Have them written behind the loop, if it is time and one has moved."""
        if not self._open or self._running or self._closed or self._clock.now() < self._next:
            return
        self._next = self._clock.now() + self._interval_seconds
        content = encode(self._watermarks())
        if content == self._written:
            return
        self._running, self._writing = True, content
        try:
            file = self._disk.open(self._path + ".tmp", create=True, writable=True)
            file.truncate(0)
            file.pwritev([content], 0)
            self._disk.request_sync([file], lambda error: self._name(file, error))
        except OSError as error:
            self._end(error)

    def _name(self, file: File, error: OSError | None) -> None:
        file.close()
        if self._closed:
            return
        try:
            if error is not None:
                raise error
            # Its name is not synced: a crash may leave the one before, which is as good.
            self._disk.rename(self._path + ".tmp", self._path)
        except OSError as failure:
            self._end(failure)
        else:
            self._written = self._writing
            self._running = False

    def _end(self, error: OSError) -> None:
        self._running = False
        log.warning("%s not written, the old one stays; tried again soon: %s", self._path, error)

    def close(self) -> None:
        """Write them now, for a clean stop."""
        if self._closed or not self._open:
            return
        self._closed = True
        try:
            write_atomically(self._disk, self._path, encode(self._watermarks()))
        except OSError as error:
            log.error("%s not written, the old one stays: %s", self._path, error)

    def abandon(self) -> None:
        """Nothing is written any more."""
        self._closed = True
