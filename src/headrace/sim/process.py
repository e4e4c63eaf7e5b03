"""A process of the simulation: its clock, and the power to stop it, let it go on and end it at any moment.

All that a process does begins in its context: with `run`, with a call of its clock, with bytes from a network or an
answer from a disk that were given its clock. A paused one does nothing while time goes on, as after SIGSTOP; when it
goes on, all that came due meanwhile runs at once. A dead one is cut off in the middle of what it did: nothing is
closed, no `finally` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final

from headrace.sim.loop import OWNER, VirtualLoop

TIDY_TASKS_LEAST: Final = 64


class Process:
    """Also the Clock port for what runs in it."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.loop = loop
        self.now = loop.clock.now
        self.wall_ms = loop.clock.wall_ms
        self.paused = False
        self.dead = False
        self.context = Context()
        self.context.run(OWNER.set, self)
        self._held: deque[Callable[[], None]] = deque()
        self._tasks: list[asyncio.Task[Any]] = []
        self._tidy_tasks_at = TIDY_TASKS_LEAST

    # The clock.

    def call_later(self, delay_seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(max(0.0, delay_seconds), call, context=self.context)

    def call_soon(self, call: Callable[[], None]) -> None:
        self.loop.call_soon(call, context=self.context)

    # What is done to it.

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a task of this process."""
        return self.loop.create_task(work, context=self.context)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        if not self.paused:
            return
        self.paused = False
        held, self._held = self._held, deque()
        for call in held:
            self.loop.clock.call_soon(call)

    def die(self) -> None:
        """End it here and now. Its tasks stay as they are until `bury`: collecting them would run their `finally`."""
        self.dead = True
        self._held.clear()

    def began(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        if len(self._tasks) > self._tidy_tasks_at:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tidy_tasks_at = 2 * len(self._tasks) + TIDY_TASKS_LEAST

    def bury(self) -> None:
        """Dispose of a dead process when nothing can be harmed by it any more."""
        tasks, self._tasks = [task for task in self._tasks if not task.done()], []
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):
                task.get_coro().close()

    def admits(self, run: Callable[[], None]) -> bool:
        if self.dead:
            return False
        if self.paused:
            self._held.append(run)
            return False
        return True
