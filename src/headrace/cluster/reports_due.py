"""How long replicas without a leader have had to report what they hold: one lease time from the first report on.

Who is alive and does not report by then, because it hangs or cannot read its log, holds up no election that may lose
something. One that merely stands still loses its lease within the same time.
"""

from __future__ import annotations

from headrace.cluster.image import NO_LEADER, Image
from headrace.cluster.reassign import Where
from headrace.ports.clock import Clock


class ReportsDue:
    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._since: dict[tuple[Where, bytes, int], float] = {}
        """When the first report on a partition was seen, in the epoch that has no leader any more."""
        self._ends: dict[Where, float] = {}

    def follow(self, image: Image) -> None:
        now, known = self._clock.now(), self._since
        self._since, self._ends = {}, {}
        for where, said in image.controls.ends.items():
            state = image.partition(*where)
            if said and state is not None and state.leader == NO_LEADER:
                vacancy = where, image.topics[where[0]].id, state.leader_epoch
                self._since[vacancy] = known.get(vacancy, now)
                self._ends[where] = self._since[vacancy] + self._seconds

    def is_over(self, where: Where) -> bool:
        return self._clock.now() >= self._ends.get(where, float("inf"))

    def next_end(self) -> float:
        now = self._clock.now()
        return min((end for end in self._ends.values() if end > now), default=float("inf"))
