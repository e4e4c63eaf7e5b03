"""Partitions on a store in memory: a virtual clock, a disk that fails when told, and waiters that take notes."""

from __future__ import annotations

import hashlib

from chosen_layout import log_path, new_store
from headrace.errors import HeadraceError
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.records.record import NewRecord
from headrace.settings.values import log_settings
from headrace.storage.log import Log, ReadResult, TopicPartition
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk

BROKER = 1
DATA = "/data"
TOPIC_ID = bytes(16)


def topic_id(topic: str) -> bytes:
    """In the shared layout frames are told apart by topic ids, so every topic needs its own."""
    return hashlib.blake2b(topic.encode(), digest_size=16).digest()


class Led:
    def __init__(self, layout: str = "") -> None:
        self._layout = layout
        self.clock = VirtualClock()
        self.disk = VirtualDisk(self.clock)
        self.disk.make_folder(DATA)
        self.store = new_store(self.disk, self.clock, DATA, layout)
        self.store.open({})
        self.partitions = Partitions(self.store, self.clock, BROKER)

    def lead(self, topic: str = "orders", index: int = 0, **overrides: object) -> Partition:
        given = {name.replace("_", "."): str(value) for name, value in overrides.items()}
        log = self.store.create(TopicPartition(topic, index), topic_id(topic), log_settings({}, given))
        return self.partitions.lead(log, 0, {BROKER: ""})

    def submit(self, partition: Partition, *values: bytes, acks: int = -1, timeout_ms: int = 1000) -> Outcome:
        outcome = Outcome()
        self.partitions.submit(partition, batch(*values), acks, timeout_ms, outcome)
        return outcome

    def produce(self, partition: Partition, *values: bytes, acks: int = -1, timeout_ms: int = 1000) -> Outcome:
        outcome = self.submit(partition, *values, acks=acks, timeout_ms=timeout_ms)
        self.partitions.end_turn()
        return outcome

    def log_path(self, log: Log) -> str:
        return log_path(DATA, log.topic_partition, self._layout)


def batch(*values: bytes, producer: tuple[int, int, int] = (-1, -1, -1)) -> bytearray:
    records: list[NewRecord] = [(1_750_000_000_000, None, value, []) for value in values or (b"value",)]
    producer_id, producer_epoch, base_sequence = producer
    return kernel.build(records, producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=base_sequence)


def values(found: ReadResult) -> list[bytes | None]:
    raw = b"".join(piece.file.pread(piece.count, piece.position) for piece in found.slices)
    return [record.value for _, view in batches(memoryview(raw)) for record in kernel.records(view)]


class Outcome:
    """What became of a submission."""

    def __init__(self) -> None:
        self.calls: list[tuple[HeadraceError | None, int]] = []

    def __call__(self, error: HeadraceError | None, base_offset: int) -> None:
        self.calls.append((error, base_offset))

    @property
    def waiting(self) -> bool:
        return not self.calls

    @property
    def offset(self) -> int:
        ((error, offset),) = self.calls
        assert error is None
        return offset

    @property
    def error(self) -> HeadraceError:
        ((error, _),) = self.calls
        assert error is not None
        return error


class Deletion:
    """What became of a wish to delete: see `partitions.partition.ProduceWaiter`."""

    def __init__(self) -> None:
        self.answered = False
        self.error: HeadraceError | None = None

    def passed(self) -> None:
        self.answered = True

    def failed(self, topic_partition: TopicPartition, error: HeadraceError) -> None:
        self.answered, self.error = True, error


class Reader:
    """A fetch that waits until it has seen so many bytes."""

    def __init__(self, wanted_bytes: int = 1) -> None:
        self.answered = False
        self.wanted_bytes = wanted_bytes
        self.grown: list[int] = []

    def grew(self, count: int) -> None:
        self.grown.append(count)
        self.answered = sum(self.grown) >= self.wanted_bytes
