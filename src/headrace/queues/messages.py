"""What queues speak of: states of deliveries, what is kept of them, and who keeps it. Plain values, with Kafka's names
and numbers where it has them (KIP-932)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from headrace.ports.disk import FileSlice
from headrace.records.isolation import Isolation

NO_OFFSET: Final = -1
"""As a start: not set yet, `share.auto.offset.reset` decides where the partition is led."""
IN_FLIGHT_MAX: Final = 10_000
"""Offsets of a share partition from its start to the last that was acquired, however it is configured: each may come
to be in a state of its own, and all of these are kept."""


class DeliveryState(IntEnum):
    AVAILABLE = 0
    ACQUIRED = 1
    ACKNOWLEDGED = 2
    ARCHIVING = 3
    """It is not delivered any more, and its dead letter is not written yet (KIP-1191)."""
    ARCHIVED = 4
    """It is not delivered any more, and was not accepted: see `Reason`."""


class Reason(IntEnum):
    """Why records are archived."""

    GAP = 0
    """There is nothing to deliver: a marker, an aborted transaction, or what compaction took."""
    REJECTED = 1
    """A member said that it can never be processed."""
    DELIVERIES = 2
    """It was delivered as often as may be."""
    DELETED = 3
    """Retention has overtaken it: it is gone from the log."""


NO_PRODUCER: Final = -1


class Letter(NamedTuple):
    """What is kept of a record whose dead letter is not written yet: why it is one and, once it is about to be sent,
    the identity under which that is done, so that whoever sends it again writes no second one."""

    reason: Reason
    producer_id: int = NO_PRODUCER
    sequence: int = 0
    """Of the first record of the range; those that are sent together are one range."""

    @property
    def is_addressed(self) -> bool:
        return self.producer_id != NO_PRODUCER


class AcknowledgeType(IntEnum):
    GAP = 0
    """The batch has no record of this offset."""
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4
    """The lock is to last for its whole time again (KIP-1222)."""


TopicIdPartition = tuple[bytes, int]


class SharePartitionKey(NamedTuple):
    group: str
    topic_id: bytes
    partition: int


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Offsets that are in one state; the last one is included."""

    first_offset: int
    last_offset: int
    state: DeliveryState
    delivery_count: int
    member: str = ""
    until_ms: int = 0
    """Who has acquired it, and until when by the wall clock; without a member, of what is AVAILABLE: nobody acquires it
    before."""
    letter: Letter | None = None
    """Only of ARCHIVING."""

    @property
    def record_count(self) -> int:
        return self.last_offset - self.first_offset + 1


@dataclass(frozen=True, slots=True)
class ShareState:
    """What is kept of a share partition, or what is to be kept from now on: then of the offsets of `batches` only, and
    with the start that holds from now on. What lies below the start is final, and dropped."""

    state_epoch: int
    """Rises when the group's start is set anew."""
    leader_epoch: int
    """Of the data partition: who leads it in an older one writes nothing any more."""
    start_offset: int
    batches: tuple[StateBatch, ...] = ()


@dataclass(frozen=True, slots=True)
class ShareSummary:
    """Of what is not initialized the start is `NO_OFFSET`."""

    state_epoch: int
    leader_epoch: int
    start_offset: int
    delivery_complete_count: int = -1
    """Offsets from the start on that are delivered to nobody any more; -1: not known."""


ReadDone = Callable[[int, ShareState | None], None]
SummaryDone = Callable[[int, ShareSummary | None], None]
CodeHeard = Callable[[int], None]


class Persister(Protocol):
    """Who keeps the state of share partitions. `done` hears Kafka's code exactly once, on the loop, within bounded
    time; not before what was asked for is below the watermark. After an error it may or may not have happened."""

    def read(self, key: SharePartitionKey, leader_epoch: int, done: ReadDone) -> None:
        """The whole state, with the leader epoch in which it was last written; None where nothing is kept. The epoch
        that fences rises to this one: who led before writes nothing any more. No write that was begun before takes
        effect after it."""
        ...

    def write(self, key: SharePartitionKey, state: ShareState, done: CodeHeard) -> None:
        """Keep what has changed."""
        ...

    def initialize(self, key: SharePartitionKey, state_epoch: int, start_offset: int, done: CodeHeard) -> None: ...

    def delete(self, key: SharePartitionKey, done: CodeHeard) -> None: ...

    def summary(self, key: SharePartitionKey, leader_epoch: int, done: SummaryDone) -> None:
        """As `read`, without batches, and nobody is fenced. Leader epoch -1: whoever asks."""
        ...


@dataclass(frozen=True, slots=True)
class ShareGroupConfig:
    """What a share group's configuration, or else the broker's, says about deliveries."""

    isolation: Isolation = Isolation.UNCOMMITTED
    """share.isolation.level"""
    auto_offset_reset: str = "latest"
    """share.auto.offset.reset: earliest, latest or by_duration:PnDTnHnMn.nS, where a group has no start yet."""
    lock_ms: int = 30_000
    """share.record.lock.duration.ms"""
    lock_max_ms: int = 60_000
    """group.share.max.record.lock.duration.ms: no lock that is read back lasts longer, however clocks were set."""
    delivery_count_limit: int = 5
    """group.share.delivery.count.limit"""
    record_locks_max: int = 2000
    """group.share.partition.max.record.locks: from the start to the last record that was acquired."""
    dead_letter_topic: str = ""
    """errors.deadletterqueue.topic.name: where records go that are rejected, or were delivered too often."""
    copies_dead_letters: bool = False
    """errors.deadletterqueue.copy.record.enable: with their keys, values and headers."""
    retry_backoff_ms: tuple[int, ...] = ()
    """share.retry.backoff.ms: how long a record that was given back waits, by how often it was delivered."""

    def backoff_ms(self, delivery_count: int) -> int:
        """After so many deliveries; the last of the table for all that come later."""
        table = self.retry_backoff_ms
        return table[min(max(delivery_count, 1), len(table)) - 1] if table else 0


class AcquiredRecords(NamedTuple):
    """Records of one range that a member may process now; the last offset is included."""

    first_offset: int
    last_offset: int
    delivery_count: int


@dataclass(frozen=True, slots=True)
class AcquireRequest:
    """What a share fetch asks for, over all of its partitions."""

    group: str
    member: str
    max_records: int
    max_bytes: int
    partition_max_bytes: int
    record_limit: bool = False
    """True: never more than `max_records` (ShareFetch's RecordLimit). Else a batch that is begun is taken whole."""


@dataclass(frozen=True, slots=True)
class Acquired:
    """What it gets of one partition."""

    error_code: int = 0
    records: tuple[AcquiredRecords, ...] = ()
    slices: tuple[FileSlice, ...] = ()
    """Whole batches with all of these records, and others beside them."""
    size_bytes: int = 0

    @property
    def record_count(self) -> int:
        return sum([last - first + 1 for first, last, _ in self.records])


class AcknowledgementBatch(NamedTuple):
    """What a member says of records that it has acquired; the last offset is included."""

    first_offset: int
    last_offset: int
    types: tuple[int, ...]
    """One for all, or one for each offset."""


class RecordsWaiter(Protocol):
    """A share fetch that found nothing to acquire."""

    answered: bool
    """It waits no longer."""

    def records_available(self) -> None:
        """Acquire again: there may be something now, or something to be told. Heard at most once for each `wait`."""
        ...
