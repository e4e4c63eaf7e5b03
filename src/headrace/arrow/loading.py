"""Sending made-up traffic: one producer with its pace, its ledger and its trace. Rows stay in columns throughout.

Batches carry a producer id and sequence numbers, so that a batch sent twice is kept once, and in its order. A round is
sent and acknowledged before the next one leaves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.arrow import traces
from headrace.arrow.ledger import Ledger
from headrace.arrow.rolling import RollingFiles
from headrace.arrow.traffic import Traffic
from headrace.client.cluster import Cluster
from headrace.client.produce import ACKS_ALL, Outgoing, Produced, ProducerId, init_producer_id, produce
from headrace.errors import HeadraceError
from headrace.records.arrow import TIMESTAMP_TYPE, build, digests
from headrace.records.codecs import Codec

ROUND_BYTES: Final = 4 << 20
BATCH_BYTES: Final = 512 << 10
BATCH_ROWS: Final = 10_000
FIRST_ROWS: Final = 200
PACED_ROUNDS_PER_S: Final = 100
FAILURES_KEPT: Final = 5

_SEQUENCE_MASK: Final = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Amount:
    """How much one producer sends: until one of the limits is reached. `rate` is in records a second."""

    records: int | None
    duration_s: float | None
    rate: float | None


@dataclass(slots=True)
class Tally:
    """What a producer has done so far; its own thread writes, others may look."""

    acknowledged: int = 0
    failed: int = 0
    bytes: int = 0
    latencies_us: list[int] = field(default_factory=list)
    """One per acknowledged batch, beside `batch_records`."""
    batch_records: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Batch:
    partition: int
    sequences: Any
    rows: pa.RecordBatch
    bytes: int


class LoadProducer:
    """Sends to one topic, until it has sent its amount or is stopped."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        traffic: Traffic,
        *,
        name: str,
        codec: int = Codec.NONE,
        ledger: Ledger | None = None,
        trace: RollingFiles | None = None,
    ) -> None:
        self.tally = Tally()
        self._cluster = cluster
        self._topic = topic
        self._traffic = traffic
        self._name = name
        self._codec = codec
        self._ledger = ledger
        self._trace = trace
        self._identity: ProducerId | None = None
        self._sequences: dict[int, int] = {}
        self._sent = 0
        self._row_bytes = 0.0

    def run(self, amount: Amount, stop: threading.Event, clock: Callable[[], float] = time.time) -> None:
        began = before = clock()
        while not stop.is_set():
            rows = self._round_rows(amount, clock() - began)
            if not rows:
                return
            due = began + self._sent / amount.rate if amount.rate else None
            if due is not None:
                stop.wait(max(0.0, due - clock()))
            now = clock()
            self._round(rows, before, now, due)
            before = now

    def _round_rows(self, amount: Amount, elapsed_s: float) -> int:
        """As many as fill a round, or as are due until the next one; none when the amount is reached."""
        if amount.duration_s is not None and elapsed_s >= amount.duration_s:
            return 0
        rows = max(1, int(ROUND_BYTES / self._row_bytes)) if self._row_bytes else FIRST_ROWS
        if amount.rate:
            rows = min(rows, max(1, int(amount.rate / PACED_ROUNDS_PER_S)))
        return rows if amount.records is None else min(rows, amount.records - self._sent)

    def _round(self, count: int, from_s: float, to_s: float, due_s: float | None) -> None:
        chunk = self._traffic.chunk(count, int(from_s * 1e6), int(to_s * 1e6))
        batches = self._batches(chunk.rows, chunk.partitions)
        self._sent += count
        outgoing = [Outgoing(self._topic, batch.partition, self._packed(batch, int(to_s * 1000))) for batch in batches]
        sent_us = int((time.time() if due_s is None else due_s) * 1e6)
        results = produce(self._cluster, outgoing, acks=ACKS_ALL)
        done_us = int(time.time() * 1e6)
        for batch, result in zip(batches, results, strict=True):
            self._note(batch, result, done_us - sent_us)
        if self._trace is not None:
            self._trace.add(self._traced(batches, results, sent_us, done_us))

    def _batches(self, rows: pa.RecordBatch, partitions: Any) -> list[_Batch]:
        """The rows by partition, cut to size; within a partition they stay in their order."""
        order = np.argsort(partitions, kind="stable")
        sorted_rows, sequences = rows.take(pa.array(order)), pa.array(order + self._sent)
        numbers, starts = np.unique(partitions[order], return_index=True)
        sizes = pc.binary_length(sorted_rows["value"]).to_numpy(zero_copy_only=False).astype(np.int64)
        if "key" in rows.schema.names:
            sizes = sizes + pc.binary_length(sorted_rows["key"]).to_numpy(zero_copy_only=False)
        self._row_bytes = max(1.0, float(sizes.mean()))
        step = min(BATCH_ROWS, max(1, int(BATCH_BYTES / self._row_bytes)))
        found = []
        for number, start, end in zip(numbers, starts, [*starts[1:], len(order)], strict=True):
            for at in range(start, end, step):
                stop = min(at + step, end)
                some, kept = sequences.slice(at, stop - at), sorted_rows.slice(at, stop - at)
                found.append(_Batch(int(number), some, kept, int(sizes[at:stop].sum())))
        return found

    def _packed(self, batch: _Batch, now_ms: int) -> bytearray:
        if self._identity is None:
            self._identity = init_producer_id(self._cluster)
        sequence = self._sequences.get(batch.partition, 0)
        self._sequences[batch.partition] = sequence + len(batch.rows) & _SEQUENCE_MASK
        return build(
            batch.rows,
            self._codec,
            now_ms=now_ms,
            producer_id=self._identity.producer_id,
            producer_epoch=self._identity.producer_epoch,
            base_sequence=sequence,
        )

    def _note(self, batch: _Batch, result: Produced | HeadraceError, latency_us: int) -> None:
        count = len(batch.rows)
        if isinstance(result, HeadraceError):
            self.tally.failed += count
            if len(self.tally.failures) < FAILURES_KEPT:
                self.tally.failures.append(str(result))
            # The batch leaves a gap in its sequence: go on under a new identity.
            self._identity = None
            self._sequences.clear()
            return
        if self._ledger is not None:
            offset = None if result.base_offset < 0 else result.base_offset
            timestamps = batch.rows["timestamp"]
            self._ledger.add(self._topic, batch.partition, offset, batch.sequences, timestamps, digests(batch.rows))
        self.tally.acknowledged += count
        self.tally.bytes += batch.bytes
        self.tally.latencies_us.append(latency_us)
        self.tally.batch_records.append(count)

    def _traced(
        self, batches: list[_Batch], results: list[Produced | HeadraceError], sent_us: int, done_us: int
    ) -> pa.RecordBatch:
        count = len(batches)
        columns = [
            pa.repeat(self._name, count),
            pa.repeat(self._topic, count),
            pa.array([batch.partition for batch in batches], pa.int32()),
            pa.repeat(pa.scalar(sent_us, pa.int64()), count).cast(TIMESTAMP_TYPE),
            pa.repeat(pa.scalar(done_us, pa.int64()), count).cast(TIMESTAMP_TYPE),
            pa.array([len(batch.rows) for batch in batches], pa.int64()),
            pa.array([batch.bytes for batch in batches], pa.int64()),
            pa.array([str(each) if isinstance(each, HeadraceError) else None for each in results], pa.string()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=traces.SCHEMA)


@dataclass(frozen=True, slots=True)
class Latencies:
    """In milliseconds, over records: each has the latency of its batch."""

    mean: float
    p50: float
    p99: float
    p999: float


def latencies(tallies: list[Tally]) -> Latencies | None:
    took = np.array([each for tally in tallies for each in tally.latencies_us], dtype=np.float64) / 1000
    weights = np.array([each for tally in tallies for each in tally.batch_records], dtype=np.int64)
    if not len(took):
        return None
    order = np.argsort(took)
    below = np.cumsum(weights[order])
    at = [took[order][np.searchsorted(below, share * below[-1])] for share in (0.5, 0.99, 0.999)]
    return Latencies(float(np.average(took, weights=weights)), *(float(each) for each in at))
