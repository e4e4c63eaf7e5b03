"""Sending made-up traffic: one producer with its pace, its ledger and its trace. Rows stay in columns throughout.

A round is sent and acknowledged before the next one leaves. All its records have the latency of the round.
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
from headrace.arrow.ledger import Ledger, counting_from
from headrace.arrow.rolling_files import RollingFiles
from headrace.arrow.traffic import Traffic
from headrace.arrow.write import WriteFailed, Writer
from headrace.records.arrow import TIMESTAMP_TYPE, digests

ROUND_BYTES: Final = 4 << 20
FIRST_ROWS: Final = 200
PACED_ROUNDS_PER_S: Final = 100
FAILURES_KEPT: Final = 5


@dataclass(frozen=True, slots=True)
class Amount:
    """How much one producer sends: until one of the limits is reached. `rate` is in records a second."""

    records: int | None
    duration_s: float | None
    rate: float | None

    def share(self, number: int, producers: int) -> Amount:
        """What one of several producers sends, so that all together send the amount."""
        records = self.records
        if records is not None:
            records = records // producers + (number < records % producers)
        return Amount(records, self.duration_s, None if self.rate is None else self.rate / producers)


@dataclass(slots=True)
class Tally:
    """What a producer has done so far; its own thread writes, others may look."""

    acknowledged: int = 0
    failed: int = 0
    bytes: int = 0
    latencies_us: list[int] = field(default_factory=list)
    """One per round, beside `round_records`."""
    round_records: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A round and its answers, row by row; `offsets` are null where there was none."""

    rows: pa.RecordBatch
    sizes: pa.Array
    offsets: pa.Array
    failure: WriteFailed | None
    sent_us: int
    done_us: int


class LoadProducer:
    """Sends through a writer, until it has sent its amount or is stopped."""

    def __init__(
        self,
        writer: Writer,
        topic: str,
        traffic: Traffic,
        *,
        name: str,
        ledger: Ledger | None = None,
        trace: RollingFiles | None = None,
    ) -> None:
        self.tally = Tally()
        self._writer = writer
        self._topic = topic
        self._traffic = traffic
        self._name = name
        self._ledger = ledger
        self._trace = trace
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
        rows = self._traffic.chunk(count, int(from_s * 1e6), int(to_s * 1e6))
        sizes = _sizes(rows)
        self._row_bytes = max(1.0, pc.mean(sizes).as_py())
        sequences = counting_from(self._sent, count)
        self._sent += count
        sent_us = int((time.time() if due_s is None else due_s) * 1e6)
        pending = self._writer.submit(rows)
        content = None if self._ledger is None else digests(rows)
        failure: WriteFailed | None = None
        try:
            written = pending.result()
        except WriteFailed as error:
            written, failure = error.written, error
        sent = _Sent(rows, sizes, written["offset"], failure, sent_us, int(time.time() * 1e6))
        self._count(sent)
        if self._ledger is not None:
            claims = [rows["partition"], sent.offsets, sequences, rows["timestamp"], content]
            if failure is not None:
                claims = [each.filter(pc.is_valid(sent.offsets)) for each in claims]
            self._ledger.add_rows(self._topic, *claims)
        if self._trace is not None:
            self._trace.add(self._traced(sent))

    def _count(self, sent: _Sent) -> None:
        acknowledged = len(sent.offsets) - sent.offsets.null_count
        self.tally.failed += sent.offsets.null_count
        if sent.failure is not None and len(self.tally.failures) < FAILURES_KEPT:
            self.tally.failures.append(str(sent.failure))
        if acknowledged:
            self.tally.acknowledged += acknowledged
            self.tally.bytes += pc.sum(sent.sizes.filter(pc.is_valid(sent.offsets))).as_py()
            self.tally.latencies_us.append(sent.done_us - sent.sent_us)
            self.tally.round_records.append(acknowledged)

    def _traced(self, sent: _Sent) -> pa.RecordBatch:
        """A row for each partition, and one more where some of its records failed."""
        columns = {"partition": sent.rows["partition"], "bytes": sent.sizes, "failed": pc.is_null(sent.offsets)}
        parts = pa.table(columns).group_by(["partition", "failed"]).aggregate([("bytes", "count"), ("bytes", "sum")])
        count, why = len(parts), pa.scalar(str(sent.failure), pa.string())
        return pa.RecordBatch.from_pydict(
            {
                "producer": pa.repeat(self._name, count),
                "topic": pa.repeat(self._topic, count),
                "partition": parts["partition"].combine_chunks(),
                "sent_at": pa.repeat(pa.scalar(sent.sent_us, pa.int64()), count).cast(TIMESTAMP_TYPE),
                "acknowledged_at": pa.repeat(pa.scalar(sent.done_us, pa.int64()), count).cast(TIMESTAMP_TYPE),
                "records": parts["bytes_count"].combine_chunks(),
                "bytes": parts["bytes_sum"].combine_chunks(),
                "error": pc.if_else(parts["failed"].combine_chunks(), why, pa.scalar(None, pa.string())),
            },
            schema=traces.SCHEMA,
        )


def _sizes(rows: pa.RecordBatch) -> Any:
    """Of keys and values."""
    sizes = pc.binary_length(rows["value"]).cast(pa.int64())
    return pc.add(sizes, pc.binary_length(rows["key"])) if "key" in rows.schema.names else sizes


@dataclass(frozen=True, slots=True)
class Latencies:
    """In milliseconds, over records: each has the latency of its batch."""

    mean: float
    p50: float
    p99: float
    p999: float


def latencies(tallies: list[Tally]) -> Latencies | None:
    took = np.array([each for tally in tallies for each in tally.latencies_us], dtype=np.float64) / 1000
    weights = np.array([each for tally in tallies for each in tally.round_records], dtype=np.int64)
    if not len(took):
        return None
    order = np.argsort(took)
    below = np.cumsum(weights[order])
    at = [took[order][np.searchsorted(below, share * below[-1])] for share in (0.5, 0.99, 0.999)]
    return Latencies(float(np.average(took, weights=weights)), *(float(each) for each in at))
