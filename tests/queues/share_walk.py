"""A share group's course on one broker, repeated with an OSError at its first disk call, then at its second, and so on.

The broker's disk has the log of the data, and that of the states of share partitions with its coordinator. Judged by
what members and producers are told: what was accepted is not delivered again, and all else is, wherever the disk has
failed and however the broker has ended.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from chosen_layout import new_store
from disk_calls import DiskCalls
from headrace.cluster.image import Broker, Endpoint, Image, PartitionState, Topic
from headrace.cluster.names import SHARE_STATE_TOPIC
from headrace.coordinators.state_log import StateLog
from headrace.coordinators.state_partitions import StatePartitions
from headrace.errors import ErrorCode, HeadraceError
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.queues.messages import (
    AcknowledgementBatch,
    AcknowledgeType,
    Acquired,
    AcquireRequest,
    ShareGroupConfig,
    SharePartitionKey,
    TopicIdPartition,
)
from headrace.queues.persister import StatePersister
from headrace.queues.share_coordinator import SHARE_STATES, ShareCoordinator
from headrace.queues.share_partitions import SharePartitions
from headrace.settings.values import LogSettings
from headrace.storage.log import TICK_SECONDS, Phase, TopicPartition
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from partitions.led import Outcome, batch, topic_id
from queues.scene import GROUP, values
from replication.scene import BrokerClock
from storage.harness import settings

BROKER, DATA = 1, "/data"
ORDERS, STATES = TopicPartition("orders", 0), TopicPartition(SHARE_STATE_TOPIC, 0)
KEY = SharePartitionKey(GROUP, topic_id("orders"), 0)
PLACE: TopicIdPartition = KEY.topic_id, 0
SMALL = {"durability": "disk", "segment_bytes": 1024, "index_interval_bytes": 150, "file_delete_delay_ms": 0}
LOGS: dict[TopicPartition, tuple[bytes, LogSettings]] = {
    ORDERS: (topic_id("orders"), settings(**SMALL)),
    STATES: (
        topic_id(SHARE_STATE_TOPIC),
        settings(**SMALL, cleanup_policy="compact", min_cleanable_dirty_ratio=0.0, max_message_bytes=32 << 20),
    ),
}
LOCK_MS = 5000
CONFIG = ShareGroupConfig(auto_offset_reset="earliest", lock_ms=LOCK_MS, lock_max_ms=LOCK_MS, delivery_count_limit=1000)
ENDINGS = GOES_ON, KILLED, DARK, STOPPED = "goes on", "killed", "dark", "stopped"
MEMBERS = ("a", "b", "c")


class Member:
    """Fetches, and waits as the front end does for `wait` seconds."""

    def __init__(self, world: World, name: str) -> None:
        self.answered = False
        self._world = world
        self._name = name

    def fetch(self, most: int) -> None:
        self._request = AcquireRequest(GROUP, self._name, most, 1 << 20, 1 << 20, record_limit=True)
        self.records_available()

    def records_available(self) -> None:
        if not self.answered:
            self._world.shares.acquire(self._request, [PLACE], self._acquired)

    def _acquired(self, found: dict[TopicIdPartition, Acquired]) -> None:
        if found:
            self.answered = True
            self._world.delivered(self._name, found[PLACE])
        elif not self.answered:
            self._world.shares.wait(GROUP, [PLACE], self)


class World:
    def __init__(self, layout: str, logs: Mapping[TopicPartition, tuple[bytes, LogSettings]] | None = None) -> None:
        self.layout = layout
        self.logs = logs or LOGS
        self.clock = VirtualClock()
        self.disk = VirtualDisk(self.clock)
        self.disk.make_folder(DATA)
        self.disk.sync_folder("/")
        self.epoch = 0
        self.is_made = False
        self._drawn = 0
        self.written: set[int] = set()
        """Offsets that a producer was told."""
        self.held: dict[int, str] = {}
        """What members have and have not acknowledged."""
        self.accepted: set[int] = set()
        self.unsure: set[int] = set()
        """Accepted, and answered with an error: that may have been taken, or not."""
        self.deliveries: Counter[int] = Counter()

    # The broker.

    def start(self) -> None:
        self.epoch += 1
        clock = self.process = BrokerClock(self.clock)
        store = self.store = new_store(self.disk, clock, DATA, self.layout)
        store.open(self.logs if self.is_made else {})
        if not self.is_made:
            self.is_made = True
            for where, (given_id, chosen) in self.logs.items():
                store.create(where, given_id, chosen)
        partitions = self.partitions = Partitions(store, clock, BROKER)
        for where in self.logs:
            log = store.get(where)
            assert log is not None
            partitions.lead(log, self.epoch, {BROKER: ""})
        topics = {
            where.topic: Topic(where.topic, self.logs[where][0], (PartitionState(0, BROKER, self.epoch, (1,), (1,)),))
            for where in self.logs
        }
        brokers = {BROKER: Broker(BROKER, {"default": Endpoint("h", 1)}, "", 0)}
        image = Image("/headrace/c/", brokers=brokers, topics=topics)
        coordinator = ShareCoordinator(
            clock, StateLog(partitions, SHARE_STATE_TOPIC).append, 1, lambda _topic_id, _partition: True
        )
        states = StatePartitions(SHARE_STATES, partitions, coordinator, self.disk, lambda: image)
        self.persister = StatePersister(
            clock, partitions, lambda: image, coordinator, _unreachable, lambda done: done(), self._draw
        )
        self.shares = SharePartitions(partitions, self.disk, self.persister, lambda _group: CONFIG)

        def tick() -> None:
            if store.phase is Phase.OPEN:
                store.tick()
                states.follow()
                clock.call_later(TICK_SECONDS, tick)

        tick()
        self.settle(1)

    def _draw(self, count: int) -> bytes:
        self._drawn += 2
        return self._drawn.to_bytes(count, "big")

    def settle(self, seconds: float = 0.5) -> None:
        self.clock.run_soon()
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)

    @property
    def partition(self) -> Partition:
        found = self.partitions.find(ORDERS.topic, 0)
        assert found is not None
        return found

    def kill(self) -> None:
        self.disk.trouble = None
        self.process.dead = True
        self.store.abandon()
        self.disk.release()

    # What is done.

    def fill(self) -> None:
        self.start()
        codes: list[int] = []
        self.persister.initialize(KEY, 0, -1, codes.append)
        self.settle()
        assert codes == [ErrorCode.NONE]
        for _ in range(3):
            self.produce(4)
        self.consume("a", 5)
        assert self.deliveries.total() == 5

    def produce(self, records: int) -> None:
        outcome = Outcome()
        first = self.partition.log.end_offset
        made = batch(*[b"%d" % (first + each) for each in range(records)])
        self.partitions.submit(self.partition, made, -1, 1000, outcome)
        self.partitions.end_turn()
        self.settle()
        if outcome.calls and outcome.calls[0][0] is None:
            self.written.update(range(outcome.offset, outcome.offset + records))

    def consume(self, member: str, most: int) -> None:
        """Accept the first, release the last, and keep what lies between."""
        fetching = Member(self, member)
        fetching.fetch(most)
        self.settle()
        fetching.answered = True
        mine = sorted(at for at, owner in self.held.items() if owner == member)
        if mine:
            self.say(member, mine[0], AcknowledgeType.ACCEPT)
            if len(mine) > 1:
                self.say(member, mine[-1], AcknowledgeType.RELEASE)
        self.settle()

    def say(self, member: str, offset: int, how: AcknowledgeType) -> None:
        del self.held[offset]

        def heard(codes: dict[TopicIdPartition, int]) -> None:
            if how is AcknowledgeType.ACCEPT and codes[PLACE] == ErrorCode.NONE:
                self.accepted.add(offset)
                self.unsure.discard(offset)

        if how is AcknowledgeType.ACCEPT:
            self.unsure.add(offset)
        said = {PLACE: [AcknowledgementBatch(offset, offset, (int(how),))]}
        self.shares.acknowledge(GROUP, member, said, heard)

    def delivered(self, member: str, acquired: Acquired) -> None:
        if acquired.error_code != ErrorCode.NONE:
            return
        for offset, value in self.values(acquired).items():
            assert value == b"%d" % offset
            assert offset not in self.accepted, f"{offset} was accepted, and is delivered again"
            self.deliveries[offset] += 1
            self.held[offset] = member

    def values(self, acquired: Acquired) -> dict[int, bytes | None]:
        """Sent in a turn of its own: then a disk that fails costs the connection, and with it the delivery."""
        try:
            return values(acquired)
        except OSError:
            return {}

    # Operations.

    def deliver(self) -> None:
        self.produce(2)
        for member in MEMBERS:
            self.consume(member, 3)
        self.settle(6)
        self.consume("b", 6)

    def deliver_cold(self) -> None:
        for folder in [f"{DATA}/@commitlog", *(f"{DATA}/{where.topic}/{where}" for where in self.logs)]:
            if self.disk.exists(folder):
                for name in self.disk.list(folder):
                    self.disk.evict(f"{folder}/{name}")
        self.deliver()

    def retire(self) -> None:
        self.partitions.delete_before(self.partition, 4)
        self.settle(2)
        self.consume("b", 6)

    def compact(self) -> None:
        for _ in range(12):
            self.consume("a", 2)
            self.consume("b", 2)
        self.settle(40)
        self.consume("c", 2)

    def load(self) -> None:
        self.start()
        self.consume("b", 6)

    # What comes of it.

    def check(self) -> None:
        """On a disk in health: all that was written and not accepted comes, and nothing that was."""
        self.settle(2 * LOCK_MS / 1000)
        self.held.clear()
        unsure, self.unsure = self.unsure, set()
        for _ in range(100):
            fetching = Member(self, "judge")
            fetching.fetch(50)
            self.settle()
            fetching.answered = True
            if not self.held:
                break
            for offset in list(self.held):
                self.say("judge", offset, AcknowledgeType.ACCEPT)
            self.settle()
        lost = self.written - self.accepted - unsure
        lost = {at for at in lost if at >= self.partition.log.start_offset}
        assert not lost, f"{sorted(lost)} are not delivered, or cannot be accepted"


def _unreachable(*_given: object, **_more: object) -> None:
    raise AssertionError("there is no other broker")


@dataclass(frozen=True, slots=True)
class ShareOperation:
    prepare: Callable[[World], None]
    operate: Callable[[World], None]


OPERATIONS = {
    "deliver": ShareOperation(lambda _: None, World.deliver),
    "deliver cold": ShareOperation(lambda _: None, World.deliver_cold),
    "compact": ShareOperation(lambda _: None, World.compact),
    "retire": ShareOperation(World.deliver, World.retire),
    "load": ShareOperation(World.kill, World.load),
}


class ShareWalk:
    """One operation on one layout; `calls` are its disk calls by name, `errors` the failures that were tried."""

    def __init__(self, layout: str, operation: ShareOperation) -> None:
        self._layout = layout
        self._operation = operation
        self.errors: Counter[str] = Counter()
        world = self._world()
        world.disk.trouble = calls = DiskCalls()
        operation.operate(world)
        world.disk.trouble = None
        world.check()
        self.by_name = calls.by_name
        self.calls = self.by_name.total()

    def _world(self) -> World:
        world = World(self._layout)
        world.fill()
        self._operation.prepare(world)
        return world

    def fail(self, nth: int, number: int, ending: str, seed: int) -> None:
        """Fail the call of that number; then end as said."""
        world = self._world()
        world.disk.trouble = calls = DiskCalls(nth, number)
        try:
            with suppress(OSError, HeadraceError):
                self._operation.operate(world)
            world.disk.trouble = None
            self.errors[errno.errorcode[number]] += 1
            self._end(world, ending, seed)
            world.check()
        except Exception as error:
            where = f"call {nth} of {self.calls}, {calls.failed}"
            raise AssertionError(f"{where}, {ending}, seed {seed}: {error!r}") from error

    def _end(self, world: World, ending: str, seed: int) -> None:
        is_fit = world.store.phase is Phase.OPEN and all(log.offline is None for log in world.store.logs())
        if ending == GOES_ON and is_fit:
            return
        if ending == STOPPED and world.store.phase is Phase.OPEN:
            world.shares.close()
            world.store.close()
        world.kill()
        if ending == DARK:
            world.disk.crash(seed)
        world.start()
