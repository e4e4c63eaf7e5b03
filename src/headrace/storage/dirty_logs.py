"""Which compacted logs the cleaner looks at between the rounds over all logs: those that were written lately.

A log is looked at after it was written, and further on for as long as a limit of its own (`segment.ms`, the least and
greatest lag of compaction) may yet make it due. Longer limits, and whatever else changes without a write, are left to
the rounds. So an idle log costs nothing, however many there are.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, Protocol, TypeVar

from headrace.errors import CorruptBatch
from headrace.ports.clock import Clock
from headrace.settings.values import LogSettings
from headrace.storage.cleaner import Cleaner, Steps
from headrace.storage.log import Log

logger = logging.getLogger(__name__)

WATCHED_MAX_MS: Final = 300_000
LOGS_PER_TICK: Final = 200


class _Subject(Log, Hashable, Protocol):
    """A log as the cleaner knows it."""


OneLog = TypeVar("OneLog", bound=_Subject)


class DirtyLogs(Generic[OneLog]):
    """`due(log, now_ms)` tells whether a log is to be compacted, `job(log)` does it."""

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
        self._written: dict[OneLog, float] = {}
        self._next_look = clock.now() + self._backoff_s
        self._looked_at: deque[OneLog] = deque()

    def wrote(self, log: OneLog) -> None:
        if log.settings.compact:
            self._written[log] = self._clock.now()

    def drop(self, log: OneLog) -> None:
        """The log is going away."""
        self._written.pop(log, None)
        self._cleaner.drop(log)

    def tick(self, now: float) -> None:
        """When it is time, look at those that were written, so many in a tick."""
        if now >= self._next_look:
            self._next_look = now + self._backoff_s
            self._looked_at = deque(self._written)
            for log, written in list(self._written.items()):
                if now - written >= watched_s(log.settings) + self._backoff_s:
                    del self._written[log]  # this look is its last
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
