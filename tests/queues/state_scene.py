"""A share coordinator on a virtual clock and a log in memory.

Appends are acknowledged at once, or with `held` kept until `acknowledge`. `take_over` makes the next coordinator from
the records that are in the log; `compact` leaves the last record of each key there, up to some place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.coordinators.record_fields import Record
from headrace.coordinators.state_log import AppendDone
from headrace.errors import ErrorCode
from headrace.queues.messages import (
    DeliveryState,
    SharePartitionKey,
    ShareState,
    ShareSummary,
    StateBatch,
)
from headrace.queues.share_coordinator import ShareCoordinator
from headrace.queues.state_records import NO_LOAD
from headrace.virtual.clock import VirtualClock

TOPIC = b"a topic's own id"
KEY = SharePartitionKey("workers", TOPIC, 0)
AVAILABLE, ACQUIRED, ACKNOWLEDGED, ARCHIVING, ARCHIVED = DeliveryState


def acquired(first: int, last: int, count: int = 1, member: str = "m1", until_ms: int = 5000) -> StateBatch:
    return StateBatch(first, last, ACQUIRED, count, member, until_ms)


def acknowledged(first: int, last: int, count: int = 1) -> StateBatch:
    return StateBatch(first, last, ACKNOWLEDGED, count)


def changed(*batches: StateBatch, start: int = -1, state_epoch: int = 1, leader_epoch: int = 1) -> ShareState:
    return ShareState(state_epoch, leader_epoch, start, batches)


@dataclass(slots=True)
class Scene:
    partitions: int = 1
    clock: VirtualClock = field(default_factory=VirtualClock)
    held: bool = False
    log: list[Record] = field(default_factory=list)
    appends: list[list[Record]] = field(default_factory=list)
    """Each batch of records that was appended."""
    on_the_way: list[tuple[list[Record], AppendDone]] = field(default_factory=list)
    unknown: set[bytes] = field(default_factory=set)
    """Topics that there are not."""
    epoch: int = 0
    coordinator: ShareCoordinator = field(init=False)

    def __post_init__(self) -> None:
        self.take_over()

    def append(self, _partition: int, epoch: int, records: list[Record], done: AppendDone) -> None:
        assert epoch == self.epoch
        self.appends.append(records)
        self.on_the_way.append((records, done))
        if not self.held:
            self.acknowledge()

    def acknowledge(self, error_code: int = ErrorCode.NONE, *, logged: bool = True) -> None:
        while self.on_the_way:
            records, done = self.on_the_way.pop(0)
            if logged:
                self.log += records
            done(error_code)
        self.clock.run_soon()

    def take_over(self) -> None:
        if self.epoch:
            self.coordinator.close()
        self.coordinator = ShareCoordinator(
            self.clock, self.append, self.partitions, lambda topic_id, _partition: topic_id not in self.unknown
        )
        self.epoch += 1
        for partition in range(self.partitions):
            loading = self.coordinator.lead(partition, self.epoch)
            for record in self.log:
                loading.replay([record])
            loading.ready()
        self.clock.run_soon()

    def compact(self, end: int) -> None:
        """The last record of each key, of those below the place."""
        last = {key: place for place, (key, _value) in enumerate(self.log[:end])}
        kept = [record for place, record in enumerate(self.log[:end]) if last[record[0]] == place]
        self.log[:end] = kept

    # Requests

    def initialize(self, key: SharePartitionKey = KEY, state_epoch: int = 1, start: int = 0) -> list[int]:
        codes: list[int] = []
        self.coordinator.initialize(key, state_epoch, start, codes.append)
        self.clock.run_soon()
        return codes

    def read(
        self, leader_epoch: int = 1, load_id: int = NO_LOAD, key: SharePartitionKey = KEY
    ) -> list[tuple[int, ShareState | None]]:
        answers: list[tuple[int, ShareState | None]] = []
        self.coordinator.read(key, leader_epoch, load_id, lambda code, state: answers.append((code, state)))
        self.clock.run_soon()
        return answers

    def write(self, state: ShareState, load_id: int = NO_LOAD, key: SharePartitionKey = KEY) -> list[int]:
        codes: list[int] = []
        self.coordinator.write(key, state, load_id, codes.append)
        self.clock.run_soon()
        return codes

    def delete(self, key: SharePartitionKey = KEY) -> list[int]:
        codes: list[int] = []
        self.coordinator.delete(key, codes.append)
        self.clock.run_soon()
        return codes

    def summary(self, leader_epoch: int = -1, key: SharePartitionKey = KEY) -> tuple[int, ShareSummary | None]:
        answers: list[tuple[int, ShareSummary | None]] = []
        self.coordinator.summary(key, leader_epoch, lambda code, found: answers.append((code, found)))
        return answers[0]

    def state(self, key: SharePartitionKey = KEY) -> ShareState | None:
        """What is kept, for whoever looks."""
        ((_code, state),) = self.read(-1, key=key)
        return state
