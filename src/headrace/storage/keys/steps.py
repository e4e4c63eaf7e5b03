"""Work in short steps on the loop: a generator hands back often, with a function that tells when to go on if it waits.

Jobs take turns of a few milliseconds, urgent ones first. While only building is to be done, the loop gets at least as
much time as it takes; while somebody waits for an answer, it gets one pass between two turns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

from headrace.ports.clock import Clock

TURN_SECONDS: Final = 0.002
TURN_STEPS_MAX: Final = 200
PAUSE_SECONDS: Final = 0.002
WAIT_SECONDS: Final = 0.001

Ready = Callable[[], bool]
Steps = Generator[Ready | None, None, None]


@dataclass(slots=True, eq=False)
class Job:
    steps: Steps
    ended: Callable[[Exception | None], None]
    """Hears that the steps have run to their end, or what they raised."""
    urgent: bool
    ready: Ready | None = None


class Turns:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: list[Job] = []
        self._scheduled = False
        self._running = False
        self._closed = False

    def add(self, steps: Steps, ended: Callable[[Exception | None], None], *, urgent: bool = False) -> Job:
        job = Job(steps, ended, urgent)
        self._jobs.append(job)
        self._schedule(0.0)
        return job

    def run_now(self) -> None:
        """Take a turn at once: what needs only a moment is done when this returns."""
        if not self._running and not self._closed:
            self._turn()

    def drop(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
            job.steps.close()

    def close(self) -> None:
        self._closed = True
        for job in self._jobs:
            job.steps.close()
        self._jobs = []

    def _schedule(self, pause: float) -> None:
        if self._scheduled or self._closed:
            return
        self._scheduled = True
        if pause:
            self._clock.call_later(pause, self._due)
        else:
            self._clock.call_soon(self._due)

    def _due(self) -> None:
        self._scheduled = False
        if not self._closed and not self._running:
            self._turn()

    def _turn(self) -> None:
        self._running = True
        until = self._clock.now() + TURN_SECONDS
        left = TURN_STEPS_MAX
        try:
            while left > 0 and self._clock.now() <= until:
                due = [job for job in self._jobs if job.ready is None or job.ready()]
                if not due:
                    break
                for job in [job for job in due if job.urgent] or due:
                    left -= 1
                    self._step(job)
                    if self._clock.now() > until:
                        break
        finally:
            self._running = False
        if not self._jobs:
            return
        if all(job.ready is not None and not job.ready() for job in self._jobs):
            self._schedule(WAIT_SECONDS)
        else:
            self._schedule(0.0 if any(job.urgent for job in self._jobs) else PAUSE_SECONDS)

    def _step(self, job: Job) -> None:
        if job not in self._jobs:
            return
        error: Exception | None = None
        # Whoever had a step goes to the end, so that many share the time evenly.
        self._jobs.remove(job)
        try:
            job.ready = next(job.steps)
            self._jobs.append(job)
            return
        except StopIteration:
            pass
        except Exception as raised:  # noqa: BLE001 - whoever owns the job knows what it may raise
            error = raised
        job.ended(error)
