"""Who leads the partitions of some topics, as a simulated client has been told."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Final

from headrace.simulator.connection import Client, Clients
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

REFRESH_SECONDS: Final = 0.1


class Leaders:
    """`changed` runs when an answer has come."""

    def __init__(
        self,
        clients: Clients,
        client: Client,
        topics: Iterable[str],
        chance: random.Random,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._clients = clients
        self._client = client
        self._topics = [Message(name=topic) for topic in topics]
        self._random = chance
        self._changed = changed
        self._known: dict[TopicPartition, tuple[int, int]] = {}
        """By partition: leader, -1 for none, and its epoch."""
        self._asking = False
        self._not_before = 0.0
        self.refresh()

    def leader(self, where: TopicPartition) -> int | None:
        leader, _ = self._known.get(where, (-1, -1))
        return None if leader < 0 else leader

    def epoch(self, where: TopicPartition) -> int:
        return self._known.get(where, (-1, -1))[1]

    def learn(self, where: TopicPartition, epoch: int) -> None:
        """Something was written or read in this epoch: who led before it is not asked any more."""
        if epoch > self.epoch(where):
            self._known[where] = -1, epoch

    def refresh(self) -> None:
        """Ask some broker, though not too often, and again if it does not know."""
        if not self._asking:
            self._asking = True
            clock = self._clients.clock
            clock.call_at(max(clock.now(), self._not_before), self._ask)

    def _ask(self) -> None:
        self._not_before = self._clients.clock.now() + REFRESH_SECONDS * self._random.uniform(0.5, 1.5)
        message = Message(
            topics=self._topics,
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )
        self._client.call(self._clients.some_broker(self._random), api.METADATA, message, self._answered)

    def _answered(self, answer: Message | None) -> None:
        self._asking = False
        for topic in () if answer is None else answer.topics:
            for row in topic.partitions:
                where = TopicPartition(topic.name, row.partition_index)
                # What an older image says is not believed.
                if row.leader_epoch >= self.epoch(where):
                    self._known[where] = row.leader_id, row.leader_epoch
        if not self._known or any(leader < 0 for leader, _ in self._known.values()):
            self.refresh()
        self._changed()
