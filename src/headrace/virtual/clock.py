"""A clock that stands still until it is told to go on: one line of calls in the order of their time.

`advance` lets time pass for code without asyncio; `virtual.loop` puts an asyncio loop on the same line of calls.
Calls for the same moment run in the order in which they were asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

START_WALL_MS: Final = 1_750_000_000_000
CALLS_MAX: Final = 1_000_000


class VirtualTimer:
    """`call` is None when it was called off, or has run."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None

    def run(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            call()


class VirtualClock:
    """Wall and monotonic time move together, and only in `advance` and `run`."""

    def __init__(self, wall_ms: int = START_WALL_MS) -> None:
        self.watch: Callable[[], None] | None = None
        """Called after every call of `run`: for who waits for a moment and must not come too late."""
        self._start_wall_ms = wall_ms
        self._now = 0.0
        self._order = 0
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._halted = False
        self._soon: deque[Callable[[], None]] = deque()

    def wall_ms(self) -> int:
        return self._start_wall_ms + round(self._now * 1000)

    def call_soon(self, call: Callable[[], None]) -> None:
        self._soon.append(call)

    def now(self) -> float:
        return self._now

    def call_later(self, delay_seconds: float, call: Callable[[], None]) -> VirtualTimer:
        timer = VirtualTimer(call)
        self.set(self._now + delay_seconds if delay_seconds > 0 else self._now, timer)
        return timer

    def call_at(self, moment: float, call: Callable[[], None]) -> VirtualTimer:
        """A moment that has passed means as soon as possible, but after what was called soon."""
        timer = VirtualTimer(call)
        self.set(moment, timer)
        return timer

    def set(self, moment: float, timer: VirtualTimer) -> None:
        self._order += 1
        heappush(self._timers, (moment, self._order, timer))

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
            moment, _, timer = heappop(self._timers)
            if timer.call is not None:  # one that was called off moves nothing
                self._now = max(self._now, moment)
                timer.run()
            self.run_soon()
        self._now = end

    def run(self) -> bool:
        """Turn after turn until `halt`. False: nothing is left to happen."""
        soon, timers = self._soon, self._timers
        take_soon = soon.popleft
        self._halted = False
        while not self._halted:
            if soon:
                take_soon()()
            elif timers:
                moment, _, timer = heappop(timers)
                if timer.call is None:
                    continue
                self._now = max(self._now, moment)
                timer.run()
            else:
                return False
            if self.watch is not None:
                self.watch()
        return True

    def halt(self) -> None:
        """`run` returns after the call that is running."""
        self._halted = True
