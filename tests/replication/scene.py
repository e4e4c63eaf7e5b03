"""A few brokers in one process: real stores, partitions and links on a virtual clock, disk and network.

The test plays the controller: it elects, and it carries out the changes of the in-sync set that leaders want.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chosen_layout import new_store
from headrace.partitions.leader_core import IsrChange
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.ports.clock import Timer
from headrace.ports.network import Address
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.replication.replication import Replication, ReplicationSettings
from headrace.settings.values import LogSettings, log_settings
from headrace.storage.layouts import Store
from headrace.storage.log import TICK_SECONDS, Log, TopicPartition
from headrace.storage.watermarks import Watermarks
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from headrace.virtual.network import VirtualNetwork
from partitions.led import Deletion, Outcome, batch

DATA = "/data"
CLUSTER = "test"
TOPIC = "orders"


class BrokerClock:
    """The clock of one process: a dead one is never called again, a paused one later."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.dead = False
        self._paused: deque[Callable[[], None]] | None = None

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    def now(self) -> float:
        return self._clock.now()

    def call_later(self, delay_seconds: float, call: Callable[[], None]) -> Timer:
        return self._clock.call_later(delay_seconds, lambda: self._run(call))

    def call_soon(self, call: Callable[[], None]) -> None:
        self._clock.call_soon(lambda: self._run(call))

    def _run(self, call: Callable[[], None]) -> None:
        if self.dead:
            return
        if self._paused is not None:
            self._paused.append(call)
            return
        call()

    def pause(self) -> None:
        self._paused = deque()

    def resume(self) -> None:
        held, self._paused = self._paused or deque(), None
        for call in held:
            self.call_soon(call)


class Broker:
    """One process: everything between its disk and its network."""

    def __init__(self, scene: Scene, number: int, disk: VirtualDisk, incarnation: str) -> None:
        self.number = number
        self.incarnation = incarnation
        self.scene = scene
        self.disk = disk
        self.clock = BrokerClock(scene.clock)
        disk.serve(self.clock, scene.sync_seconds)
        self.store: Store = new_store(disk, self.clock, DATA, scene.layout)
        self.store.open({where: (topic_id, scene.settings) for where, topic_id in scene.topics.items()})
        self.watermarks = Watermarks(disk, self.clock, DATA, lambda: self.partitions.watermarks())
        self.partitions = Partitions(self.store, self.clock, number, incarnation, self.watermarks.read())
        self.watermarks.open()
        self.host = scene.network.host(f"b{number}", self.clock)
        self.replication = Replication(
            self.host, self.partitions, self.clock, number, incarnation, CLUSTER, scene.replication, disk
        )
        self.replication.on_change = lambda partition, change: scene.wanted(self, partition, change)
        self.address = self.replication.listen(Address(f"b{number}", 0))
        self._tick()

    def _tick(self) -> None:
        self.clock.call_later(TICK_SECONDS, self._tick)
        self.store.tick()
        self.watermarks.tick()
        self.replication.tick()

    def log(self, index: int = 0) -> Log:
        found = self.store.get(TopicPartition(TOPIC, index))
        assert found is not None
        return found

    def partition(self, index: int = 0) -> Partition:
        found = self.partitions.find_replica(TOPIC, index)
        assert found is not None
        return found

    def content(self, index: int = 0) -> bytes:
        """All that the log holds, as it lies there."""
        held = self.log(index)
        offset, found = held.start_offset, b""
        while offset < held.written_offset:
            read = held.read(offset, 1 << 30, held.written_offset, warm=True)
            piece = b"".join(part.file.pread(part.count, part.position) for part in read.slices)
            found += piece
            offset = max(header.next_offset for header, _ in batches(memoryview(piece)))
        return found

    def values(self, index: int = 0) -> list[bytes | None]:
        found = memoryview(self.content(index))
        return [record.value for _, view in batches(found) for record in kernel.records(view)]


@dataclass
class Key:
    """A partition's key in coordination."""

    leader: int
    epoch: int
    isr: dict[int, str]
    revision: int = 1


