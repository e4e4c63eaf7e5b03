"""The real clock: the system's monotonic and wall time, and the loop's timers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.ports.clock import Timer


class LoopClock:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # The loop's own time stands still within a turn, in whole milliseconds: too coarse for latencies.
        self.now = time.monotonic
        self.call_later: Callable[[float, Callable[[], None]], Timer] = loop.call_later
        self.call_soon: Callable[[Callable[[], None]], object] = loop.call_soon

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000
