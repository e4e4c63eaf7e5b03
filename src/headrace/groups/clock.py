"""Time as groups need it: stamps for what is kept, and alarms for what has a deadline.

The wall clock may be set forward or back under us. One that is set a year ahead must not take every committed offset
for old, nor one that is set back stamp new ones as old. So a commit is stamped with the later of two readings, and
expiry goes by the earlier: the wall clock, and what it was at the start plus the time that has passed since. Offsets
may be kept for longer by that, never for shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from headrace.groups.member import NEVER
from headrace.partitions.deadlines import Deadlines
from headrace.ports.clock import Clock


class Wall:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_ms = clock.wall_ms()
        self._began = clock.now()

    def latest_ms(self) -> int:
        """For stamps."""
        return max(self._clock.wall_ms(), self._steady_ms())

    def earliest_ms(self) -> int:
        """For what has become too old."""
        return min(self._clock.wall_ms(), self._steady_ms())

    def _steady_ms(self) -> int:
        return self._began_ms + round((self._clock.now() - self._began) * 1000)


class _Alarm:
    __slots__ = ("_ring", "answered", "at")

    def __init__(self, at: float, ring: Callable[[], None]) -> None:
        self.at = at
        self.answered = False
        self._ring = ring

    def expire(self) -> None:
        self.answered = True
        self._ring()


class Alarms:
    """One deadline heap for all groups; each has at most one alarm in it, and an earlier one takes the place of a
    later."""

    def __init__(self, clock: Clock) -> None:
        self._deadlines = Deadlines(clock)
        self._alarms: dict[Hashable, _Alarm] = {}

    def __len__(self) -> int:
        return len(self._alarms)

    def keep(self, owner: Hashable, at: float, ring: Callable[[], None]) -> None:
        """See that `ring` runs not later than `at`; NEVER calls it off."""
        alarm = self._alarms.get(owner)
        if alarm is not None:
            if alarm.at <= at < NEVER:
                return
            alarm.answered = True
            del self._alarms[owner]
        if at < NEVER:
            alarm = self._alarms[owner] = _Alarm(at, lambda: self._ring(owner, ring))
            self._deadlines.add(at, alarm)

    def _ring(self, owner: Hashable, ring: Callable[[], None]) -> None:
        del self._alarms[owner]
        ring()
