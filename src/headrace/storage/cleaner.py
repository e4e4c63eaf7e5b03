"""Runs compactions one after the other, a few milliseconds at a time, so that the loop serves clients in between."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from headrace.errors import HeadraceError
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk
from headrace.storage import compaction
from headrace.storage.partitioned import PartitionedLog

logger = logging.getLogger(__name__)

SLICE_SECONDS: Final = 0.004
SLICE_STEPS_MAX: Final = 500
PAUSE_SECONDS: Final = 0.012


class Cleaner:
    def __init__(self, disk: Disk, clock: Clock, finished: Callable[[], None]) -> None:
        self._disk = disk
        self._clock = clock
        self._finished = finished
        self._waiting: dict[PartitionedLog, None] = {}
        self._current: PartitionedLog | None = None
        self._steps: compaction.Steps | None = None
        self._ready: compaction.Ready | None = None
        self._closed = False

    def consider(self, log: PartitionedLog, now_ms: int) -> None:
        """Have the log compacted if it is time to."""
        if log is not self._current and log not in self._waiting and compaction.due(log, now_ms):
            self._waiting[log] = None
            if self._steps is None:
                self._begin()

    def drop(self, log: PartitionedLog) -> None:
        """The log is going away."""
        self._waiting.pop(log, None)
        if self._current is log and self._steps is not None:
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
            log = next(iter(self._waiting))
            del self._waiting[log]
            self._current, self._ready = log, None
            self._steps = compaction.steps(log, self._disk, self._clock.wall_ms())
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
                # The log stays due, so the next retention check asks for it again.
                logger.warning("%r: compaction stopped, tried again later: %s", self._current, error)
                self._end()
                return
        self._clock.call_later(PAUSE_SECONDS, self._slice)
