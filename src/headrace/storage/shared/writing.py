"""Writing what all logs have staged: one frame a log, one vectored write for all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from headrace.errors import HeadraceError
from headrace.ports.disk import Buffer
from headrace.storage import refusal
from headrace.storage.shared import frames
from headrace.storage.shared.commitlog import CommitLog
from headrace.storage.shared.frames import FRAME_BYTES, Frame
from headrace.storage.shared.log import SharedLog

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

    def write(self, logs: Iterable[SharedLog]) -> list[Failure]:
        """Write the frames of these logs; those that could not be written are rolled back and named."""
        failures: list[Failure] = []
        ready: list[SharedLog] = []
        count, commit_log = 0, self._commit_log
        for each in logs:
            error = each.prepare()
            if error is not None:
                failures.append((each, error))
                continue
            more = each.staged_bytes
            if not more:
                continue
            if count and commit_log.is_full(count + more + FRAME_BYTES):
                failures += self._write_some(ready, count)
                ready, count = [], 0
            ready.append(each)
            count += more
        if ready:
            failures += self._write_some(ready, count)
        return failures

    def _write_some(self, logs: list[SharedLog], count: int) -> list[Failure]:
        commit_log = self._commit_log
        parts: list[Buffer] = []
        payloads: list[int] = []
        at, synced = 0, commit_log.synced
        try:
            if commit_log.is_full(count + FRAME_BYTES):
                self._roll()
            marking = synced - self.marked >= MARK_BYTES
            if marking:
                parts.append(frames.synced(synced))
                at, count = FRAME_BYTES, count + FRAME_BYTES
            for each in logs:
                whole = each.staged_bytes
                payloads.append(at + each.frames(parts))
                at += whole
            byte = commit_log.write(parts, count)
        except OSError as error:
            self.short_of_room = error.errno in refusal.NO_ROOM
            return [(each, each.take_back(error)) for each in logs]
        self.short_of_room = False
        if marking:
            self.marked, self.mark_end = synced, commit_log.end
        number = commit_log.number
        for each, payload in zip(logs, payloads, strict=True):
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
        """The next file begins with what was synced and the bounds of all logs."""
        synced = self._commit_log.synced
        parts = [frames.synced(synced, self._commit_log.end), *(each.bounds_frame() for each in self._logs())]
        self._commit_log.roll(parts, len(parts) * FRAME_BYTES)
        self.marked, self.mark_end = synced, self._commit_log.end

    def mark(self) -> None:
        """Have the commit log say what is synced, if there is room."""
        synced = self._commit_log.synced
        if synced > self.marked:
            try:
                self._commit_log.write([frames.synced(synced)], FRAME_BYTES)
            except OSError as error:
                log.warning("%s", error)
                return
            self.marked, self.mark_end = synced, self._commit_log.end
