"""A start's wait for coordination: servers may be started in any order, so one that comes first waits for etcd.

What is waited for, and where, is said soon and then every so often. What etcd refuses is not waited for: no time
mends a wrong password.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from headrace.coordination.waits import pause
from headrace.errors import CoordinationError
from headrace.ports.clock import Clock, Timer
from headrace.ports.coordination import CoordinationRefused

log = logging.getLogger(__name__)

SAY_FIRST_SECONDS: Final = 1.0
SAY_AGAIN_SECONDS: Final = 15.0
ASK_AGAIN_SECONDS: Final = 0.5
NO_END: Final = -1

Answer = TypeVar("Answer")


class Patience:
    """How long a start waits, counted from now: `wait_ms`, or without end when that is -1. `what` says what for, and
    where.
    """

    def __init__(self, clock: Clock, what: str, wait_ms: int) -> None:
        self._clock = clock
        self._what = what
        self._began = clock.now()
        self._bound = "as long as it takes" if wait_ms == NO_END else f"up to {wait_ms / 1000:g} s"
        self._give_up = float("inf") if wait_ms == NO_END else self._began + wait_ms / 1000
        self._last = "no answer yet"
        self._timer: Timer | None = None

    async def answer(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """The first answer of `ask`, which may be asked many times; the last failure when time is up."""
        self._timer = self._clock.call_later(SAY_FIRST_SECONDS, self._say)
        try:
            while True:
                try:
                    return await self._ask_in_time(ask)
                except CoordinationRefused:
                    raise
                except CoordinationError as error:
                    if self._over:
                        raise
                    self._last = str(error)
                await pause(self._clock, ASK_AGAIN_SECONDS)
        finally:
            self._timer.cancel()

    async def _ask_in_time(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """One call has a limit of its own, which may be longer than the wait. Who asks only once leaves it at that."""
        left_s = self._give_up - self._clock.now()
        if math.isinf(left_s) or self._give_up == self._began:
            return await ask()
        asking = asyncio.ensure_future(ask())
        timer = self._clock.call_later(max(left_s, ASK_AGAIN_SECONDS), lambda: _call_off(asking))
        try:
            return await asking
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            waited_s, self._give_up = self._give_up - self._began, self._clock.now()
            raise CoordinationError(
                f"no answer from {self._what} within {waited_s:g} s (coordination.wait.ms), last: "
                f"{self._last}. Check that it runs there, and the settings coordination and etcd.tls"
            ) from None
        finally:
            timer.cancel()

    @property
    def _over(self) -> bool:
        return self._clock.now() >= self._give_up

    def _say(self) -> None:
        self._timer = self._clock.call_later(SAY_AGAIN_SECONDS, self._say)
        if not self._over:
            waited_s = self._clock.now() - self._began
            bound = f"{self._bound} (coordination.wait.ms)"
            log.warning("waiting for %s since %.0f s, %s: %s", self._what, waited_s, bound, self._last)


def _call_off(asking: asyncio.Future[Answer]) -> None:
    asking.cancel()
