"""Whether coordination still answers: asked for the cluster's id once a second.

While it does not, a registry goes on telling what it knew; how old that may be is what this says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.cluster import keys
from headrace.coordination.waits import pause
from headrace.errors import CoordinationError, OperatorError
from headrace.ports.clock import Clock
from headrace.ports.coordination import Coordination

PULSE_SECONDS: Final = 1.0
SILENT_SECONDS: Final = 3.0
"""Longer than a pulse that one node of etcd left unanswered and the next one did not."""


class Pulse:
    """`failed` hears when another cluster stands where this one's was: what is known here is of no use then."""

    def __init__(
        self, coordination: Coordination, clock: Clock, cluster_id: str, failed: Callable[[BaseException], None]
    ) -> None:
        self.trouble = ""
        """Why the last pulse failed."""
        self._coordination = coordination
        self._clock = clock
        self._cluster_id = cluster_id
        self._failed = failed
        self._heard_at = clock.now()

    @property
    def silent_seconds(self) -> float:
        """For how long there was no answer."""
        return self._clock.now() - self._heard_at

    @property
    def silent(self) -> bool:
        return self.silent_seconds > SILENT_SECONDS

    async def run(self) -> None:
        while True:
            await pause(self._clock, PULSE_SECONDS)
            asked = self._clock.now()
            try:
                found = await self._coordination.get(keys.CLUSTER_ID)
                now = None if found is None else str(keys.decode(found.key, found.value))
            except CoordinationError as error:
                self.trouble = str(error)
                continue
            if now is None:
                self.trouble = f"key {keys.CLUSTER_ID} is gone: restore etcd's data"
                continue
            if now != self._cluster_id:
                self._failed(OperatorError(f"etcd holds cluster {now!r} now, not {self._cluster_id!r}: start again"))
                return
            self._heard_at, self.trouble = asked, ""
