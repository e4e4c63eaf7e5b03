"""Coordination is put back to an older copy, and somebody says some time later that this holds.

The copy is put back while all brokers run and reach coordination, so that they notice: one that does not run knows the
metadata only as it was up to a second before it ended. If one ends before it has noticed, nobody promises anything any
more, and the run is judged by the agreement of its replicas only.
"""

from __future__ import annotations

import random
from typing import Final

from headrace.cluster import keys
from headrace.sim.coordination import Snapshot
from headrace.simulator.connection import Client, Clients
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
            self._watch([each.life for each in machines])
        store.restore(copy)
        clock.call_later(self._random.uniform(0.5, 3.0), self._accept)

    def _watch(self, lives: list[str]) -> None:
        """Until all brokers have noticed, or one has ended before."""
        running = [each.participant for each in self._clients.machines if each.life in lives and each.participant]
        if len(running) < len(lives):
            self._clients.history.spare_all("a broker has ended before it noticed the older metadata")
        elif not all(each.metadata.is_held for each in running):
            self._clients.clock.call_later(NOTICE_SECONDS, lambda: self._watch(lives))

    def _accept(self) -> None:
        """Until nobody doubts."""
        clock = self._clients.clock
        clock.call_later(LOOK_SECONDS, self._accept)
        if self._store.list(self._doubts).entries:
            broker = self._clients.some_broker(self._random)
            self._client.call(broker, api.ACCEPT_METADATA, Message(dry_run=False), lambda _: None)
