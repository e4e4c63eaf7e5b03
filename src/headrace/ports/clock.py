"""The clock port. Real: system.clock. Virtual, for tests and the simulator: virtual.clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that is still to come and can be called off."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Wall time for records and retention, monotonic time for waits, and calls at a later time."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970."""
        ...

    def now(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        ...

    def call_later(self, delay_seconds: float, call: Callable[[], None]) -> Timer:
        """Run `call` once, on the loop, after the delay."""
        ...

    def call_soon(self, call: Callable[[], None]) -> object:
        """Run `call` once, on the loop, after what is being worked on now."""
        ...