@dataclass
class Scene:
    brokers: Sequence[int] = (1, 2, 3)
    partitions: int = 1
    layout: str = ""
    """That of the run, unless it is given."""
    seed: int | None = None
    topic: dict[str, object] = field(default_factory=dict)
    replication: ReplicationSettings = field(default_factory=ReplicationSettings)
    delay_seconds: tuple[float, float] = (0.0001, 0.001)
    sync_seconds: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.network = VirtualNetwork(self.clock, self.seed, self.delay_seconds)
        given = {"min.insync.replicas": 1, **{name.replace("_", "."): value for name, value in self.topic.items()}}
        self.settings: LogSettings = log_settings({}, {name: str(value) for name, value in given.items()})
        self.topics = {TopicPartition(TOPIC, index): bytes([index] * 16) for index in range(self.partitions)}
        self.disks: dict[int, VirtualDisk] = {}
        self.alive: dict[int, Broker] = {}
        self.keys: dict[int, Key] = {}
        self.changes: list[IsrChange] = []
        self.held: list[tuple[Broker, Partition, IsrChange]] | None = None
        """While it is a list, changes of the set are written but not answered."""
        self._starts = 0
        for number in self.brokers:
            self.disks[number] = VirtualDisk(self.clock)
            self.disks[number].make_folder(DATA)
            self.disks[number].sync_folder("/")
            self.start(number)

    # Processes.

    def start(self, number: int) -> Broker:
        self._starts += 1
        self.alive[number] = Broker(self, number, self.disks[number], f"run-{self._starts}")
        self._tell_peers()
        return self.alive[number]

    def kill(self, number: int, *, power: int | None = None, silent: bool = False) -> None:
        """End the process; with a seed for `power` its machine too, and what was not synced may be lost."""
        broker = self.alive.pop(number)
        broker.clock.dead = True
        self.network.vanish(broker.host, silent=silent)
        if power is None:
            self.disks[number].release()
        else:
            self.disks[number].crash(power)

    def _tell_peers(self) -> None:
        for broker in self.alive.values():
            broker.replication.peers(
                {
                    other.number: (other.address, other.incarnation)
                    for other in self.alive.values()
                    if other is not broker
                }
            )

    def run(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def until(self, what: str, is_true: Callable[[], object], seconds: float = 30.0) -> None:
        end = self.clock.now() + seconds
        while not is_true():
            assert self.clock.now() < end, f"{what} did not come about within {seconds} s"
            self.clock.advance(0.005)

    # The controller.

    def elect(self, leader: int, isr: Sequence[int], index: int = 0, epoch: int | None = None) -> Partition:
        """A new epoch, told to all brokers that are alive."""
        before = self.keys.get(index)
        if epoch is None:
            epoch = 0 if before is None else before.epoch + 1
        runs = {number: self.alive[number].incarnation for number in isr}
        self.keys[index] = Key(leader, epoch, runs, 1 if before is None else before.revision + 1)
        for number in (leader, *(number for number in self.alive if number != leader)):
            self.tell(number, index)
        return self.alive[leader].partition(index)

    def tell(self, number: int, index: int = 0) -> None:
        """One broker hears what its role is."""
        key, broker = self.keys[index], self.alive[number]
        if key.leader == number and key.isr.get(number) == broker.incarnation:
            broker.partitions.lead(broker.log(index), key.epoch, key.isr, self.brokers, key.revision)
        else:
            partition = broker.partitions.follow(broker.log(index), key.epoch, key.leader)
            broker.replication.follow(partition, key.leader, key.epoch)

    def wanted(self, broker: Broker, partition: Partition, change: IsrChange) -> None:
        """Compare and swap, answered at once unless answers are held back."""
        index = partition.topic_partition.partition
        key = self.keys[index]
        self.changes.append(change)
        core = partition.core
        assert core is not None
        registered = {number: each.incarnation for number, each in self.alive.items()}
        made = core.revision == key.revision and all(registered.get(n) == change.isr[n] for n in change.added)
        if made:
            key.isr, key.revision = dict(change.isr), key.revision + 1
        if self.held is not None:
            self.held.append((broker, partition, change))
        else:
            broker.clock.call_soon(lambda: self._answer(broker, partition, made))

    def _answer(self, broker: Broker, partition: Partition, made: bool) -> None:
        key = self.keys[partition.topic_partition.partition]
        if made:
            broker.partitions.confirmed(partition, key.isr, key.revision)
        else:
            broker.partitions.refused(partition)

    def release_answers(self) -> None:
        held, self.held = self.held or [], None
        for broker, partition, _ in held:
            key = self.keys[partition.topic_partition.partition]
            broker.partitions.confirmed(partition, key.isr, key.revision)

    def until_copying(self, index: int = 0) -> None:
        """All followers that are alive have told the leader a position."""
        core = self.alive[self.keys[index].leader].partition(index).core
        assert core is not None
        self.until(
            "subscriptions", lambda: sum(each.written >= 0 for each in core.followers.values()) == len(self.alive) - 1
        )

    # Producing and comparing.

    def until_answered(self, *outcomes: Outcome, seconds: float = 30.0) -> None:
        self.until("answers", lambda: not any(outcome.waiting for outcome in outcomes), seconds)

    def produce(
        self,
        *values: bytes,
        to: int | None = None,
        index: int = 0,
        acks: int = -1,
        timeout_ms: int = 30_000,
        producer: tuple[int, int, int] = (-1, -1, -1),
    ) -> Outcome:
        """One batch to the leader, or to a broker that thinks it is."""
        broker = self.alive[self.keys[index].leader if to is None else to]
        outcome = Outcome()
        made = batch(*values, producer=producer)
        broker.partitions.submit(broker.partition(index), made, acks, timeout_ms, outcome)
        broker.partitions.end_turn()
        return outcome

    def delete_before(self, offset: int, to: int | None = None, index: int = 0) -> Deletion:
        """As DeleteRecords asks for it."""
        broker = self.alive[self.keys[index].leader if to is None else to]
        deletion = Deletion()
        broker.partitions.delete_before(broker.partition(index), offset, deletion)
        return deletion

    def starts(self, index: int = 0) -> dict[int, int]:
        return {number: broker.log(index).start_offset for number, broker in self.alive.items()}

    def all_equal(self, *brokers: int, index: int = 0) -> bool:
        logs = [self.alive[number].log(index) for number in brokers or tuple(self.alive)]
        return len({(held.start_offset, held.end_offset, held.last_epoch()) for held in logs}) == 1 and all(
            self.alive[number].partition(index).high_watermark == logs[0].end_offset for number in brokers or self.alive
        )

    def settle(self, *brokers: int, index: int = 0) -> bytes:
        """Let all replicas become one; answers what they hold, byte for byte the same."""
        self.until("equal replicas", lambda: self.all_equal(*brokers, index=index))
        found = {self.alive[number].content(index) for number in brokers or self.alive}
        assert len(found) == 1, "replicas differ"
        return found.pop()
