"""What is due when: a heap, in which cancelled timers stay until they are due or too many."""

from __future__ import annotations

import heapq
import math
from typing import Final

from headrace.client.connection.reactor import Callback

CANCELLED_KEPT: Final = 64


class HeapTimer:
    __slots__ = ("_timers", "fn")

    def __init__(self, timers: Timers, fn: Callback) -> None:
        self._timers = timers
        self.fn: Callback | None = fn

    def cancel(self) -> None:
        if self.fn is not None:
            self.fn = None
            self._timers.cancelled += 1


class Timers:
    """`next_at` is when there is something to take, or earlier: never later."""

    def __init__(self) -> None:
        self.next_at = math.inf
        self.cancelled = 0
        self._heap: list[tuple[float, int, HeapTimer]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, when: float, fn: Callback) -> HeapTimer:
        timer = HeapTimer(self, fn)
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, timer))
        if self.cancelled > CANCELLED_KEPT and 2 * self.cancelled > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].fn is not None]
            heapq.heapify(self._heap)
            self.cancelled = 0
        self.next_at = self._heap[0][0]
        return timer

    def take(self, now: float) -> Callback | None:
        """What is due by now, the earliest first; None if nothing is."""
        fn = None
        while fn is None and self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            fn, timer.fn = timer.fn, None
            if fn is None:
                self.cancelled -= 1
        self.next_at = self._heap[0][0] if self._heap else math.inf
        return fn
