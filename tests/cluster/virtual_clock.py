"""A clock that stands still until it is told to advance."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class _Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class VirtualClock:
    """The Clock port; `advance` runs what is due, in order of time."""

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        self._seconds = 0.0
        self._start_ms = wall_ms
        self._order = 0
        self._heap: list[tuple[float, int, _Timer]] = []

    def wall_ms(self) -> int:
        return self._start_ms + round(self._seconds * 1000)

    def now(self) -> float:
        return self._seconds

    def call_later(self, delay_seconds: float, call: Callable[[], None]) -> _Timer:
        timer = _Timer(call)
        self._order += 1
        heapq.heappush(self._heap, (self._seconds + max(delay_seconds, 0), self._order, timer))
        return timer

    def call_soon(self, call: Callable[[], None]) -> None:
        self.call_later(0, call)

    def advance(self, seconds: float) -> None:
        end = self._seconds + seconds
        while self._heap and self._heap[0][0] <= end:
            at, _, timer = heapq.heappop(self._heap)
            self._seconds = max(self._seconds, at)
            if timer.call is not None:
                timer.call()
        self._seconds = end

    def pending(self) -> int:
        """Timers that will still ring."""
        return sum(timer.call is not None for _, _, timer in self._heap)
