"""The time of day for what coordinators keep, however the wall clock is set."""

from __future__ import annotations

from headrace.ports.clock import Clock


class Wall:
    """The wall clock may be set forward or back under us. One that is set a year ahead must not take every committed
    offset for old, nor one that is set back stamp new ones as old. So a commit is stamped with the later of two
    readings, and expiry goes by the earlier: the wall clock, and what it was at the start plus the time that has passed
    since. State may be kept for longer by that, never for shorter."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_ms = clock.wall_ms()
        self._began = clock.now()

    def latest_ms(self) -> int:
        """For stamps."""
        return max(self._clock.wall_ms(), self.steady_ms())

    def earliest_ms(self) -> int:
        """For what has become too old."""
        return min(self._clock.wall_ms(), self.steady_ms())

    def steady_ms(self) -> int:
        """What the wall clock was at the start, plus the time that has passed since: for what lasts a while only."""
        return self._began_ms + round((self._clock.now() - self._began) * 1000)
