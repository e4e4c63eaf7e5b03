"""Share partitions on a virtual clock and a real store in memory, beside one who keeps their state and can be slow,
fail, lose answers and fence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.errors import ErrorCode
from headrace.partitions.partition import Partition
from headrace.queues.messages import (
    NO_OFFSET,
    AcknowledgementBatch,
    AcknowledgeType,
    Acquired,
    AcquireRequest,
    CodeHeard,
    ReadDone,
    ShareGroupConfig,
    SharePartitionKey,
    ShareState,
    StateBatch,
    SummaryDone,
    TopicIdPartition,
)
from headrace.queues.share_partitions import SharePartitions
from headrace.records import kernel
from headrace.records.batch import batches
from partitions.led import BROKER, Led
from queues.naive_share_partition import NaiveKeeper

GROUP = "workers"
ACCEPT = (int(AcknowledgeType.ACCEPT),)
RELEASE = (int(AcknowledgeType.RELEASE),)


@dataclass
class Kept:
    state_epoch: int = 0
    leader_epoch: int = 0
    written_in: int = 0
    """The leader epoch of the last write."""
    load: int = 0
    keeper: NaiveKeeper = field(default_factory=lambda: NaiveKeeper(NO_OFFSET))

    def state(self) -> ShareState:
        offsets = sorted(self.keeper.offsets.items())
        each = [StateBatch(at, at, one.state, one.count, one.member, one.until_ms, one.letter) for at, one in offsets]
        return ShareState(self.state_epoch, self.written_in, self.keeper.start, tuple(each))


class FakePersister:
    """Answers at once, or with `held` when told; `faults` are codes for what is asked next, by kind."""

    def __init__(self) -> None:
        self.kept: dict[SharePartitionKey, Kept] = {}
        self.held = False
        self.on_the_way: list[Callable[[], None]] = []
        self.faults: list[tuple[str, int]] = []
        self.lost_answers = 0
        """So many writes to come are kept, and answered with an error."""
        self.writes: list[ShareState] = []
        self.reads = 0

    def read(self, key: SharePartitionKey, leader_epoch: int, done: ReadDone) -> None:
        self._do(lambda: self._read(key, leader_epoch, done))

    def write(self, key: SharePartitionKey, state: ShareState, done: CodeHeard) -> None:
        load = self.kept[key].load
        self._do(lambda: self._write(key, state, load, done))

    def initialize(self, key: SharePartitionKey, state_epoch: int, start_offset: int, done: CodeHeard) -> None:
        self.kept[key] = Kept(state_epoch, keeper=NaiveKeeper(start_offset))
        done(ErrorCode.NONE)

    def delete(self, key: SharePartitionKey, done: CodeHeard) -> None:
        self.kept.pop(key, None)
        done(ErrorCode.NONE)

    def summary(self, key: SharePartitionKey, leader_epoch: int, done: SummaryDone) -> None:
        raise NotImplementedError

    def _do(self, call: Callable[[], None]) -> None:
        self.on_the_way.append(call)
        if not self.held:
            self.answer()

    def answer(self, count: int = 1000) -> None:
        while count and self.on_the_way:
            count -= 1
            self.on_the_way.pop(0)()

    def _fault(self, kind: str) -> int:
        if self.faults and self.faults[0][0] == kind:
            return self.faults.pop(0)[1]
        return ErrorCode.NONE

    def _read(self, key: SharePartitionKey, leader_epoch: int, done: ReadDone) -> None:
        self.reads += 1
        kept = self.kept.setdefault(key, Kept())
        code = self._fault("read")
        if leader_epoch < kept.leader_epoch:
            code = ErrorCode.FENCED_LEADER_EPOCH
        if code != ErrorCode.NONE:
            done(code, None)
            return
        kept.leader_epoch = leader_epoch
        kept.load += 1
        done(code, kept.state())

    def _write(self, key: SharePartitionKey, state: ShareState, load: int, done: CodeHeard) -> None:
        kept, code = self.kept[key], self._fault("write")
        if state.leader_epoch < kept.leader_epoch or load < kept.load:
            code = ErrorCode.FENCED_LEADER_EPOCH
        elif state.state_epoch < kept.state_epoch:
            code = ErrorCode.FENCED_STATE_EPOCH
        if code == ErrorCode.NONE:
            self.writes.append(state)
            kept.keeper.keep(state)
            kept.written_in = state.leader_epoch
            if self.lost_answers:
                self.lost_answers -= 1
                code = ErrorCode.COORDINATOR_NOT_AVAILABLE
        done(code)


class Fetch:
    """One share fetch as the front end makes it: acquires, or waits and acquires again."""

    def __init__(self, scene: Scene, request: AcquireRequest, places: Sequence[TopicIdPartition]) -> None:
        self.answered = False
        self.heard = 0
        self.on_reply: Callable[[dict[TopicIdPartition, Acquired]], None] | None = None
        self.replies: list[dict[TopicIdPartition, Acquired]] = []
        self._scene = scene
        self._request = request
        self._places = places

    def acquire(self) -> Fetch:
        self._scene.shares.acquire(self._request, self._places, self._acquired)
        return self

    def _acquired(self, found: dict[TopicIdPartition, Acquired]) -> None:
        assert not self.replies, "answered twice"
        if found or self.answered:
            self.answered = True
            self.replies.append(found)
            if self.on_reply is not None:
                self.on_reply(found)
        else:
            self._scene.shares.wait(self._request.group, self._places, self)

    def records_available(self) -> None:
        self.heard += 1
        if not self.answered:
            self.acquire()

    def give_up(self) -> None:
        self.answered = True

    @property
    def reply(self) -> dict[TopicIdPartition, Acquired]:
        assert self.replies, "not answered"
        return self.replies[0]

    def of(self, partition: Partition) -> Acquired:
        return self.reply[place(partition)]

    def ranges(self, partition: Partition) -> list[tuple[int, int, int]]:
        acquired = self.of(partition)
        assert acquired.error_code == ErrorCode.NONE
        return [tuple(each) for each in acquired.records]  # type: ignore[misc]


class Acknowledged:
    def __init__(self) -> None:
        self.replies: list[dict[TopicIdPartition, int]] = []

    def __call__(self, codes: dict[TopicIdPartition, int]) -> None:
        assert not self.replies, "answered twice"
        self.replies.append(codes)

    @property
    def code(self) -> int:
        (codes,) = self.replies
        (code,) = codes.values()
        return code


class Scene:
    def __init__(self, layout: str = "", share_partitions_max: int = 100, **config: object) -> None:
        self.led = Led(layout)
        self.clock = self.led.clock
        self.config = ShareGroupConfig(**{"auto_offset_reset": "earliest", **config})  # type: ignore[arg-type]
        self.persister = FakePersister()
        self._most = share_partitions_max
        self.shares = self._share_partitions()

    def _share_partitions(self) -> SharePartitions:
        led = self.led
        return SharePartitions(
            led.partitions, led.disk, self.persister, lambda _: self.config, share_partitions_max=self._most
        )

    def lead(self, topic: str = "orders", records: int = 0) -> Partition:
        partition = self.led.lead(topic)
        if records:
            self.produce(partition, records)
        return partition

    def lead_again(self, partition: Partition) -> Partition:
        """In the next epoch, by a broker that knows nothing of this one's share partitions."""
        return self.led.partitions.lead(partition.log, partition.epoch + 1, {BROKER: ""})

    def produce(self, partition: Partition, records: int = 1) -> None:
        first = partition.log.end_offset
        self.led.produce(partition, *[b"%d" % (first + each) for each in range(records)])
        self.clock.run_soon()

    def fetch(
        self,
        *partitions: Partition,
        member: str = "a",
        most: int = 500,
        max_bytes: int = 1 << 20,
        record_limit: bool = False,
        on_reply: Callable[[dict[TopicIdPartition, Acquired]], None] | None = None,
    ) -> Fetch:
        request = AcquireRequest(GROUP, member, most, max_bytes, max_bytes, record_limit)
        fetch = Fetch(self, request, [place(each) for each in partitions])
        fetch.on_reply = on_reply
        fetch.acquire()
        self.clock.run_soon()
        return fetch

    def acknowledge(
        self, partition: Partition, first: int, last: int, types: tuple[int, ...] = ACCEPT, member: str = "a"
    ) -> Acknowledged:
        heard = Acknowledged()
        said = {place(partition): [AcknowledgementBatch(first, last, types)]}
        self.shares.acknowledge(GROUP, member, said, heard)
        self.clock.run_soon()
        return heard

    def key(self, partition: Partition) -> SharePartitionKey:
        return SharePartitionKey(GROUP, *place(partition))

    def kept(self, partition: Partition) -> NaiveKeeper:
        return self.persister.kept[self.key(partition)].keeper


def place(partition: Partition) -> TopicIdPartition:
    return partition.log.topic_id, partition.topic_partition.partition


def values(acquired: Acquired) -> dict[int, bytes | None]:
    """The values that a member gets, by their offsets: the records of the slices that it has acquired."""
    raw = b"".join(piece.read() for piece in acquired.slices)
    assert len(raw) == acquired.size_bytes
    records = {each.offset: each.value for _, view in batches(memoryview(raw)) for each in kernel.records(view)}
    return {at: records[at] for first, last, _ in acquired.records for at in range(first, last + 1)}


def sent_offsets(acquired: Acquired) -> list[int]:
    """Of all records in the slices."""
    raw = b"".join(piece.read() for piece in acquired.slices)
    return [each.offset for _, view in batches(memoryview(raw)) for each in kernel.records(view)]
