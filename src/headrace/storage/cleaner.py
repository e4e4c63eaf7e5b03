"""Runs maintenance work one job after the other, a few milliseconds at a time, so that the loop serves clients between.

A job is a generator that hands back after every short step, or with a function that tells when to go on. Compaction of
a log is such a job; `DirtyLogs` tells when it is due.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Hashable
from typing import Final, Generic, Protocol, TypeVar

from headrace.errors import CorruptBatch, HeadraceError
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File
from headrace.settings.values import LogSettings
from headrace.storage.log import Log

logger = logging.getLogger(__name__)

SLICE_SECONDS: Final = 0.004
SLICE_STEPS_MAX: Final = 500
PAUSE_SECONDS: Final = 0.012

Ready = Callable[[], bool]
Steps = Generator[Ready | None, None, None]


def wait_for_sync(disk: Disk, files: list[File]) -> Steps:
    """Goes on when the files are synced; raises why they are not."""
    answers: list[OSError | None] = []
    disk.request_sync(files, answers.append)
    while not answers:
        yield lambda: bool(answers)
    if answers[0] is not None:
        raise answers[0]


class Cleaner:
    """Jobs are known by their subject, a log or something else that is worked on."""

    def __init__(self, clock: Clock, finished: Callable[[], None]) -> None:
        self._clock = clock
        self._finished = finished
        self._waiting: dict[Hashable, Callable[[], Steps]] = {}
        self._current: Hashable | None = None
        self._steps: Steps | None = None
        self._ready: Ready | None = None
        self._closed = False

    def has(self, subject: Hashable) -> bool:
        return subject == self._current or subject in self._waiting

    def add(self, subject: Hashable, job: Callable[[], Steps]) -> None:
        """Have the job done, unless there is one for the subject."""
        if not self.has(subject):
            self._waiting[subject] = job
            if self._steps is None:
                self._begin()

    def drop(self, subject: Hashable) -> None:
        """The subject is going away."""
        self._waiting.pop(subject, None)
        if self._current == subject and self._steps is not None:
            self._steps.close()
            self._end()

    def close(self) -> None:
        self._closed = True
        if self._steps is not None:
            self._steps.close()
        self._steps = self._current = None

    @property
    def busy(self) -> bool:
        return self._steps is not None

    def _begin(self) -> None:
        if self._waiting and not self._closed:
            subject = next(iter(self._waiting))
            job = self._waiting.pop(subject)
            self._current, self._ready = subject, None
            self._steps = job()
            self._clock.call_later(PAUSE_SECONDS, self._slice)

    def _end(self) -> None:
        self._steps = self._current = None
        self._begin()

    def _slice(self) -> None:
        steps = self._steps
        if steps is None or self._closed:
            return
        end = self._clock.now() + SLICE_SECONDS
        for _ in range(SLICE_STEPS_MAX):
            if (self._ready is not None and not self._ready()) or self._clock.now() >= end:
                break
            try:
                self._ready = next(steps)
            except StopIteration:
                self._end()
                self._finished()
                return
            except (OSError, HeadraceError) as error:
                # What was to be done still is, so the next check asks for it again.
                logger.warning("%r: compaction stopped, tried again later: %s", self._current, error)
                self._end()
                return
        self._clock.call_later(PAUSE_SECONDS, self._slice)


WATCHED_MAX_MS: Final = 300_000
LOGS_PER_TICK: Final = 200


class _Subject(Log, Hashable, Protocol):
    """A log as the cleaner knows it."""


OneLog = TypeVar("OneLog", bound=_Subject)


class DirtyLogs(Generic[OneLog]):
    """Which compacted logs the cleaner looks at between the rounds over all logs: those that were written lately.

    A log is looked at after it was written, and further on for as long as a limit of its own (`segment.ms`, the least
    and greatest lag of compaction) may yet make it due. Longer limits, and whatever else changes without a write, are
    left to the rounds. So an idle log costs nothing, however many there are. `due(log, now_ms)` tells whether a log is
    to be compacted, `job(log)` does it.
    """

    def __init__(
        self,
        clock: Clock,
        cleaner: Cleaner,
        backoff_ms: int,
        due: Callable[[OneLog, int], bool],
        job: Callable[[OneLog], Steps],
    ) -> None:
        self._clock = clock
        self._cleaner = cleaner
        self._backoff_s = backoff_ms / 1000
        self._is_due = due
        self._job = job
        self.written: dict[OneLog, float] = {}
        """Compacted logs, and when each was written last."""
        self._next_look = clock.now() + self._backoff_s
        self._looked_at: deque[OneLog] = deque()

    def wrote(self, log: OneLog) -> None:
        """The log may have been written, or has come to be compacted."""
        if log.settings.compact:
            self.written[log] = self._clock.now()

    def drop(self, log: OneLog) -> None:
        """The log is going away."""
        self.written.pop(log, None)
        self._cleaner.drop(log)

    def tick(self, now: float) -> None:
        """When it is time, look at those that were written, so many in a tick."""
        if now >= self._next_look:
            self._next_look = now + self._backoff_s
            self._looked_at = deque(self.written)
            for log, written in list(self.written.items()):
                if now - written >= watched_s(log.settings) + self._backoff_s:
                    del self.written[log]  # this look is its last
        for _ in range(min(LOGS_PER_TICK, len(self._looked_at))):
            self.look(self._looked_at.popleft())

    def look(self, log: OneLog) -> None:
        """Have the log compacted if that is due."""
        try:
            if not self._cleaner.has(log) and self._is_due(log, self._clock.wall_ms()):
                self._cleaner.add(log, lambda: self._job(log))
        except CorruptBatch as error:
            logger.error("%s is not compacted: %s", log.topic_partition, error)
        except OSError as error:
            logger.error("%s: %s", log.topic_partition, error)


def watched_s(settings: LogSettings) -> float:
    """How long after a write time alone can make a log due, as far as that is not left to the rounds."""
    limits_ms = (min(settings.segment_ms, settings.max_compaction_lag_ms), settings.min_compaction_lag_ms)
    return max(limit_ms if limit_ms <= WATCHED_MAX_MS else 0 for limit_ms in limits_ms) / 1000
