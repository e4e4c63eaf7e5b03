"""One heap of deadlines per node instead of a timer per request.

An entry is dropped lazily: what was answered in time is skipped when its deadline comes up, and the heap is rebuilt
when most of it is answered, so that a fast stream of requests with long timeouts does not pile up.
"""

from __future__ import annotations

import heapq
from typing import Final, Protocol

from headrace.ports.clock import Clock, Timer

REBUILD_LEAST: Final = 4096


class Waiter(Protocol):
    """A request that waits. `answered` is true once it needs no deadline any more."""

    answered: bool

    def expire(self) -> None:
        """The deadline has come: answer with what there is."""
        ...


class Deadlines:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Waiter]] = []
        self._count = 0
        self._timer: Timer | None = None
        self._timer_at = float("inf")
        self._rebuild_at = REBUILD_LEAST

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, waiter: Waiter) -> None:
        """Call `waiter.expire()` at this monotonic time unless it is answered by then."""
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, waiter))
        if len(self._heap) > self._rebuild_at:
            self._rebuild()
        if at < self._timer_at:
            self._set_timer(at)

    def _rebuild(self) -> None:
        self._heap[:] = [entry for entry in self._heap if not entry[2].answered]
        heapq.heapify(self._heap)
        self._rebuild_at = max(REBUILD_LEAST, 2 * len(self._heap))

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._clock.call_later(max(0.0, at - self._clock.now()), self._fire)

    def _fire(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        now = self._clock.now()
        heap = self._heap
        while heap and (heap[0][0] <= now or heap[0][2].answered):
            waiter = heapq.heappop(heap)[2]
            if not waiter.answered:
                waiter.expire()
        # An expired waiter may have set the timer for itself, beyond what others in the heap still wait for.
        if heap and heap[0][0] < self._timer_at:
            self._set_timer(heap[0][0])
