"""A clock that stands still until it is told to go on: one line of calls in the order of their time.

`advance` lets time pass for code without asyncio; `sim.loop` puts an asyncio loop on the same line of calls.
Calls for the same moment run in the order in which they were asked for.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Final

START_WALL_MS: Final = 1_750_000_000_000
CALLS_MAX: Final = 1_000_000


class VirtualTimer:
    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class VirtualClock:
    """Wall and monotonic time move together, and only in `advance` and `turn`."""

    def __init__(self, wall_ms: int = START_WALL_MS) -> None:
        self._start_wall_ms = wall_ms
        self._now = 0.0
        self._order = 0
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._soon: deque[Callable[[], None]] = deque()

    def wall_ms(self) -> int:
        return self._start_wall_ms + round(self._now * 1000)

    def now(self) -> float:
        return self._now

    def call_later(self, delay_seconds: float, call: Callable[[], None]) -> VirtualTimer:
        return self.call_at(self._now + max(0.0, delay_seconds), call)

    def call_at(self, moment: float, call: Callable[[], None]) -> VirtualTimer:
        """A moment that has passed means as soon as possible, but after what was called soon."""
        timer = VirtualTimer(call)
        self._order += 1
        heapq.heappush(self._timers, (moment, self._order, timer))
        return timer

    def call_soon(self, call: Callable[[], None]) -> None:
        self._soon.append(call)

    def run_soon(self) -> int:
        """Run what was called soon, and what that calls soon in turn; answers how many."""
        count = 0
        while self._soon:
            self._soon.popleft()()
            count += 1
            assert count < CALLS_MAX, "calls keep calling each other"
        return count

    def advance(self, seconds: float) -> None:
        """Let time pass; every timer runs at its own moment."""
        end = self._now + seconds
        self.run_soon()
        while self._timers and self._timers[0][0] <= end:
            self._run_timer()
            self.run_soon()
        self._now = end

    def turn(self) -> bool:
        """Run what is called soon by now; if nothing is, go on to the next timer. False: nothing is left to happen."""
        soon = self._soon
        if soon:
            for _ in range(len(soon)):
                soon.popleft()()
            return True
        while self._timers:
            if self._run_timer():
                return True
        return False

    def _run_timer(self) -> bool:
        """Take the next timer; one that was called off moves nothing."""
        moment, _, timer = heapq.heappop(self._timers)
        call = timer.call
        if call is None:
            return False
        self._now = max(self._now, moment)
        timer.call = None
        call()
        return True
