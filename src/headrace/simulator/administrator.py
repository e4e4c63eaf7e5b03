"""An operator of a simulated cluster: has preferred leaders elected, and changes settings of topics.

What is changed costs nobody anything: a topic that relies on page caches may be synced for a while, and is judged as
one that is not. A synced topic may rely on page caches for a while: where these may all go, it is judged by what was
acknowledged while it was synced.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from headrace.simulator.connection import Client, Clients
from headrace.simulator.scenario import ScenarioTopic
from headrace.wire import api
from headrace.wire.message import Message

MEAN_SECONDS: Final = 0.3
TIMEOUT_MS: Final = 1000
PREFERRED: Final = 0
TOPIC: Final = 2
SET: Final = 0
ELECTION_SHARE: Final = 0.5
CHANGES: Final = {
    "segment.bytes": ("1024", "2048", "1073741824"),
    "min.insync.replicas": ("2", "3"),
    "flush.ms": ("20", "500"),
}
DURABILITIES: Final = ("os", "disk")
DURABILITY_SECONDS: Final = 0.5
"""Not before this is the durability of a topic changed again: it has to be seen by which an answer was given."""


class Administrator:
    def __init__(self, clients: Clients, topics: Sequence[ScenarioTopic], seed: int, *, caches_go: bool) -> None:
        self._clients = clients
        self._topics = topics
        self._random = random.Random(f"{seed} administrator")
        self._client = Client(clients, "administrator")
        self._caches_go = caches_go
        """Whether all page caches may be lost at once."""
        self._durability_not_before: dict[str, float] = {}
        self._stopped = False
        self._later()

    def stop(self) -> None:
        self._stopped = True

    def _later(self) -> None:
        self._clients.clock.call_later(self._random.expovariate(1 / MEAN_SECONDS), self._act)

    def _act(self) -> None:
        if self._stopped:
            return
        self._later()
        if self._random.random() < ELECTION_SHARE:
            self._elect()
        else:
            self._change(self._random.choice(self._topics))

    def _elect(self) -> None:
        message = Message(election_type=PREFERRED, topic_partitions=None, timeout_ms=TIMEOUT_MS)

        def answered(answer: Message | None) -> None:
            for topic in () if answer is None else answer.replica_election_results:
                done = sum(not row.error_code for row in topic.partition_result)
                self._clients.history.counts["elections by hand"] += done

        self._client.call(self._clients.some_broker(self._random), api.ELECT_LEADERS, message, answered)

    def _change(self, topic: ScenarioTopic) -> None:
        now = self._clients.clock.now()
        changes = dict(CHANGES)
        if now >= self._durability_not_before.get(topic.name, 0.0):
            changes["durability"] = DURABILITIES
        name = self._random.choice(list(changes))
        value = self._random.choice(changes[name])
        if name == "durability":
            self._durability_not_before[topic.name] = now + DURABILITY_SECONDS
            if value == "os" and self._caches_go:
                for where in topic.all_partitions():
                    self._clients.history.weaken(where)
        self._clients.history.note(f"asks for {name} {value} of {topic.name}")
        config = Message(name=name, config_operation=SET, value=value)
        resource = Message(resource_type=TOPIC, resource_name=topic.name, configs=[config])
        message = Message(resources=[resource], validate_only=False)

        def answered(answer: Message | None) -> None:
            if answer is not None and not answer.responses[0].error_code:
                self._clients.history.counts["settings changed"] += 1

        self._client.call(self._clients.some_broker(self._random), api.INCREMENTAL_ALTER_CONFIGS, message, answered)
