"""When batches are due and when their time is up: two tables in the order of their making, one timer for each.

All batches of a sender have the same interval and the same delivery timeout, so the oldest is always the first. A batch
leaves its table when it is sealed, or settled, whatever is before it: one that is stuck keeps no other in memory.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.client.connection.reactor import Reactor, Timer
from headrace.client.producer.track import Load


class Timetable:
    """`on_due` hears of every open batch whose interval is over, `on_over` of every one not settled in time."""

    def __init__(self, reactor: Reactor, on_due: Callable[[Load], None], on_over: Callable[[Load], None]) -> None:
        self._reactor = reactor
        self._on_due = on_due
        self._on_over = on_over
        self.unsettled: dict[int, Load] = {}
        """By number, the oldest first."""
        self._open: dict[int, Load] = {}
        self._due: Timer | None = None
        self._over: Timer | None = None

    def add(self, load: Load) -> None:
        self._open[load.number] = load
        self.unsettled[load.number] = load
        if self._due is None:
            self._due = self._reactor.call_at(load.due_at, self._some_due)
        if self._over is None:
            self._over = self._reactor.call_at(load.deadline, self._some_over)

    def sealed(self, load: Load) -> None:
        self._open.pop(load.number, None)

    def settled(self, load: Load) -> None:
        del self.unsettled[load.number]

    def close(self) -> None:
        for timer in (self._due, self._over):
            if timer is not None:
                timer.cancel()

    def _some_due(self) -> None:
        now = self._reactor.now()
        while (first := next(iter(self._open.values()), None)) is not None and first.due_at <= now:
            del self._open[first.number]
            self._on_due(first)
        self._due = None if first is None else self._reactor.call_at(first.due_at, self._some_due)

    def _some_over(self) -> None:
        now = self._reactor.now()
        while (first := next(iter(self.unsettled.values()), None)) is not None and first.deadline <= now:
            self._on_over(first)
        self._over = None if first is None else self._reactor.call_at(first.deadline, self._some_over)
