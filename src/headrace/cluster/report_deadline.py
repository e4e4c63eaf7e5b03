"""How long replicas without a leader have to report what they hold: one lease time from the latest of the first report,
the registration of a replica that is alive and silent, and the order for an election.

Who is alive and does not report by then, because it hangs or cannot read its log, holds up no election that may lose
something. One that merely stands still loses its lease within the same time. One that registers again and again without
a lapse, as a process that dies of what it reads, is waited for as often as `REGISTRATIONS_MAX`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from headrace.cluster.image import NO_LEADER, Image
from headrace.placement.plans import Where
from headrace.ports.clock import Clock

REGISTRATIONS_MAX: Final = 3


class ReportsDue:
    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._since: dict[Hashable, float] = {}
        """When each of what is waited from was first seen; what is no more is forgotten."""
        self._ends: dict[Where, float] = {}

    def follow(self, image: Image) -> None:
        known = self._since
        self._since, self._ends = {}, {}
        for where, said in image.controls.ends.items():
            state = image.partition(*where)
            if not said or state is None or state.leader != NO_LEADER:
                continue
            topic_id = image.topics[where[0]].id
            vacancy = where, topic_id, state.leader_epoch
            latest = self._seen(known, vacancy)
            order = image.controls.orders.get(where)
            if order is not None:
                latest = max(latest, self._seen(known, (vacancy, "order", order.revision)))
            for broker in (image.brokers[each] for each in state.replicas if each in image.brokers):
                report = said.get(broker.id)
                if report is None or (report.incarnation, report.topic_id) != (broker.incarnation, topic_id):
                    there = self._seen(known, (vacancy, broker.id))
                    registered = self._seen(known, (vacancy, broker.id, broker.incarnation))
                    latest = max(latest, min(registered, there + (REGISTRATIONS_MAX - 1) * self._seconds))
            self._ends[where] = latest + self._seconds

    def _seen(self, known: dict[Hashable, float], what: Hashable) -> float:
        return self._since.setdefault(what, known.get(what, self._clock.now()))

    def is_over(self, where: Where) -> bool:
        return self._clock.now() >= self._ends.get(where, float("inf"))

    def next_end(self) -> float:
        now = self._clock.now()
        return min((end for end in self._ends.values() if end > now), default=float("inf"))
