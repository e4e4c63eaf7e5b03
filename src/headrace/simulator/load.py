"""The load of a simulated cluster: producers, consumers with and without groups, deletions, and operators.

All of them are clients of the brokers' Kafka listeners (`connection`), so what they ask for takes the way that it takes
in a real broker: connection, handlers, partitions, and back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from headrace.cluster.names import OFFSETS_TOPIC
from headrace.errors import ErrorCode
from headrace.simulator.administrator import Administrator
from headrace.simulator.broker import CLUSTER, JOBS
from headrace.simulator.connection import CLIENT, Client, Clients
from headrace.simulator.consumer import Consumer
from headrace.simulator.group_member import GroupMember
from headrace.simulator.harm import ANY
from headrace.simulator.history import History
from headrace.simulator.leaders import Leaders
from headrace.simulator.machine import Machine
from headrace.simulator.producer import JAVA, LIBRDKAFKA, Producer
from headrace.simulator.reassigner import Reassigner
from headrace.simulator.renewal import Renewal
from headrace.simulator.restore import Restorer
from headrace.simulator.scenario import Scenario
from headrace.simulator.share_load import ShareLoad
from headrace.simulator.transaction_load import TransactionLoad
from headrace.storage.log import TopicPartition
from headrace.virtual.clock import VirtualClock
from headrace.virtual.network import VirtualNetwork
from headrace.wire import api
from headrace.wire.message import Message

PAUSE_SECONDS: Final = 0.05
BACKOFF_SECONDS: Final = 0.1
DELETION_SECONDS: Final = 0.4
MEMBERS: Final = 2
GROUPS: Final = ("readers", "others")


class Load:
    """`start` begins it. `stop` ends what would go on for ever; the rest comes to its end by itself."""

    def __init__(
        self,
        scenario: Scenario,
        network: VirtualNetwork,
        clock: VirtualClock,
        machines: list[Machine],
        history: History,
    ) -> None:
        self._scenario = scenario
        self._random = random.Random(f"{scenario.seed} load")
        self.clients = Clients(network.host(CLIENT), clock, machines, history, self._random)
        self._producers: list[Producer] = []
        self._consumers: dict[TopicPartition, Consumer] = {}
        self._stops: list[Callable[[], None]] = []
        """Of all that would go on for ever."""
        self.renewal: Renewal | None = None
        self.transactions: TransactionLoad | None = None
        if scenario.transactions is not None:
            self.transactions = TransactionLoad(
                self.clients, scenario.transactions, scenario.seed, scenario.follower_reads
            )
        self.shares: ShareLoad | None = None
        if scenario.shares is not None:
            self.shares = ShareLoad(self.clients, scenario.shares, scenario.seed)
        for machine in machines:
            machine.overheard = self.clients.overhear

    @property
    def waiting(self) -> int:
        """Batches that are not acknowledged."""
        return sum(producer.waiting for producer in self._producers)

    def start(self) -> None:
        scenario, clients = self._scenario, self.clients
        for topic in scenario.topics:
            for _ in range(scenario.producers):
                self._add_producer(topic.name, topic.partitions, keyed=scenario.compacted)
            for where in topic.all_partitions():
                self._consumers[where] = Consumer(
                    clients, where, f"consumer of {where}", PAUSE_SECONDS, scenario.follower_reads
                )
        topics = {topic.name: topic.partitions for topic in scenario.topics}
        for group in GROUPS[: scenario.groups]:
            for nth in range(MEMBERS):
                name = f"{group} {nth}"
                count = scenario.settings["offsets.topic.partitions"]
                self._stops.append(GroupMember(clients, group, name, topics, count, PAUSE_SECONDS).stop)
        if scenario.deletions:
            self._stops.append(Deleter(clients, self._consumers).stop)
        if scenario.administered:
            caches_go = scenario.regime == ANY
            self._stops.append(Administrator(clients, scenario.topics, scenario.seed, caches_go=caches_go).stop)
        offsets_partitions = scenario.offsets_partitions
        if scenario.moves:
            partitions = [where for topic in scenario.topics for where in topic.all_partitions()]
            partitions += [TopicPartition(OFFSETS_TOPIC, index) for index in range(offsets_partitions)]
            if self.transactions is not None:
                partitions += self.transactions.all_partitions()
            if self.shares is not None:
                partitions += self.shares.all_partitions()
            self._stops.append(Reassigner(clients, partitions, scenario.seed).stop)
        if scenario.renewed:
            self.renewal = Renewal(clients, scenario.seed, offsets_partitions)
            self._stops.append(self.renewal.stop)
        if self.transactions is not None:
            self.transactions.start()
            if self.transactions.plan.deletions:
                self._stops.append(Deleter(clients, self.transactions.consumers).stop)
            self._stops.append(self.transactions.stop)
        if self.shares is not None:
            self._start_shares(self.shares)
        if scenario.restored:
            self._stops.append(Restorer(clients, CLUSTER, scenario.seed, scenario.load_seconds).stop)

    def _start_shares(self, shares: ShareLoad) -> None:
        plan = shares.plan
        for _ in range(self._scenario.producers):
            forgettable = self._scenario.moves and bool(plan.deletions or plan.retention)
            self._add_producer(JOBS, plan.partitions, keyed=plan.compacted, forgettable=forgettable)
        shares.start()
        if plan.deletions:
            self._stops.append(Deleter(self.clients, shares.consumers).stop)
        self._stops.append(shares.stop)

    def _add_producer(self, topic: str, partitions: int, *, keyed: bool, forgettable: bool | None = None) -> None:
        scenario = self._scenario
        if forgettable is None:
            forgettable = scenario.moves and bool(scenario.deletions or scenario.retention)
        producer = Producer(
            self.clients,
            topic,
            partitions,
            len(self._producers) + 1,
            scenario.in_flight,
            self._random.choice((JAVA, LIBRDKAFKA)),
            BACKOFF_SECONDS,
            keyed=keyed,
            forgettable=forgettable,
        )
        self._producers.append(producer)
        self._stops.append(producer.stop)
        self._make_batches(producer, scenario.batch_pause_seconds / partitions)

    def _make_batches(self, producer: Producer, pause_seconds: float) -> None:
        producer.make()
        delay = self._random.expovariate(1 / pause_seconds)
        if not producer.done:
            self.clients.clock.call_later(delay, lambda: self._make_batches(producer, pause_seconds))

    def stop(self) -> None:
        for stop in self._stops:
            stop()


class Deleter:
    """Deletes now and then what the consumers have read."""

    def __init__(self, clients: Clients, consumers: dict[TopicPartition, Consumer]) -> None:
        self._clients = clients
        self._consumers = consumers
        self._random = random.Random(clients.random.random())
        self._client = Client(clients, "deleter")
        topics = dict.fromkeys(where.topic for where in consumers)
        self._leaders = Leaders(clients, self._client, topics, self._random)
        self._stopped = False
        self._later()

    def stop(self) -> None:
        self._stopped = True

    def _later(self) -> None:
        self._clients.clock.call_later(self._random.expovariate(1 / DELETION_SECONDS), self._delete)

    def _delete(self) -> None:
        where = self._random.choice(list(self._consumers))
        leaders = self._leaders
        leader, before = leaders.leader(where), self._random.randint(0, self._consumers[where].offset)
        if self._stopped:
            return
        self._later()
        if leader is None or not before:
            leaders.refresh()
            return
        history = self._clients.history
        history.asks_to_delete(where, before)
        row = Message(partition_index=where.partition, offset=before)
        message = Message(topics=[Message(name=where.topic, partitions=[row])], timeout_ms=1000)

        def decided(answer: Message, machine: Machine) -> None:
            told = answer.topics[0].partitions[0]
            if not told.error_code:
                epoch = self._clients.epoch(machine, where)
                history.deleted(where, before, told.low_watermark, epoch, machine.life)

        def answered(answer: Message | None) -> None:
            if answer is None or answer.topics[0].partitions[0].error_code != ErrorCode.NONE:
                leaders.refresh()

        self._client.call(leader, api.DELETE_RECORDS, message, answered, decided=decided)
