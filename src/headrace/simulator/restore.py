"""Coordination is put back to an older copy, and somebody says some time later that this holds.

The copy is put back while all brokers run and reach coordination, so that they notice: one that does not run knows the
metadata only as it was up to a second before it ended. If one ends before it has noticed, or its lease does because it
has heard nothing since (it may wait for an answer that was lost before), nobody promises anything any more, and the run
is judged by the agreement of its replicas only: others cannot tell what only it has seen, and elect from an old set.
"""

from __future__ import annotations

import random
from typing import Final

from headrace.cluster import keys
from headrace.cluster.image import Image
from headrace.simulator.connection import Client, Clients
from headrace.virtual.coordination import Snapshot
from headrace.wire import api
from headrace.wire.message import Message

LOOK_SECONDS: Final = 0.5
NOTICE_SECONDS: Final = 0.01


class Restorer:
    def __init__(self, clients: Clients, cluster: str, seed: int, load_seconds: float) -> None:
        self._clients = clients
        self._store = clients.machines[0].store
        self._doubts = keys.doubts_prefix(keys.cluster_prefix(cluster))
        self._random = random.Random(f"{seed} restorer")
        self._client = Client(clients, "restorer")
        self._stopped = False
        clients.clock.call_later(self._random.uniform(0.0, 0.5) * load_seconds, self._copy)

    def stop(self) -> None:
        """Put nothing back any more; what was is still accepted."""
        self._stopped = True

    def _copy(self) -> None:
        copy = self._store.snapshot()
        self._clients.clock.call_later(self._random.uniform(0.05, 1.0), lambda: self._restore(copy))

    def _restore(self, copy: Snapshot) -> None:
        if self._stopped:
            return
        clock, store = self._clients.clock, self._store
        machines = self._clients.machines
        if not store.running or not all(
            each.participant and not each.paused and store.reaches(each.name) for each in machines
        ):
            clock.call_later(0.05, lambda: self._restore(copy))
            return
        history = self._clients.history
        history.note(f"coordination goes back from revision {store.revision} to {copy.revision}")
        if copy.revision < store.revision:
            history.counts["restores"] += 1
            self._watch([each.life for each in machines], self._knowing(copy))
        store.restore(copy)
        clock.call_later(self._random.uniform(0.5, 3.0), self._accept)

    def _knowing(self, copy: Snapshot) -> dict[str, tuple[int, Image]]:
        """The brokers that have seen more than the copy has: the lease of each, if it goes on in the copy, and what it
        has seen."""
        knowing: dict[str, tuple[int, Image]] = {}
        for machine in self._clients.machines:
            broker = machine.participant
            if broker is None or broker.membership is None or broker.view.image.revision <= copy.revision:
                continue
            if broker.membership.lease in copy.leases:
                knowing[machine.life] = broker.membership.lease, broker.view.image
        return knowing

    def _watch(self, lives: list[str], knowing: dict[str, tuple[int, Image]]) -> None:
        """Until all brokers have noticed, or one has ended before; or the lease of one that has heard nothing since."""
        history = self._clients.history
        running = {each.life: each.participant for each in self._clients.machines if each.participant}
        if any(life not in running for life in lives):
            history.spare_all("a broker has ended before it noticed the older metadata")
        elif any(
            not self._store.has_lease(lease) and running[life].view.image is seen
            for life, (lease, seen) in knowing.items()
        ):
            history.spare_all("the lease of a broker has ended before it noticed the older metadata")
        elif not all(running[life].metadata.is_held for life in lives):
            self._clients.clock.call_later(NOTICE_SECONDS, lambda: self._watch(lives, knowing))

    def _accept(self) -> None:
        """Until nobody doubts."""
        clock = self._clients.clock
        clock.call_later(LOOK_SECONDS, self._accept)
        if self._store.list(self._doubts).entries:
            broker = self._clients.some_broker(self._random)
            self._client.call(broker, api.ACCEPT_METADATA, Message(dry_run=False), lambda _: None)
