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

from headrace.virtual.clock import VirtualTimer
from headrace.virtual.loop import OWNER, VirtualLoop

TIDY_TASKS_LEAST: Final = 64


class _Call(VirtualTimer):
    """A call of a process, soon or at its time."""

    __slots__ = ("process",)

    def __init__(self, process: Process, call: Callable[[], None]) -> None:
        self.process = process
        self.call = call

    def run(self) -> None:
        process = self.process
        if not process.running:
            process.put_off(self.run)
            return
        call, self.call = self.call, None
        if call is not None:
            process.enter(call)


class Process:
    """Also the Clock port for what runs in it."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.loop = loop
        self.clock = loop.clock
        self.now = loop.clock.now
        self.wall_offset_ms = 0
        """How far the wall clock of its machine is off."""
        self.paused = False
        self.dead = False
        self.running = True
        """Neither paused nor dead."""
        self.context = Context()
        self.context.run(OWNER.set, self)
        self._held: deque[Callable[[], None]] = deque()
        self._tasks: list[asyncio.Task[Any]] = []
        self._tidy_tasks_at = TIDY_TASKS_LEAST

    # The clock.

    def wall_ms(self) -> int:
        return self.clock.wall_ms() + self.wall_offset_ms

    def call_later(self, delay_seconds: float, call: Callable[[], None]) -> VirtualTimer:
        timer = _Call(self, call)
        moment = self.now() + self.loop.draw_lateness()
        self.clock.set(moment + delay_seconds if delay_seconds > 0 else moment, timer)
        return timer

    def call_soon(self, call: Callable[[], None]) -> None:
        self.clock.call_soon(_Call(self, call).run)

    # What is done to it.

    def hear(self, call: Callable[[], None]) -> None:
        """Something reaches it from outside: it is worked on at once, but after all that came before it."""
        if self.running and not self._held:
            self.enter(call)
            return
        self.put_off(_Call(self, call).run)
        if self.running:
            self.clock.call_soon(self._catch_up)

    def enter(self, call: Callable[[], None]) -> None:
        """What it raises is told as asyncio tells it."""
        try:
            self.context.run(call)
        except Exception as error:  # noqa: BLE001 - whatever it is, the loop's handler is told
            self.loop.call_exception_handler({"message": f"{self.name}: {call!r} failed", "exception": error})

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a task of this process."""
        return self.loop.create_task(work, context=self.context)

    def pause(self) -> None:
        self.paused = True
        self.running = False

    def resume(self) -> None:
        if not self.paused:
            return
        self.paused = False
        self.running = not self.dead
        for _ in self._held:
            self.clock.call_soon(self._catch_up)

    def _catch_up(self) -> None:
        """Run the first of what was put off, unless it is paused again by now."""
        if self.running and self._held:
            self._held.popleft()()

    def die(self) -> None:
        """End it here and now. Its tasks stay as they are until `bury`: collecting them would run their `finally`."""
        self.dead = True
        self.running = False
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

    def put_off(self, call: Callable[[], None]) -> None:
        """Kept until it goes on; a dead one never does."""
        if not self.dead:
            self._held.append(call)
