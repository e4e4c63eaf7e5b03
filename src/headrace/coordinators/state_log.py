"""The log of a coordinator's state: what it appends goes to a partition of its internal topic, in batches of bounded
size, and is answered when the high watermark has passed it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from headrace.coordinators.record_fields import Record
from headrace.coordinators.watermark_wait import WatermarkWait
from headrace.errors import ErrorCode, HeadraceError, RequestTimedOut
from headrace.partitions.partition import Appended, Partition
from headrace.partitions.partitions import Failures, Partitions
from headrace.records import kernel
from headrace.records.batch import TRANSACTIONAL, BatchHeader

ALL_IN_SYNC: Final = -1
NO_SEQUENCE: Final = -1
TIMEOUT_MS: Final = 5000
RECORDS_PER_BATCH: Final = 1000
BYTES_PER_BATCH: Final = 512 << 10

APPEND_FAULTS: Final[Mapping[int, int]] = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.REQUEST_TIMED_OUT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: ErrorCode.NOT_COORDINATOR,
    ErrorCode.KAFKA_STORAGE_ERROR: ErrorCode.NOT_COORDINATOR,
}
"""What a failed append means to a client of the coordinator: most is over when it finds the coordinator again."""

AppendDone = Callable[[int], None]
Append = Callable[[int, int, list[Record], AppendDone], None]
"""Append records to a partition of the internal topic while it is led in this epoch; `done` hears the error code once
they are below the watermark."""


class ProducerEpoch(NamedTuple):
    producer_id: int
    epoch: int


Settled = Callable[[bool], None]
"""Whether what was appended is below the watermark, or is not in the log at all. Heard once, unless the role ends."""
AppendInTransaction = Callable[[int, int, ProducerEpoch, list[Record], Settled, AppendDone], None]
"""As `Append`, in one batch of a producer's transaction, which must be open there, or verified. `settled` hears what
became of it in the log, in the order of the log, also when `done` has heard meanwhile that it takes too long."""


@lru_cache(maxsize=10_000)
def partition_of(key: str, partitions: int) -> int:
    """Java's String.hashCode over UTF-16, its absolute value, modulo the partitions: where every Kafka client's tools
    look.
    """
    units = key.encode("utf-16-be", "surrogatepass")
    code = 0
    for position in range(0, len(units), 2):
        code = (31 * code + (units[position] << 8 | units[position + 1])) & 0xFFFFFFFF
    signed = code - (1 << 32) if code >= 1 << 31 else code
    return (0 if signed == -(1 << 31) else abs(signed)) % partitions


class StateLog:
    """Of one internal topic."""

    def __init__(self, partitions: Partitions, topic: str) -> None:
        self._partitions = partitions
        self._topic = topic

    def append(self, index: int, epoch: int, records: list[Record], done: AppendDone) -> None:
        """Append at least one record. `done` hears once, when the high watermark has passed all of them, or they cannot
        be had: the first error code if there was one. State that was loaded in one epoch appends to that one only: who
        loads the next must not miss what is added."""
        batches = list(in_batches(records))
        codes: list[int] = []

        def batch_done(code: int) -> None:
            codes.append(code)
            if len(codes) == len(batches):
                done(next((code for code in codes if code != ErrorCode.NONE), ErrorCode.NONE))

        for batch in batches:
            self._append(index, epoch, batch, batch_done if len(batches) > 1 else done)

    def _append(self, index: int, epoch: int, records: list[Record], done: AppendDone) -> None:
        partition = self._partitions.find(self._topic, index)
        if partition is None or partition.epoch != epoch:
            done(ErrorCode.NOT_COORDINATOR)
            return
        now_ms = self._partitions.clock.wall_ms()
        batch, header = kernel.build_with_header([(now_ms, key, value, ()) for key, value in records])

        def answered(error: HeadraceError | None, _base_offset: int) -> None:
            done(ErrorCode.NONE if error is None else error.kafka_code)

        self._partitions.submit(partition, batch, ALL_IN_SYNC, TIMEOUT_MS, answered, own=header)
        self._partitions.clock.call_soon(self._partitions.end_turn)

    def append_in_transaction(
        self,
        index: int,
        epoch: int,
        producer: ProducerEpoch,
        records: list[Record],
        settled: Settled,
        done: AppendDone,
    ) -> None:
        partition = self._partitions.find(self._topic, index)
        if partition is None or partition.epoch != epoch:
            settled(False)
            done(ErrorCode.NOT_COORDINATOR)
            return
        now_ms = self._partitions.clock.wall_ms()
        new = [(now_ms, key, value, ()) for key, value in records]
        batch, header = kernel.build_with_header(new, TRANSACTIONAL, producer=(*producer, NO_SEQUENCE))
        _TransactionalAppend(self._partitions, partition, settled, done).start(batch, header)


class _TransactionalAppend:
    """One batch of a transaction until it is settled and answered."""

    __slots__ = ("_appended", "_done", "_partition", "_partitions", "_settled", "answered")

    def __init__(self, partitions: Partitions, partition: Partition, settled: Settled, done: AppendDone) -> None:
        self.answered = False
        self._partitions = partitions
        self._partition = partition
        self._settled = settled
        self._done = done

    def start(self, batch: bytearray, header: BatchHeader) -> None:
        try:
            self._appended: Appended = self._partition.append(memoryview(batch), ALL_IN_SYNC, header)
        except HeadraceError as error:
            self._lost(error)
            return
        self._partitions.touch(self._partition)
        self._partitions.at_turn_end(self._written)
        self._partitions.clock.call_soon(self._partitions.end_turn)

    def _written(self, failures: Failures) -> None:
        error = failures.get(self._partition.topic_partition)
        if error is not None:
            self._lost(error)
            return
        WatermarkWait(self._partitions, self._partition, self._appended[1], self._passed, self._answer).begin()
        if not self.answered:
            self._partitions.deadlines.add(self._partitions.clock.now() + TIMEOUT_MS / 1000, self)

    def _passed(self) -> None:
        self._settled(True)
        self._answer(None)

    def _lost(self, error: HeadraceError) -> None:
        self._settled(False)
        self._answer(error)

    def expire(self) -> None:
        where = self._partition.topic_partition
        self._answer(RequestTimedOut(f"{where}: not committed within {TIMEOUT_MS} ms; it may be later"))

    def _answer(self, error: HeadraceError | None) -> None:
        if not self.answered:
            self.answered = True
            self._done(ErrorCode.NONE if error is None else error.kafka_code)


def in_batches(records: list[Record]) -> Iterator[list[Record]]:
    """The records in batches of bounded count and size."""
    batch: list[Record] = []
    size_bytes = 0
    for key, value in records:
        count = len(key) + len(value or b"")
        if batch and (len(batch) >= RECORDS_PER_BATCH or size_bytes + count > BYTES_PER_BATCH):
            yield batch
            batch, size_bytes = [], 0
        batch.append((key, value))
        size_bytes += count
    if batch:
        yield batch
