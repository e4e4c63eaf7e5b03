"""Writing Arrow rows to a topic: every row is told the partition and offset under which it was acknowledged.

Batches carry a producer id and sequence numbers, so that one that is sent again is kept once, and in its order. A
broker remembers where the last five batches of a producer went, and no more are under way to a partition at a time:
also an answer to a batch that was sent twice gives its offset. Batches are built in the caller's thread while those
before them travel in another.

In a `Transaction` (see `arrow.transaction`) all batches of a writer have its identity. One that fails ends it.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa

from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.admin.produce import ACKS_ALL, ACKS_NONE, Produced, ProducerId, init_producer_id, produce
from headrace.client.connection.tls import Tls
from headrace.client.errors import Refusal, TransactionFailed
from headrace.client.producer.request import Outgoing
from headrace.errors import ErrorCode, HeadraceError
from headrace.records.arrow import Builder, Offsets, by_partition, spread
from headrace.records.codecs import Codec

WRITTEN: Final = pa.schema([("partition", pa.int32()), ("offset", pa.int64())])

BATCH_BYTES: Final = 512 << 10
ROUND_BYTES: Final = 8 << 20
ROUND_BATCHES: Final = 5
"""Of one partition."""
ROUNDS_WAITING: Final = 2
SPREAD_ROWS: Final = 1_000

_SEQUENCE_MASK: Final = 0x7FFFFFFF


class WriteFailed(HeadraceError):
    """Some rows were not acknowledged. `written` has partition and offset of each row, null where there is none."""

    def __init__(self, cause: HeadraceError, written: pa.RecordBatch, topic: str) -> None:
        count = written["offset"].null_count
        super().__init__(f"{count} of {len(written)} rows for topic {topic!r} were not acknowledged: {cause}")
        self.mapping = cause.mapping
        self.written = written


@dataclass(frozen=True, slots=True)
class TransactionIdentity:
    """In whose name batches are written that are part of a transaction."""

    transactional_id: str
    producer: ProducerId


@dataclass(frozen=True, slots=True)
class _Sent:
    outgoing: Outgoing
    first: int
    end: int
    """Places in the order of the rows."""


class Writer:
    """Sends to one topic. Use as a context manager, or close it; for one thread at a time."""

    def __init__(
        self,
        topic: str,
        *,
        bootstrap: str = DEFAULT_BOOTSTRAP,
        acks: int = ACKS_ALL,
        codec: Codec = Codec.NONE,
        batch_bytes: int = BATCH_BYTES,
        timeout_ms: int = 30_000,
        cluster: Cluster | None = None,
        is_lent: bool = False,
        tls: Tls = None,
        transaction: TransactionIdentity | None = None,
    ) -> None:
        """A broker that does not answer yet is waited for, as long as `timeout_ms`.

        A `cluster` that is given instead of its address belongs to the writer from then on, or, if it `is_lent`, until
        the writer is closed. `tls` is a producer's. A `transaction` is ended by whoever opened it.
        """
        self._topic = topic
        self._acks = acks
        self._codec = codec
        self._batch_bytes = batch_bytes
        self._timeout_ms = timeout_ms
        retry = Retry(within_ms=timeout_ms)
        self._cluster = Cluster(bootstrap, timeout_ms=timeout_ms, retry=retry, tls=tls) if cluster is None else cluster
        self._is_lent = is_lent
        if not is_lent:
            self._cluster.reach()
        # Whoever had the cluster before may have seen fewer partitions.
        self._partition_count = len(self._cluster.topic(topic, create=True, anew=is_lent).partitions)
        # All that follows with the cluster happens in this one thread, round after round.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"writer of {topic}")
        self._transaction = transaction
        self._identity: ProducerId | None = None if transaction is None else transaction.producer
        self._sequences: dict[int, int] = {}
        # Every task of a Spark job has a writer of its own: all beginning at the same turn would fill one partition.
        self._without_key = random.randrange(self._partition_count) * SPREAD_ROWS
        self._under_way: deque[Future[list[Produced | HeadraceError]]] = deque()
        self.failure: HeadraceError | None = None
        """Why rows were not acknowledged."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is under way, and let the connections go."""
        self._sender.shutdown()
        if not self._is_lent:
            self._cluster.close()

    def write(self, rows: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
        """Send rows of `value` and, where they are there, `key`, `headers`, `timestamp`, `partition`.

        A row goes to its `partition`, else where the hash of its key says, else to the partitions in turn. The answer
        has a row for each: `partition` and `offset` (null with acks 0). WriteFailed if some were not acknowledged.
        """
        return self.submit(rows).result()

    def submit(self, rows: pa.RecordBatch | pa.Table) -> Pending:
        """As `write`, without waiting for the answers: ask the result for them. Waits while too much is under way."""
        if isinstance(rows, pa.Table):
            rows = _whole(rows)
        if self.failure is not None:
            if self._transaction is not None:
                raise TransactionFailed(f"the transaction can only be aborted: {self.failure}", self.failure)
            # Rows that failed left a gap in their sequence: go on under a new identity.
            self.failure, self._identity = None, None
            self._sequences.clear()
        partitions = spread(rows, self._partition_count, self._without_key, SPREAD_ROWS)
        self._without_key += rows["key"].null_count if "key" in rows.schema.names else len(rows)
        order, starts = by_partition(partitions, self._partition_count)
        pending = Pending(self._topic, partitions, Offsets(order), self._acks)
        for round_ in self._rounds(Builder(rows, order, now_ms=time.time_ns() // 1_000_000), starts):
            if len(self._under_way) == ROUNDS_WAITING:
                self._under_way.popleft().result()
            answers = self._sender.submit(self._send, [sent.outgoing for sent in round_])
            self._under_way.append(answers)
            pending.rounds.append((round_, answers))
        return pending

    def flush(self) -> None:
        """Wait until everything is answered that is under way."""
        while self._under_way:
            self._under_way.popleft().result()

    def _rounds(self, builder: Builder, starts: list[int]) -> Iterator[list[_Sent]]:
        """What leaves at once: of each partition a few batches, until there are enough bytes."""
        places = [(partition, starts[partition]) for partition in range(self._partition_count)]
        while places := [(partition, at) for partition, at in places if at < starts[partition + 1]]:
            round_: list[_Sent] = []
            size, after = 0, []
            for partition, at in places:
                for _ in range(ROUND_BATCHES):
                    if at == starts[partition + 1] or size >= ROUND_BYTES:
                        break
                    batch = self._build(builder, partition, at, starts[partition + 1])
                    round_.append(_Sent(Outgoing(self._topic, partition, batch), at, at + builder.taken))
                    at += builder.taken
                    size += len(batch)
                after.append((partition, at))
            places = after[1:] + after[:1]
            yield round_

    def _build(self, builder: Builder, partition: int, first: int, end: int) -> bytearray:
        if self._acks == ACKS_NONE:
            return builder.build(first, end, self._batch_bytes, self._codec)
        if self._identity is None:
            self._identity = self._sender.submit(init_producer_id, self._cluster).result()
        sequence = self._sequences.get(partition, 0)
        batch = builder.build(
            first,
            end,
            self._batch_bytes,
            self._codec,
            producer_id=self._identity.producer_id,
            producer_epoch=self._identity.producer_epoch,
            base_sequence=sequence,
            transactional=self._transaction is not None,
        )
        self._sequences[partition] = sequence + builder.taken & _SEQUENCE_MASK
        return batch

    def _send(self, outgoing: list[Outgoing]) -> list[Produced | HeadraceError]:
        results = produce(
            self._cluster,
            outgoing,
            acks=self._acks,
            timeout_ms=self._timeout_ms,
            transactional_id=None if self._transaction is None else self._transaction.transactional_id,
        )
        self.failure = self.failure or next((each for each in results if isinstance(each, HeadraceError)), None)
        return results


class Pending:
    """Rows that are under way."""

    def __init__(self, topic: str, partitions: pa.Array, offsets: Offsets, acks: int) -> None:
        self.rounds: list[tuple[list[_Sent], Future[list[Produced | HeadraceError]]]] = []
        self._topic = topic
        self._partitions = partitions
        self._offsets = offsets
        self._acks = acks

    def result(self) -> pa.RecordBatch:
        """Partition and offset of each row, when all are acknowledged; else WriteFailed."""
        failure: HeadraceError | None = None
        for round_, answers in self.rounds:
            for sent, result in zip(round_, answers.result(), strict=True):
                wrong = self._settle(sent, result)
                failure = failure or wrong
        written = pa.RecordBatch.from_arrays([self._partitions, self._offsets.take()], schema=WRITTEN)
        if failure is not None:
            raise WriteFailed(failure, written, self._topic)
        return written

    def _settle(self, sent: _Sent, result: Produced | HeadraceError) -> HeadraceError | None:
        """Note the offsets of a batch, or say what went wrong."""
        if isinstance(result, HeadraceError):
            return result
        if result.base_offset >= 0:
            self._offsets.put(sent.first, sent.end, result.base_offset)
        elif self._acks != ACKS_NONE:
            told = "the broker has it already, and no longer says at which offsets"
            return Refusal(
                ErrorCode.DUPLICATE_SEQUENCE_NUMBER, f"batch for {self._topic}-{sent.outgoing.partition}", told
            )
        return None


def write(
    topic: str,
    rows: pa.RecordBatch | pa.Table | Iterable[pa.RecordBatch],
    *,
    bootstrap: str = DEFAULT_BOOTSTRAP,
    tls: Tls = None,
) -> int:
    """Send rows, a table or a stream of batches; how many were acknowledged, which is all of them."""
    batches = [rows] if isinstance(rows, pa.RecordBatch | pa.Table) else rows
    count = 0
    before: Pending | None = None
    with Writer(topic, bootstrap=bootstrap, tls=tls) as writer:
        for each in batches:
            pending = writer.submit(each)
            count += len(before.result()) if before is not None else 0
            before = pending
        return count + (len(before.result()) if before is not None else 0)


def _whole(table: pa.Table) -> pa.RecordBatch:
    """The table as one batch; its text and binary has to be below 2 GiB."""
    batches = table.combine_chunks().to_batches()
    if len(batches) > 1:
        raise ValueError(f"a table of {table.nbytes} bytes is too large for one write; send its batches one by one")
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=WRITTEN)
