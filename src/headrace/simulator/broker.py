"""The real broker on the ports of a simulated machine, and the topics of a scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from headrace.cluster.participant import Participant
from headrace.cluster.topics import CreateTopic
from headrace.ports.network import Address
from headrace.settings import load
from headrace.sim.network import MemoryHost
from headrace.sim.process import Process
from headrace.simulator.machine import DATA, Machine
from headrace.simulator.scenario import BROKERS, Scenario, SimTopic

CLUSTER: Final = "sim"
LINK_PORT: Final = 9192

Build = Callable[[Machine, Process, MemoryHost], Participant]


def builder(scenario: Scenario) -> Build:
    def build(machine: Machine, process: Process, host: MemoryHost) -> Participant:
        settings = load(
            None,
            {},
            {
                **scenario.settings,
                "node.id": machine.id,
                "cluster.id": CLUSTER,
                "data": DATA,
                "log.layout": scenario.layouts[machine.id - 1],
            },
        )
        return Participant(
            machine.disk,
            process,
            host,
            lambda: machine.store.client(machine.name, process),
            settings,
            DATA,
            draw=machine.random.randbytes,
            failed=machine.failed,
            listen=Address(machine.name, LINK_PORT),
            boot=machine.boot,
        )

    return build


async def create_topics(participant: Participant, topics: Sequence[SimTopic]) -> None:
    for topic in topics:
        await participant.topics.create(CreateTopic(topic.name, topic.partitions, BROKERS, topic.overrides))
