"""An operator of a simulated cluster of four brokers: moves replicas, changes and cancels moves that are under way,
drains brokers and gives them back.

All of it goes through Kafka's AlterPartitionReassignments and ListPartitionReassignments and our own PlanPlacement, as
`headrace partition move` and `headrace broker drain` have it. The partitions of internal topics are moved too; now and
then one gets a replica less, and the controller gives it back. At the end one broker may stay drained.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

from headrace.cluster.names import COORDINATORS_TOPICS
from headrace.simulator.connection import Client, Clients, Reply
from headrace.simulator.scenario import REPLICAS
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

MEAN_SECONDS: Final = 0.3
TIMEOUT_MS: Final = 1000
MOVE_SHARE: Final = 0.45
CHANGE_SHARE: Final = 0.35
"""Of what is done, moves that are begun, and changed or cancelled; the rest are drains."""
CANCEL_SHARE: Final = 0.5
SHORT_SHARE: Final = 0.3
"""Of moves of internal topics, those with a replica less."""
LOOK_SECONDS: Final = 0.5

Targets = Mapping[TopicPartition, Sequence[int] | None]


class Reassigner:
    def __init__(self, clients: Clients, partitions: Sequence[TopicPartition], seed: int) -> None:
        self._clients = clients
        self._random = random.Random(f"{seed} reassigner")
        self._client = Client(clients, "reassigner")
        self._partitions = partitions
        self._drained_at_end = self._random.randint(0, 1)
        self._stopped = False
        self._later()

    def stop(self) -> None:
        """Begin nothing new, and give brokers back that are drained, all or all but one."""
        self._stopped = True
        self._give_back()

    def _later(self) -> None:
        self._clients.clock.call_later(self._random.expovariate(1 / MEAN_SECONDS), self._act)

    def _act(self) -> None:
        if self._stopped:
            return
        self._later()
        what = self._random.random()
        if what < MOVE_SHARE:
            partitions = self._random.sample(self._partitions, min(len(self._partitions), self._random.randint(1, 2)))
            self._order({where: self._target(where) for where in partitions})
        elif what < MOVE_SHARE + CHANGE_SHARE:
            self._change()
        else:
            self._drain_or_give_back()

    def _target(self, where: TopicPartition) -> list[int]:
        is_short = where.topic in COORDINATORS_TOPICS and self._random.random() < SHORT_SHARE
        brokers = [machine.id for machine in self._clients.machines]
        return self._random.sample(brokers, REPLICAS - is_short)

    def _order(self, targets: Targets) -> None:
        """None ends the move that is under way."""
        topics: dict[str, list[Message]] = {}
        for where, target in targets.items():
            row = Message(partition_index=where.partition, replicas=target)
            topics.setdefault(where.topic, []).append(row)
            self._clients.history.note(f"asks to move {where} to {target}")
        message = Message(
            timeout_ms=TIMEOUT_MS, topics=[Message(name=name, partitions=rows) for name, rows in topics.items()]
        )

        def answered(answer: Message | None) -> None:
            for topic in () if answer is None else answer.responses:
                for row in topic.partitions:
                    if not row.error_code:
                        target = targets[TopicPartition(topic.name, row.partition_index)]
                        self._clients.history.counts["moves ordered" if target else "moves cancelled"] += 1

        self._call(api.ALTER_PARTITION_REASSIGNMENTS, message, answered)

    def _change(self) -> None:
        """Cancel what is under way, or have it elsewhere."""

        def answered(answer: Message | None) -> None:
            targets: dict[TopicPartition, Sequence[int] | None] = {}
            for topic in () if answer is None else answer.topics:
                for row in topic.partitions:
                    where = TopicPartition(topic.name, row.partition_index)
                    targets[where] = None if self._random.random() < CANCEL_SHARE else self._target(where)
            if targets and not self._stopped:
                self._order(targets)

        self._call(api.LIST_PARTITION_REASSIGNMENTS, Message(timeout_ms=TIMEOUT_MS, topics=None), answered)

    # Drains.

    def _drain_or_give_back(self) -> None:
        def answered(answer: Message | None) -> None:
            if answer is None or self._stopped:
                return
            for broker in answer.draining:
                self._plan("undrain", broker)
            if not answer.draining:
                self._plan("drain", self._clients.some_broker(self._random))

        self._call(api.PLAN_PLACEMENT, Message(action="show", broker_id=-1, dry_run=True), answered)

    def _give_back(self) -> None:
        """As long as too many are drained: an order may come late."""
        self._clients.clock.call_later(LOOK_SECONDS, self._give_back)

        def answered(answer: Message | None) -> None:
            for broker in () if answer is None else answer.draining[self._drained_at_end :]:
                self._plan("undrain", broker)

        self._call(api.PLAN_PLACEMENT, Message(action="show", broker_id=-1, dry_run=True), answered)

    def _plan(self, action: str, broker: int) -> None:
        self._clients.history.note(f"asks to {action} {broker}")

        def answered(answer: Message | None) -> None:
            if answer is not None and not answer.error_code:
                self._clients.history.counts["drains" if action == "drain" else "ends of drains"] += 1

        self._call(api.PLAN_PLACEMENT, Message(action=action, broker_id=broker, dry_run=False), answered)

    def _call(self, api_key: int, message: Message, answered: Reply) -> None:
        self._client.call(self._clients.some_broker(self._random), api_key, message, answered)
