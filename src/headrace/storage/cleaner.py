"""Runs maintenance work one job after the other, a few milliseconds at a time, so that the loop serves clients between.

A job is a generator that hands back after every short step, or with a function that tells when to go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Hashable
from typing import Final

from headrace.errors import HeadraceError
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File

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
