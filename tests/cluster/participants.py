"""Several participants in one test process, on virtual time: each has its own disk, clock and host."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from headrace.cluster.image import Image, PartitionState
from headrace.cluster.orders import Refusals, plan_moves
from headrace.cluster.participant import Participant
from headrace.cluster.topics import CreateTopic
from headrace.errors import HeadraceError
from headrace.partitions.partition import Partition
from headrace.ports.network import Address
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.records.record import NewRecord
from headrace.settings.values import load
from headrace.virtual.coordination import CoordinationStore
from headrace.virtual.disk import VirtualDisk
from headrace.virtual.loop import VirtualLoop
from headrace.virtual.network import VirtualHost, VirtualNetwork
from headrace.virtual.process import Process

DATA = "/data"
DEADLINE_SECONDS = 60.0


class Machine:
    """A broker's disk, and the process that runs on it."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.host = f"host{number}"
        self.disk = VirtualDisk(cluster.loop.clock)
        self.disk.make_folder(DATA)
        self.disk.sync_folder("/")
        self.boot = f"boot-{number}-0"
        self.boots = 0
        self.process: Process
        self.network: VirtualHost
        self.participant: Participant

    async def start(self, **settings: object) -> None:
        participant = self.make(**settings)
        await self.process.run(participant.start())

    def make(self, **settings: object) -> Participant:
        """A new process on the disk; nothing of it runs yet."""
        cluster = self.cluster
        self.process = Process(cluster.loop, self.host)
        cluster.processes.append(self.process)
        self.disk.serve(self.process)
        self.network = cluster.network.host(self.host, self.process)
        flags = {"node.id": self.number, "broker.lease.ms": 3000, "replica.lag.time.max.ms": 2000, **settings}
        self.participant = Participant(
            self.disk,
            self.process,
            self.network,
            lambda: cluster.store.client(self.host, self.process),
            load(environment={}, flags=flags),
            DATA,
            draw=lambda count: cluster.random.randbytes(count),
            failed=cluster.failures.append,
            listen=Address(self.host, 0),
            boot=self.boot,
        )
        return self.participant

    def kill(self) -> None:
        """kill -9: what is in the page cache stays."""
        self.process.die()
        self.cluster.network.vanish(self.network, silent=False)
        self.disk.release()

    def lose_power(self) -> None:
        self.process.die()
        self.cluster.network.vanish(self.network, silent=True)
        self.boots += 1
        self.boot = f"boot-{self.number}-{self.boots}"
        self.disk.crash(self.cluster.random.randrange(1 << 30))

    async def stop(self) -> None:
        await self.process.run(self.participant.stop())
        self.process.die()
        self.cluster.network.vanish(self.network, silent=False)
        self.disk.release()

    def replica(self, topic: str = "t", index: int = 0) -> Partition:
        found = self.participant.partitions.find_replica(topic, index)
        assert found is not None
        return found

    def held(self, topic: str = "t", index: int = 0) -> list[bytes | None]:
        """The values in its log, whether committed or not."""
        log = self.replica(topic, index).log
        return [
            record.value
            for _, piece in log.headers(log.start_offset)
            for _, view in batches(memoryview(piece.file.pread(piece.count, piece.position)))
            for record in kernel.records(view)
        ]


