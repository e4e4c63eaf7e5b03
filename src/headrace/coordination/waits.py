"""A coroutine's waits: for time to pass by the injected clock, for a call from elsewhere on the loop, for long work.

And the task that it runs in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from headrace.ports.clock import Clock

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs pure work that may take long, and answers what it answers: in a thread, where the loop must go on."""


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


async def pause(clock: Clock, seconds: float) -> None:
    """Return after the delay; called off with the task that waits."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = clock.call_later(seconds, lambda: None if done.done() else done.set_result(None))
    try:
        await done
    finally:
        timer.cancel()


class Bell:
    """Wakes one task. Rung before anybody waits, it is heard by the next wait; rung often, it is heard once."""

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        self._rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def rung(self) -> None:
        if not self._rung:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._rung = False


class OwnedTask:
    """A task in the background. `failed` hears why it has ended, unless it was closed."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Called off, and at its end when this returns."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)
