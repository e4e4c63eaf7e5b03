"""One deadline heap for all that a coordinator keeps: no timer per group or transaction."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

from headrace.partitions.deadlines import Deadlines
from headrace.ports.clock import Clock

NEVER: Final = float("inf")


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
    """One deadline heap for all owners; each has at most one alarm in it, and an earlier one takes the place of a
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
