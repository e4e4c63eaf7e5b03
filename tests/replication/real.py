"""Brokers in one process on real sockets and files: what the fakes stand in for elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

from chosen_layout import new_store
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.ports.network import Address
from headrace.replication.replication import LinkTls, Replication, ReplicationSettings
from headrace.settings.values import log_settings
from headrace.storage.layouts import Store
from headrace.storage.log import TICK_SECONDS, Log, TopicPartition
from headrace.system.clock import LoopClock
from headrace.system.disk import SystemDisk
from headrace.system.network import SocketNetwork
from partitions.led import Outcome

LOCAL = Address("127.0.0.1", 0)
DEADLINE_SECONDS = 120.0


class RealBroker:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        folder: Path,
        number: int,
        layout: str = "",
        settings: ReplicationSettings | None = None,
        tls: LinkTls | None = None,
    ) -> None:
        self.number = number
        self.incarnation = f"run-{number}"
        self._loop = loop
        self.clock = LoopClock(loop)
        self.disk = SystemDisk(loop)
        data = folder / f"b{number}"
        data.mkdir()
        self.store: Store = new_store(self.disk, self.clock, str(data), layout)
        self.store.open({})
        self.partitions = Partitions(self.store, self.clock, number, self.incarnation)
        self.replication = Replication(
            SocketNetwork(loop), self.partitions, self.clock, number, self.incarnation, "real",
            settings or ReplicationSettings(), self.disk, tls,
        )  # fmt: skip
        self.address = self.replication.listen(LOCAL)
        self._tick()

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        self.store.tick()
        self.replication.tick()

    def create(self, index: int, **overrides: object) -> Log:
        given = {name.replace("_", "."): str(value) for name, value in overrides.items()}
        return self.store.create(TopicPartition("orders", index), bytes([index] * 16), log_settings({}, given))

    def partition(self, index: int = 0) -> Partition:
        found = self.partitions.find_replica("orders", index)
        assert found is not None
        return found

    def produce(self, batch: bytearray, index: int = 0, acks: int = -1) -> Outcome:
        outcome = Outcome()
        self.partitions.submit(self.partition(index), batch, acks, 60_000, outcome)
        return outcome

    def close(self) -> None:
        self._ticker.cancel()
        self.replication.close()
        self.store.close()
        self.disk.close()


class RealGroup:
    """The first broker leads every partition, the others follow."""

    def __init__(
        self,
        folder: Path,
        brokers: int = 3,
        partitions: int = 1,
        layout: str = "",
        settings: ReplicationSettings | None = None,
        tls: LinkTls | None = None,
        **overrides: object,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.brokers = [RealBroker(loop, folder, number + 1, layout, settings, tls) for number in range(brokers)]
        self.leader = self.brokers[0]
        isr = {broker.number: broker.incarnation for broker in self.brokers}
        addresses = {broker.number: (broker.address, broker.incarnation) for broker in self.brokers}
        for broker in self.brokers:
            broker.replication.peers(addresses)
            for index in range(partitions):
                log = broker.create(index, **overrides)
                if broker is self.leader:
                    broker.partitions.lead(log, 0, isr, tuple(isr))
                else:
                    broker.replication.follow(broker.partitions.follow(log, 0, 1), 1, 0)

    async def until(self, what: str, is_true: object) -> None:
        assert callable(is_true)
        end = asyncio.get_running_loop().time() + DEADLINE_SECONDS
        while not is_true():
            assert asyncio.get_running_loop().time() < end, f"{what} did not come about"
            await asyncio.sleep(0.001)

    def close(self) -> None:
        for broker in self.brokers:
            broker.close()
