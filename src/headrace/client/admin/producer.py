"""Records one by one into batches, batches in rounds to their leaders, and a count of what was acknowledged.

Nothing leaves in the background: a full round goes out inside `add`, the rest inside `flush`. Unless acks is 0, the
batches carry a producer id and sequence numbers, so that a batch sent twice is kept once, and in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from headrace.client.admin.cluster import Cluster
from headrace.client.admin.partitioner import Partitioner
from headrace.client.admin.produce import ACKS_ALL, ACKS_NONE, Outgoing, Produced, ProducerId, init_producer_id, produce
from headrace.errors import HeadraceError
from headrace.records import kernel
from headrace.records.codecs import Codec
from headrace.records.record import NewRecord

BATCH_BYTES: Final = 256 << 10
BATCH_RECORDS: Final = 10_000
ROUND_BYTES: Final = 4 << 20
FAILURES_KEPT: Final = 100

_RECORD_OVERHEAD_BYTES: Final = 20
_SEQUENCE_MASK: Final = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A batch that the broker has; the offset is None when it said only that it had the batch already."""

    partition: int
    base_offset: int | None
    sequences: Sequence[int]
    """Of each record: how many were added before it."""
    records: Sequence[NewRecord]


class Producer:
    """Sends to one topic. `on_acknowledged` hears of every acknowledged batch; records are kept until then."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        *,
        acks: int = ACKS_ALL,
        codec: Codec = Codec.NONE,
        timeout_ms: int = 30_000,
        on_acknowledged: Callable[[Acknowledged], None] | None = None,
    ) -> None:
        self.acknowledged = 0
        self.failed = 0
        self.failures: list[HeadraceError] = []
        self.per_partition: dict[int, int] = {}
        self._cluster = cluster
        self._topic = topic
        self._acks = acks
        self._codec = codec
        self._timeout_ms = timeout_ms
        self._on_acknowledged = on_acknowledged
        self._partition_count = len(cluster.topic(topic, create=True).partitions)
        self._partitioner = Partitioner(self._partition_count)
        self._identity: ProducerId | None = None
        self._sequences: dict[int, int] = {}
        self._open: dict[int, list[NewRecord]] = {}
        self._open_bytes: dict[int, int] = {}
        self._added = 0
        self._open_sequences: dict[int, list[int]] = {}
        self._ready: list[tuple[Outgoing, int, Acknowledged | None]] = []
        self._ready_bytes = 0

    @property
    def pending(self) -> int:
        """Records that `flush` would send."""
        return sum(map(len, self._open.values())) + sum(count for _, count, _ in self._ready)

    def add(self, record: NewRecord, partition: int | None = None) -> None:
        if partition is None:
            partition = self._partitioner.choose(record[1])
        elif not 0 <= partition < self._partition_count:
            self._cluster.partition(self._topic, partition)
        self._open.setdefault(partition, []).append(record)
        if self._on_acknowledged is not None:
            self._open_sequences.setdefault(partition, []).append(self._added)
        self._added += 1
        size = self._open_bytes.get(partition, 0) + _size(record)
        self._open_bytes[partition] = size
        if size >= BATCH_BYTES or len(self._open[partition]) >= BATCH_RECORDS:
            self._close_batch(partition)
            self._partitioner.batch_full(partition)
            if self._ready_bytes >= ROUND_BYTES:
                self._send_ready()

    def flush(self) -> None:
        """Send everything added so far and wait for its acknowledgement."""
        for partition in list(self._open):
            self._close_batch(partition)
            self._partitioner.batch_full(partition)
        self._send_ready()

    def _close_batch(self, partition: int) -> None:
        records = self._open.pop(partition)
        self._open_bytes.pop(partition)
        if self._acks != ACKS_NONE and self._identity is None:
            self._identity = init_producer_id(self._cluster)
        if self._identity is None:
            batch = kernel.build(records, self._codec)
        else:
            sequence = self._sequences.get(partition, 0)
            self._sequences[partition] = sequence + len(records) & _SEQUENCE_MASK
            batch = kernel.build(
                records,
                self._codec,
                producer_id=self._identity.producer_id,
                producer_epoch=self._identity.producer_epoch,
                base_sequence=sequence,
            )
        told = None
        if self._on_acknowledged is not None:
            told = Acknowledged(partition, None, self._open_sequences.pop(partition), records)
        self._ready.append((Outgoing(self._topic, partition, batch), len(records), told))
        self._ready_bytes += len(batch)

    def _send_ready(self) -> None:
        ready, self._ready, self._ready_bytes = self._ready, [], 0
        results = produce(
            self._cluster, [outgoing for outgoing, _, _ in ready], acks=self._acks, timeout_ms=self._timeout_ms
        )
        for (outgoing, count, told), result in zip(ready, results, strict=True):
            if isinstance(result, Produced):
                if told is not None and self._on_acknowledged is not None:
                    known = None if result.base_offset < 0 else result.base_offset
                    self._on_acknowledged(replace(told, base_offset=known))
                self.acknowledged += count
                self.per_partition[outgoing.partition] = self.per_partition.get(outgoing.partition, 0) + count
            else:
                self._fail(count, result)

    def _fail(self, count: int, failure: HeadraceError) -> None:
        self.failed += count
        if len(self.failures) < FAILURES_KEPT:
            self.failures.append(failure)
        # The lost batch leaves a gap in its sequence: go on under a new identity, with sequences from zero.
        self._identity = None
        self._sequences.clear()


def _size(record: NewRecord) -> int:
    _, key, value, headers = record
    size = _RECORD_OVERHEAD_BYTES + len(key or b"") + len(value or b"")
    return size + sum(len(name) + len(content or b"") for name, content in headers)
