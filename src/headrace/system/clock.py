"""The real clock: the system's monotonic and wall time, and the loop's timers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.ports.clock import Timer


class LoopClock:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # The loop's own time stands still within a turn, in whole milliseconds: too coarse for latencies.
        self.now = time.monotonic

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def call_later(self, delay_seconds: float, call: Callable[[], None]) -> Timer:
        return self._loop.call_later(delay_seconds, call)

    def call_soon(self, call: Callable[[], None]) -> None:
        self._loop.call_soon(call)
