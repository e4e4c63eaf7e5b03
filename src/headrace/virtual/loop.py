"""asyncio on virtual time: the loop never waits, it moves the clock to the next timer.

Everything runs in one order that depends on nothing outside: what is called soon first come first served, timers by
their moment, then by the order in which they were set. With `jitter_seconds` every timer is late by a random part of
it, drawn from the seed, so that other seeds try other orders.

A call belongs to the process (`virtual.process`) whose context it was made in, and so does what it calls and every task
that it starts: what belongs to a paused process is kept until it goes on, what belongs to a dead one never runs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol, TypeVar, TypeVarTuple

from headrace.virtual.clock import VirtualClock

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Owner(Protocol):
    """Whom calls belong to."""

    running: bool
    """Whether its calls may run now."""

    def put_off(self, call: Callable[[], None]) -> None:
        """A call of it came while it was not running: keep it, or drop it."""
        ...

    def began(self, task: asyncio.Task[Any]) -> None: ...


OWNER: ContextVar[Owner | None] = ContextVar("OWNER", default=None)


class Stalled(Exception):
    """Somebody waits, and nothing is left that could happen."""


def _run(handle: _Soon | _Timed) -> None:
    if handle._cancelled:
        return
    if handle.owner is None or handle.owner.running:
        handle._run()
    else:
        handle.owner.put_off(handle)


class _Soon(asyncio.Handle):
    __slots__ = ("owner",)
    owner: Owner | None
    __call__ = _run


class _Timed(asyncio.TimerHandle):
    __slots__ = ("owner",)
    owner: Owner | None
    __call__ = _run


class VirtualLoop(asyncio.BaseEventLoop):
    _stopping: bool

    def __init__(self, clock: VirtualClock | None = None, seed: int = 0, jitter_seconds: float = 0.0) -> None:
        super().__init__()
        self.clock = clock or VirtualClock()
        self._jitter_seconds = jitter_seconds
        self._random = random.Random(seed)

    def time(self) -> float:
        return self.clock.now()

    def call_soon(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        context = copy_context() if context is None else context
        handle = _Soon(callback, args, self, context)
        handle.owner = context.get(OWNER)
        self.clock.call_soon(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        handle = _Timed(when, callback, args, self, context)
        handle.owner = context.get(OWNER)
        self.clock.call_at(when + self.draw_lateness(), handle)
        return handle

    def draw_lateness(self) -> float:
        return self._random.random() * self._jitter_seconds if self._jitter_seconds else 0.0

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task = super().create_task(coro, name=name, context=context)
        owner = OWNER.get() if context is None else context.get(OWNER)
        if owner is not None:
            owner.began(task)
        return task

    def call_soon_threadsafe(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _run_once(self) -> None:
        """As many calls as it takes until somebody stops the loop."""
        if not self._stopping and not self.clock.run():
            raise Stalled(f"nothing is left to happen at {self.clock.now():.6f} s")

    def stop(self) -> None:
        super().stop()
        self.clock.halt()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called off timers are passed over when their moment comes."""
