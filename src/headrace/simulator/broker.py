"""The real broker with its Kafka front end on the ports of a simulated machine, and the topics of a scenario."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Final

from headrace.cluster.image import Endpoint
from headrace.cluster.names import OFFSETS_TOPIC, SHARE_STATE_TOPIC, TRANSACTIONS_TOPIC
from headrace.cluster.participant import Participant
from headrace.cluster.topics import OFFSETS_OVERRIDES, CreateTopic
from headrace.kafka.front_end import FrontEnd
from headrace.kafka.listeners import DEFAULT_NAME
from headrace.metrics import Metrics
from headrace.ports.network import Address
from headrace.server.process import OwnedTasks
from headrace.settings.values import BrokerSettings, load
from headrace.simulator.connection import KAFKA_PORT
from headrace.simulator.history import Violation
from headrace.simulator.machine import DATA, Machine
from headrace.simulator.scenario import COMPACTION, REPLICAS, Scenario, SharePlan, TransactionPlan
from headrace.storage.log import TICK_SECONDS
from headrace.virtual.network import VirtualHost
from headrace.virtual.process import Process

CLUSTER: Final = "sim"
LINK_PORT: Final = 9192
LEDGER: Final = "ledger"
COPIED: Final = "copied"
"""Topics that are written to in transactions."""
JOBS: Final = "jobs"
WORKERS: Final = "workers"
"""The topic whose records a share group delivers, and that group."""
CONNECTIONS_MAX: Final = 1000
OFFSETS_TOPIC_OVERRIDES: Final = {
    **OFFSETS_OVERRIDES,
    "segment.bytes": "4096",
    "durability": "disk",
    "min.insync.replicas": "2",
}
TRANSACTIONAL_OVERRIDES: Final = {
    "segment.bytes": "2048",
    "segment.index.bytes": "1024",
    "index.interval.bytes": "256",
    "durability": "disk",
    "min.insync.replicas": "2",
}


class Broker:
    """A participant with its front end; started and stopped in the order of server/node.py."""

    def __init__(self, participant: Participant, machine: Machine, process: Process, host: VirtualHost) -> None:
        self.participant = participant
        self.metrics = Metrics()
        self._machine = machine
        self._process = process
        self._host = host
        self._tasks = OwnedTasks(process.loop, machine.failed)
        self._built = contextlib.ExitStack()

    async def start(self) -> None:
        participant, address = self.participant, Address(self._machine.name, KAFKA_PORT)
        await participant.open()
        self._built.callback(self._tasks.cancel)
        self.front_end = FrontEnd(
            participant,
            self._host,
            self.metrics,
            connections_max=CONNECTIONS_MAX,
            draw_id=lambda: self._machine.random.randbytes(8).hex(),
            spawn=self._tasks.spawn,
            failed=self._machine.failed,
        )
        self._built.callback(self.front_end.close)
        self.front_end.server.bind(DEFAULT_NAME, address)
        await participant.join({DEFAULT_NAME: Endpoint(address.host, address.port)})
        await self.front_end.load_coordinators()
        self._tick()
        self._built.callback(lambda: self._ticker.cancel())

    def _tick(self) -> None:
        self._ticker = self._process.call_later(TICK_SECONDS, self._tick)
        self.front_end.tick()
        if self.metrics.protocol_errors:
            raise Violation(f"{self._machine.life}: a request failed in a way that nobody foresaw; its log says how")

    async def stop(self) -> None:
        await self.participant.leave()
        self._built.close()
        await self.participant.close()


Build = Callable[[Machine, Process, VirtualHost], Broker]


def builder(scenario: Scenario) -> Build:
    @cache
    def settings_of(broker: int) -> BrokerSettings:
        own = {"node.id": broker, "cluster.id": CLUSTER, "data": DATA, "log.layout": scenario.layouts[broker - 1]}
        return load(None, {}, {**scenario.settings, **own})

    def build(machine: Machine, process: Process, host: VirtualHost) -> Broker:
        settings = settings_of(machine.id)
        participant = Participant(
            machine.disk,
            process,
            host,
            lambda: machine.store.client(machine.name, process, machine.id),
            settings,
            DATA,
            draw=machine.random.randbytes,
            failed=machine.failed,
            listen=Address(machine.name, LINK_PORT),
            boot=machine.boot,
        )
        return Broker(participant, machine, process, host)

    return build


async def create_topics(participant: Participant, scenario: Scenario, offsets_partitions: int) -> None:
    for topic in scenario.topics:
        overrides = scenario.overrides(topic)
        await participant.topics.create(CreateTopic(topic.name, topic.partitions, REPLICAS, overrides))
    if offsets_partitions:
        offsets = CreateTopic(OFFSETS_TOPIC, offsets_partitions, REPLICAS, OFFSETS_TOPIC_OVERRIDES, internal=True)
        await participant.topics.create(offsets)
    if scenario.transactions is not None:
        await create_transactional_topics(participant, scenario.transactions)
    if scenario.shares is not None:
        await create_shared_topics(participant, scenario.shares)


async def create_shared_topics(participant: Participant, plan: SharePlan) -> None:
    """The group begins with the first record."""
    jobs = TRANSACTIONAL_OVERRIDES | plan.retention | (COMPACTION if plan.compacted else {})
    states = OFFSETS_TOPIC_OVERRIDES | (COMPACTION if plan.compacted_states else {})
    await participant.topics.create(CreateTopic(JOBS, plan.partitions, REPLICAS, jobs))
    await participant.topics.create(
        CreateTopic(SHARE_STATE_TOPIC, plan.state_partitions, REPLICAS, states, internal=True)
    )
    await participant.configs.alter_group(WORKERS, {"share.auto.offset.reset": "earliest"})


async def create_transactional_topics(participant: Participant, plan: TransactionPlan) -> None:
    compaction = COMPACTION | {"delete.retention.ms": "200"} if plan.compacted else {}
    unclean = {"unclean.leader.election.enable": "true"} if plan.unclean else {}
    ledger = TRANSACTIONAL_OVERRIDES | compaction | plan.retention | unclean
    topics = [
        CreateTopic(LEDGER, plan.partitions, REPLICAS, ledger),
        CreateTopic(TRANSACTIONS_TOPIC, plan.state_partitions, REPLICAS, OFFSETS_TOPIC_OVERRIDES, internal=True),
    ]
    if plan.copied_partitions:
        topics.append(CreateTopic(COPIED, plan.copied_partitions, REPLICAS, TRANSACTIONAL_OVERRIDES))
    for topic in topics:
        await participant.topics.create(topic)
