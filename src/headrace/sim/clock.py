"""A clock that stands still until it is told to go on."""

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
    """Wall and monotonic time move together, and only in `advance`; calls run in the order of their time."""

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
        timer = VirtualTimer(call)
        self._order += 1
        heapq.heappush(self._timers, (self._now + max(0.0, delay_seconds), self._order, timer))
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
            moment, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, moment)
            if timer.call is not None:
                timer.call()
            self.run_soon()
        self._now = end
