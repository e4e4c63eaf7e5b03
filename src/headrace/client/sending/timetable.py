"""When batches are due and when their time is up: two queues in the order of their making, one timer for each.

All batches of a sender have the same interval and the same delivery timeout, so the oldest is always the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headrace.client.engine.reactor import Reactor, Timer
from headrace.client.sending.track import Load


class Timetable:
    """`on_due` hears of every open batch whose interval is over, `on_over` of every one not settled in time."""

    def __init__(self, reactor: Reactor, on_due: Callable[[Load], None], on_over: Callable[[Load], None]) -> None:
        self._reactor = reactor
        self._on_due = on_due
        self._on_over = on_over
        self._open: deque[Load] = deque()
        self._due: Timer | None = None
        self._unsettled: deque[Load] = deque()
        self._over: Timer | None = None

    def add(self, load: Load) -> None:
        self._open.append(load)
        self._unsettled.append(load)
        if self._due is None:
            self._due = self._reactor.call_at(load.due_at, self._some_due)
        if self._over is None:
            self._over = self._reactor.call_at(load.deadline, self._some_over)

    def tidy(self) -> None:
        """Let go of batches that are settled."""
        while self._unsettled and self._unsettled[0].settled:
            self._unsettled.popleft()

    def close(self) -> None:
        for timer in (self._due, self._over):
            if timer is not None:
                timer.cancel()

    def _some_due(self) -> None:
        now = self._reactor.now()
        while self._open and (self._open[0].due_at <= now or self._open[0].parcel is not None):
            self._on_due(self._open.popleft())
        self._due = self._reactor.call_at(self._open[0].due_at, self._some_due) if self._open else None

    def _some_over(self) -> None:
        now = self._reactor.now()
        while self._unsettled and (self._unsettled[0].settled or self._unsettled[0].deadline <= now):
            load = self._unsettled.popleft()
            if not load.settled:
                self._on_over(load)
        first = self._unsettled[0] if self._unsettled else None
        self._over = None if first is None else self._reactor.call_at(first.deadline, self._some_over)
