"""Writing what all logs have staged: one frame a log, one vectored write for all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from headrace.errors import HeadraceError
from headrace.ports.disk import Buffer
from headrace.storage import refusal
from headrace.storage.commitlog import frames
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.frames import FRAME_BYTES, Frame
from headrace.storage.commitlog.log import SharedLog

log = logging.getLogger(__name__)

MARK_BYTES: Final = 1 << 20

Failure = tuple[SharedLog, HeadraceError]


class FrameWriter:
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