class Cluster:
    def __init__(self, loop: VirtualLoop, count: int, seed: int = 1) -> None:
        self.loop = loop
        self.random = random.Random(seed)
        self.network = VirtualNetwork(loop.clock, seed)
        self.store = CoordinationStore(loop.clock, seed)
        self.failures: list[BaseException] = []
        self.processes: list[Process] = []
        self.machines = {number: Machine(self, number) for number in range(1, count + 1)}

    def __getitem__(self, number: int) -> Machine:
        return self.machines[number]

    def isolate(self, machine: Machine, *, and_lose: bool = False) -> None:
        """Cut it off from all other brokers; `and_lose` what is on its way."""
        for other in self.machines.values():
            if other is not machine:
                self.network.cut(machine.host, other.host)
                if and_lose:
                    self.network.reset(machine.host, other.host)

    def rejoin(self, machine: Machine) -> None:
        for other in self.machines.values():
            if other is not machine:
                self.network.heal(machine.host, other.host)

    def image(self) -> Image:
        """As the broker that has seen most sees it."""
        return max((each.participant.view.image for each in self.alive()), key=lambda image: image.revision)

    def alive(self) -> list[Machine]:
        return [each for each in self.machines.values() if hasattr(each, "process") and not each.process.dead]

    def state(self, topic: str = "t", index: int = 0) -> PartitionState:
        found = self.image().partition(topic, index)
        assert found is not None
        return found

    async def until(self, holds: Callable[[], bool], seconds: float = DEADLINE_SECONDS) -> None:
        end = self.loop.time() + seconds
        while not holds():
            assert self.loop.time() < end, f"not within {seconds} s: {self.image().topics} {self.failures}"
            await asyncio.sleep(0.02)

    async def create(self, name: str = "t", partitions: int = 1, replicas: int = 3, **overrides: object) -> None:
        given = {key.replace("_", "."): str(value) for key, value in overrides.items()}
        machine = self.alive()[0]
        request = CreateTopic(name, partitions, replicas, given)
        await self.until(lambda: len(machine.participant.view.image.brokers) >= replicas)
        await machine.process.run(machine.participant.topics.create(request))
        await self.until(lambda: all(name in each.participant.view.image.topics for each in self.alive()))
        await self.until(lambda: self.leader(name) is not None)

    def order_move(self, target: Sequence[int] | None) -> None:
        """Of partition 0, as an operator does whom nothing keeps from coordination; None ends the move."""
        refusals: Refusals = {}
        plan = plan_moves(self.image(), {("t", 0): target}, keep_count=False, refusals=refusals)
        assert not refusals
        for step in plan.steps:
            assert self.store.transact(step.compares, step.actions).succeeded

    def leader(self, topic: str = "t", index: int = 0) -> Machine | None:
        for machine in self.alive():
            partition = machine.participant.partitions.find(topic, index)
            if partition is not None and partition.epoch == self.state(topic, index).leader_epoch:
                return machine
        return None

    async def produce(self, *values: bytes, topic: str = "t", acks: int = -1, tries: int = 100) -> int:
        """Append until it is acknowledged; answers the offset."""
        for _ in range(tries):
            machine = self.leader(topic)
            if machine is not None:
                answered: asyncio.Future[tuple[HeadraceError | None, int]] = self.loop.create_future()
                machine.process.context.run(self._submit, machine, topic, values, acks, answered)
                error, offset = await answered
                if error is None:
                    return offset
            await asyncio.sleep(0.1)
        raise AssertionError(f"not acknowledged in {tries} tries: {self.state(topic)}")

    def _submit(
        self,
        machine: Machine,
        topic: str,
        values: tuple[bytes, ...],
        acks: int,
        answered: asyncio.Future[tuple[HeadraceError | None, int]],
    ) -> None:
        records: list[NewRecord] = [(machine.process.wall_ms(), None, value, []) for value in values]

        def done(error: HeadraceError | None, offset: int) -> None:
            if not answered.done():
                answered.set_result((error, offset))

        partitions = machine.participant.partitions
        partitions.submit(partitions.get(topic, 0), kernel.build(records), acks, 1000, done)
        partitions.end_turn()
        # A process that dies does not answer.
        self.loop.call_later(2.0, lambda: done(HeadraceError("no answer"), -1))


def run(count: int, body: Callable[[Cluster], Coroutine[Any, Any, None]], seed: int = 1) -> None:
    loop = VirtualLoop(seed=seed)
    cluster = Cluster(loop, count, seed)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(body(cluster))
        assert cluster.failures == []
    finally:
        for process in cluster.processes:
            process.die()
            process.bury()
        asyncio.set_event_loop(None)
        loop.close()
