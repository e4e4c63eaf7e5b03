"""A broker's start or stop, repeated with an OSError at its first disk call, then at its second, and so on.

Where `storage.disk_walk` looks at a store, this looks at what a broker says of itself: `incarnation.json` calls a run
clean only when everything it had written is there, and names every log that may hold less.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster.participants import DATA, Cluster, Machine, run
from disk_calls import DiskCalls
from headrace.cluster.incarnation import read_incarnation
from headrace.errors import HeadraceError
from headrace.storage.log import TopicPartition

ENDINGS = KILLED, DARK, STOPPED = "killed", "dark", "stopped"
SAFE, LOOSE = "safe", "loose"
"""Topics: what is acknowledged of the first is synced; of the second only a clean stop makes anything last."""
COUNT = 4


class Broker:
    """One machine of a cluster of one."""

    def __init__(self, cluster: Cluster, layout: str) -> None:
        self.cluster = cluster
        self.machine: Machine = cluster[1]
        self.layout = layout
        self.acknowledged: dict[str, list[bytes | None]] = {SAFE: [], LOOSE: []}
        self.lost_log = False
        """Whether a log of the last run is offline."""

    async def fill(self) -> None:
        await self.start()
        await self.cluster.create(SAFE, replicas=1, durability="disk")
        await self.cluster.create(LOOSE, replicas=1, durability="memory")
        await self.produce()
        await asyncio.sleep(61)  # a checkpoint and watermarks are written
        await self.produce()

    async def produce(self) -> None:
        for _ in range(COUNT):
            for topic, values in self.acknowledged.items():
                value = b"%s %d" % (topic.encode(), len(values))
                await self.cluster.produce(value, topic=topic)
                values.append(value)

    # Operations.

    async def start(self) -> None:
        await self.machine.start(**{"log.layout": self.layout})
        await self.cluster.until(lambda: all(self.cluster.leader(topic) for topic in self.led()))

    def led(self) -> list[str]:
        return [topic for topic in self.acknowledged if topic in self.machine.participant.view.image.topics]

    async def start_with_less(self) -> None:
        """What a loss of power has taken is gone: this run answers for what it began with."""
        await self.start()
        self.machine.disk.trouble = None  # from here on it is only looked at
        self.acknowledged[LOOSE] = self.machine.held(LOOSE)

    async def stop(self) -> None:
        await self.machine.process.run(self.machine.participant.stop())

    async def lose_a_log(self) -> None:
        """A sync fails, and the log goes offline; that is kept for the next start."""
        place = f"{DATA}/@commitlog" if self.layout == "shared" else f"{DATA}/{SAFE}/{TopicPartition(SAFE, 0)}"
        logs = [name for name in self.machine.disk.list(place) if name.endswith(".log")]
        self.machine.disk.fail_sync(f"{place}/{max(logs)}")
        with contextlib.suppress(AssertionError):  # it is not acknowledged
            await self.cluster.produce(b"not synced", topic=SAFE, tries=1)
        self.lost_log = self.machine.replica(SAFE).log.offline is not None
        await asyncio.sleep(3)

    # What happens to it.

    async def nothing(self) -> None:
        return

    async def kill(self) -> None:
        self.machine.kill()

    async def lose_power(self) -> None:
        self.machine.lose_power()

    async def end(self, ending: str) -> None:
        """A process that could not start or stop closes what it has opened, and ends."""
        if ending == STOPPED:
            with contextlib.suppress(OSError, HeadraceError):
                await self.machine.process.run(self.machine.participant.close())
        if ending == DARK:
            self.machine.lose_power()
        else:
            self.machine.kill()
        self.cluster.failures.clear()

    async def check(self) -> None:
        """On a disk in health: what it says of itself before it starts, and what it then holds."""
        told = read_incarnation(self.machine.disk, DATA)
        is_clean = told is not None and told.clean
        was_its_own = told is not None and told.incarnation == self.machine.participant.incarnation
        assert not (is_clean and self.lost_log), "called clean, and a log was offline"
        await self.start()
        assert self.machine.participant.store.was_clean or not (is_clean and was_its_own), "clean, but for its store"
        for topic, values in self.acknowledged.items():
            found = self.machine.held(topic)
            if topic == SAFE or is_clean:
                assert found[: len(values)] == values, f"{topic}, clean: {is_clean}: {found}"
        self.machine.lose_power()
        await self.start()
        found = self.machine.held(SAFE)
        assert found[: len(self.acknowledged[SAFE])] == self.acknowledged[SAFE], f"after a loss of power: {found}"


Step = Callable[[Broker], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class BrokerOperation:
    prepare: Step
    operate: Step


class BrokerWalk:
    """One operation on one layout; `calls` are its disk calls by name, `errors` the failures that were tried."""

    def __init__(self, layout: str, operation: BrokerOperation) -> None:
        self._layout = layout
        self._operation = operation
        self.errors: Counter[str] = Counter()
        self.by_name: Counter[str] = Counter()
        run(1, self._count)
        self.calls = self.by_name.total()

    async def _broker(self, cluster: Cluster) -> Broker:
        broker = Broker(cluster, self._layout)
        await broker.fill()
        await self._operation.prepare(broker)
        return broker

    async def _count(self, cluster: Cluster) -> None:
        broker = await self._broker(cluster)
        broker.machine.disk.trouble = calls = DiskCalls()
        await self._operation.operate(broker)
        broker.machine.disk.trouble = None
        self.by_name = calls.by_name

    def fail(self, nth: int, number: int, ending: str, seed: int) -> None:
        """Fail the call of that number; then end as said."""
        calls = DiskCalls(nth, number)

        async def body(cluster: Cluster) -> None:
            broker = await self._broker(cluster)
            broker.machine.disk.trouble = calls
            with contextlib.suppress(OSError, HeadraceError):
                await self._operation.operate(broker)
            broker.machine.disk.trouble = None
            self.errors[errno.errorcode[number]] += 1
            await broker.end(ending)
            await broker.check()

        try:
            run(1, body, seed)
        except Exception as error:
            where = f"call {nth} of {self.calls}, {calls.failed}"
            raise AssertionError(f"{where}, {ending}, seed {seed}: {error!r}") from error
