"""Rows into topics: `df.write.format("headrace").mode("append")` and `df.writeStream.format("headrace")`.

Columns are those of Spark's Kafka sink: `value` (string or binary), and where they are there `key` (string or binary),
`topic` (string; option `topic` comes first), `headers` (array of key string, value binary), `partition` (int); also
`timestamp`. Other columns are left out. A null value is a tombstone; without a partition the key decides as in Kafka's
clients, and rows without either go to one partition after another.

**Exactly once**, for readers of committed records. Each attempt at a task writes in a two-phase transaction of its own;
the driver commits those of the attempts that count, as it was decided once (see `sink_commits`). A batch that is run
again, after whatever died, finds the decision.

**At least once** with `delivery=at-least-once`, and, with a warning, where the broker knows no two-phase transactions
and nothing was asked for: each task writes with an identity of its own under which the broker drops batches that a
retry on the wire repeats. But a task that Spark runs again, or a micro-batch repeated after a restart, writes its rows
once more. A broker that has such transactions and refuses them is an error, unless at least once was asked for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headrace.arrow.large_row import name_large_row
from headrace.arrow.transaction import Transaction
from headrace.arrow.write import Pending, WriteFailed, Writer
from headrace.client.admin.cluster import Cluster
from headrace.client.errors import TransactionFailed
from headrace.client.producer.transaction_requests import PreparedTransaction
from headrace.errors import ErrorCode, HeadraceError, OperatorError, SettingError
from headrace.records.codecs import Codec
from headrace.spark import decision_log, options, sink_commits, task_batch
from headrace.spark.connections import begin_task, cluster_at
from headrace.spark.decisions import NO_RUN, WRITE, Batch, Verdict, judge

log = logging.getLogger(__name__)

UNDER_WAY_MAX: Final = 2
NO_TASK: Final = -1
EXACTLY_ONCE: Final = "exactly-once"
AT_LEAST_ONCE: Final = "at-least-once"

_TEXT_OR_BYTES: Final = ("string", "binary")
_TYPES: Final = {
    "topic": ("string",),
    "key": _TEXT_OR_BYTES,
    "value": _TEXT_OR_BYTES,
    "headers": ("array<struct<key:string,value:binary>>",),
    "partition": ("int",),
    "timestamp": ("timestamp",),
}
_SENT: Final = ("key", "value", "headers", "timestamp", "partition")
_NOT_KNOWN: Final = "the broker has no two-phase transactions"
_REFUSED: Final = (
    "the broker allows no two-phase transactions (transaction.two.phase.commit.enable), or not to this client"
)

Send = Callable[[str, pa.RecordBatch], Pending]


@dataclass(frozen=True, slots=True)
class SinkOptions:
    bootstrap: str
    topic: str
    codec: Codec
    timeout_ms: int
    delivery: str | None = None
    """None: exactly once, unless the broker knows nothing of it."""
    write_id: str = ""
    batch_id: int | None = None
    """Of several writes under one name, one after the other: the batches of a stream."""
    checkpoint: str = ""
    """Of the stream that is written, or of which a batch is."""


def parse(given: Mapping[str, str], *, streaming: bool = False) -> SinkOptions:
    given = {key.lower(): value for key, value in given.items() if value is not None}
    options.refuse_unknown(given, options.OF_SINK, options.IGNORED_BY_SINK)
    codecs = {codec.name.lower(): codec for codec in Codec}
    name = given.get("kafka.compression.type", "none").lower()
    if name not in codecs:
        raise SettingError(f"option kafka.compression.type={name!r} is not understood; write {', '.join(codecs)}")
    acks = given.get("kafka.acks", "all")
    if acks not in ("all", "-1"):
        raise SettingError(f"option kafka.acks={acks} is not served: what is written is always acknowledged; write all")
    timeout_ms = options.duration_ms(given, "timeout", options.DEFAULT_TIMEOUT_MS)
    delivery = options.choice(given, "delivery", (EXACTLY_ONCE, AT_LEAST_ONCE)) if "delivery" in given else None
    write_id = given.get("writeid", "")
    batch_id = options.read(given, "batchId", None, options.count, "a number from 0 on, as foreachBatch has it")
    if write_id and streaming:
        raise SettingError("option writeId is for batch writes: a stream is known by its checkpoint")
    if batch_id is not None and not write_id:
        raise SettingError("option batchId numbers the writes of one name: give that with option writeId")
    if batch_id is not None and "checkpointlocation" not in given:
        raise SettingError(
            "option batchId needs checkpointLocation, that of the stream: by it a batch that is run again is told from "
            "another one of its number"
        )
    if write_id and delivery == AT_LEAST_ONCE:
        raise SettingError("option writeId needs delivery=exactly-once: at least once nothing is remembered of a write")
    if write_id:
        delivery = EXACTLY_ONCE
    topic = given.get("topic", "")
    checkpoint = given.get("checkpointlocation", "")
    bootstrap = options.bootstrap(given)
    return SinkOptions(bootstrap, topic, codecs[name], timeout_ms, delivery, write_id, batch_id, checkpoint)


def check_schema(rows: StructType, chosen: SinkOptions) -> None:
    """SettingError unless rows of this schema can be written."""
    found = {field.name: field.dataType.simpleString() for field in rows}
    if "value" not in found:
        raise SettingError(
            f"there is no column 'value' to write, only {', '.join(found) or 'none'}: make one, such as "
            "df.selectExpr('to_json(struct(*)) as value')"
        )
    if not chosen.topic and "topic" not in found:
        raise SettingError("no topic to write to: set option topic, or have a column 'topic'")
    for name, types in _TYPES.items():
        if name in found and found[name] not in types:
            raise SettingError(
                f"column {name!r} is {found[name]}; to be written it has to be {' or '.join(types)}: cast it, or "
                "drop it if it is not meant"
            )


@dataclass
class Written(WriterCommitMessage):
    rows: int
    batch: Batch | None = None
    """None at least once."""
    prepared: PreparedTransaction | None = None
    """None where the batch was decided before, and where there were no rows."""


class BatchWriter(DataSourceArrowWriter):
    """Pickled, for tasks and for the commit: what is drawn here is the same for all of them."""

    def __init__(self, chosen: SinkOptions, rows: StructType, overwrite: bool) -> None:
        if overwrite:
            raise SettingError("a topic cannot be overwritten, only added to: use mode append")
        check_schema(rows, chosen)
        self._options = chosen
        self._plan = "" if chosen.batch_id is None else _plan_of_named(chosen.checkpoint, chosen.batch_id)
        batch = Batch(_write_name(chosen), str(uuid.uuid4()), chosen.batch_id or 0)
        self._batch = batch if prepare_batch(chosen, batch) else None
        """None at least once."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return write(self._options, iterator, self._batch)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        prepared = _prepared(messages)
        if self._batch is None:
            return
        if not prepared and not self._options.write_id:
            # Nothing is to be seen of it, also nothing that attempts have left.
            self.abort(messages)
            return
        _commit(self._options, self._batch, prepared, self._plan, last=not self._options.write_id)
        # No other batch has its run; the process may live on for many writes.
        sink_commits.let_go(self._options.bootstrap, self._batch)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        if self._batch is not None:
            _abort(self._options, self._batch, messages, last=not self._options.write_id)


def _write_name(chosen: SinkOptions) -> str:
    """A name is of a write to a topic: a job may give its own to several."""
    return f"{WRITE}{chosen.write_id}@{chosen.topic}" if chosen.write_id else f"{WRITE}{uuid.uuid4()}"


class StreamWriter(DataSourceStreamArrowWriter):
    """Made anew for every commit: who the query is comes with the messages of its tasks."""

    def __init__(self, chosen: SinkOptions, rows: StructType, overwrite: bool) -> None:
        if overwrite:
            raise SettingError("a topic cannot be overwritten, only added to: use output mode append or update")
        check_schema(rows, chosen)
        self._options = chosen

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return write(self._options, iterator, None if self._options.delivery == AT_LEAST_ONCE else _stream_batch())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Also of a batch without rows: run again it may have none any more, and those of its first run are decided, or
        left open."""
        chosen, batch, prepared = self._options, _batch_of(messages), _prepared(messages)
        if chosen.delivery == AT_LEAST_ONCE:
            return
        if is_plain := _is_plain(messages):
            _warn_once()
        if batch is not None and (prepared or (not is_plain and _can_commit(chosen, batch))):
            _commit(chosen, batch, prepared, _plan_at(chosen.checkpoint, batchId), last=False)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """A query that is stopped in the middle of a batch has no messages: then its checkpoint tells which it is."""
        chosen, batch, prepared = self._options, _batch_of(messages), _prepared(messages)
        if chosen.delivery == AT_LEAST_ONCE or (_is_plain(messages) and not prepared):
            return
        try:
            batch = batch or Batch(_query_at(chosen.checkpoint), NO_RUN, batchId)
            if prepared or _can_commit(chosen, batch):
                _abort(chosen, batch, messages, last=False)
        except (HeadraceError, OSError, ValueError, KeyError) as error:
            if prepared:
                raise
            log.warning("what the tasks of this batch have left is ended when the query goes on: %s", error)


def _stream_batch() -> Batch:
    query, run, number = task_batch.told(task_batch.QUERY_ID, task_batch.RUN_ID, task_batch.BATCH_ID)
    return Batch(query, run, int(number))


def _batch_of(messages: Iterable[WriterCommitMessage | None]) -> Batch | None:
    return next((each.batch for each in messages if isinstance(each, Written) and each.batch is not None), None)


def _is_plain(messages: Iterable[WriterCommitMessage | None]) -> bool:
    """Whether rows were written without a transaction."""
    return any(each.batch is None for each in messages if isinstance(each, Written))


def _prepared(messages: Iterable[WriterCommitMessage | None]) -> list[PreparedTransaction]:
    return [each.prepared for each in messages if isinstance(each, Written) and each.prepared is not None]


def _commit(chosen: SinkOptions, batch: Batch, prepared: list[PreparedTransaction], plan: str, *, last: bool) -> None:
    sink_commits.commit(
        chosen.bootstrap,
        batch,
        prepared,
        last=last,
        timeout_ms=chosen.timeout_ms,
        plan=plan,
        is_named=bool(chosen.write_id),
    )


def _abort(chosen: SinkOptions, batch: Batch, messages: Iterable[WriterCommitMessage | None], *, last: bool) -> None:
    sink_commits.abort(chosen.bootstrap, batch, _prepared(messages), last=last, timeout_ms=chosen.timeout_ms)


def _query_at(checkpoint: str) -> str:
    """The id that Spark keeps in a checkpoint, if this process can read it."""
    return str(json.loads(_kept(checkpoint, "metadata"))["id"])


def _plan_at(checkpoint: str, batch: int) -> str:
    """A digest of where the sources of a batch end, by Spark's log of offsets: a version, a line about the query, and
    one for each source. A batch that is run again is not planned anew. Empty if this process cannot read it."""
    if not checkpoint:
        return ""
    try:
        return _digest(*_planned(checkpoint, batch))
    except (OSError, ValueError) as error:
        log.info("of batch %d is not known what Spark has planned: %s", batch, error)
        return ""


def _plan_of_named(checkpoint: str, batch: int) -> str:
    """The same of a batch that is written under a name, and of which stream it is: another one may come with the name.
    SettingError if it cannot be read."""
    try:
        return _digest(_query_at(checkpoint).encode(), *_planned(checkpoint, batch))
    except (OSError, ValueError, KeyError) as error:
        raise SettingError(
            f"option checkpointLocation={checkpoint!r} has no offsets of a batch {batch}: give the place of the stream "
            f"in whose foreachBatch this is written ({error})"
        ) from None


def _planned(checkpoint: str, batch: int) -> list[bytes]:
    return _kept(checkpoint, f"offsets/{batch}").splitlines()[2:]


def _digest(*lines: bytes) -> str:
    return hashlib.sha256(b"\n".join(lines)).hexdigest()[:16]


def _kept(checkpoint: str, name: str) -> bytes:
    if "://" in checkpoint:
        files, path = pa_fs.FileSystem.from_uri(checkpoint)
    else:
        files, path = pa_fs.LocalFileSystem(), checkpoint.removeprefix("file:")
    with files.open_input_stream(f"{path.rstrip('/')}/{name}") as file:
        found: bytes = file.read()
        return found


def prepare_batch(chosen: SinkOptions, batch: Batch) -> bool:
    """That the broker answers and has the topic, or makes it, before any task runs; whether it has transactions for
    the batch, if they are wanted."""
    with cluster_at(chosen.bootstrap, chosen.timeout_ms) as cluster:
        if chosen.topic:
            cluster.topic(chosen.topic, create=True)
        if chosen.delivery == AT_LEAST_ONCE:
            return False
        has_transactions = _has_transactions(cluster, chosen, batch)
        if not has_transactions:
            _warn_once()
        return has_transactions


def _has_transactions(cluster: Cluster, chosen: SinkOptions, batch: Batch) -> bool:
    transaction = _begin(cluster, chosen, batch.transactional_id(NO_TASK, 0))
    if transaction is not None:
        transaction.abort()
    return transaction is not None


def _can_commit(chosen: SinkOptions, batch: Batch) -> bool:
    """Whether a batch without rows has a driver, or may have one."""
    if chosen.delivery == EXACTLY_ONCE or sink_commits.is_driven(chosen.bootstrap, batch):
        return True
    with cluster_at(chosen.bootstrap, chosen.timeout_ms, patient=True) as cluster:
        return _has_transactions(cluster, chosen, batch)


def write(chosen: SinkOptions, batches: Iterator[pa.RecordBatch], batch: Batch | None = None) -> Written:
    """Send the rows of a task; it ends when all are acknowledged. In a transaction, if it is told of which batch."""
    begin_task()
    first = next((rows for rows in batches if len(rows)), None)
    if first is None:
        return Written(0, batch)
    rest = _chain(first, batches)
    if batch is None:
        return _write_plainly(chosen, rest)
    with _reach(chosen) as cluster, _reach(chosen) as for_rows:
        transaction = _begin(cluster, chosen, _attempt_id(batch), for_rows)
        if transaction is not None:
            return _write_in(transaction, cluster, chosen, rest, batch)
    return _write_plainly(chosen, rest)


def _reach(chosen: SinkOptions) -> AbstractContextManager[Cluster]:
    """The address was right when the query was planned."""
    return cluster_at(chosen.bootstrap, chosen.timeout_ms, patient=True)


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _attempt_id(batch: Batch) -> str:
    context = TaskContext.get()
    assert context is not None, "only a task of Spark has rows to write"
    return batch.transactional_id(context.partitionId(), context.taskAttemptId())


def _begin(cluster: Cluster, chosen: SinkOptions, name: str, for_rows: Cluster | None = None) -> Transaction | None:
    """A transaction; None where the broker knows none, and it was not asked for. One that refuses is told: who asks for
    nothing is to have each row once too."""
    try:
        return Transaction(name, codec=chosen.codec, timeout_ms=chosen.timeout_ms, cluster=cluster, for_rows=for_rows)
    except HeadraceError as error:
        if error.kafka_code == ErrorCode.UNSUPPORTED_VERSION:
            if chosen.delivery is None:
                return None
            told = _NOT_KNOWN
        elif error.kafka_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            told = _REFUSED
        else:
            raise
        asked = "what is the default, exactly once,"
        if chosen.delivery is not None:
            asked = f"option writeId={chosen.write_id!r}" if chosen.write_id else f"option delivery={EXACTLY_ONCE}"
        raise OperatorError(f"{asked} cannot be: {told}: {error}; delivery={AT_LEAST_ONCE} does without") from None


def _write_in(
    transaction: Transaction, cluster: Cluster, chosen: SinkOptions, rows: Iterator[pa.RecordBatch], batch: Batch
) -> Written:
    """The order matters: a driver that has decided looks for ids of attempts after that. So one that is not seen sees
    the decision."""
    with transaction as t:
        known = decision_log.read(cluster, batch.query, chosen.timeout_ms)
        if judge(known, batch) is not Verdict.OPEN:
            return Written(0, batch)
        count = _send(rows, chosen, t.submit)
        return Written(count, batch, t.prepare())


def _write_plainly(chosen: SinkOptions, rows: Iterator[pa.RecordBatch]) -> Written:
    writers: dict[str, Writer] = {}
    with ExitStack() as opened:

        def submit(topic: str, mine: pa.RecordBatch) -> Pending:
            if topic not in writers:
                cluster = opened.enter_context(_reach(chosen))
                writer = Writer(topic, codec=chosen.codec, timeout_ms=chosen.timeout_ms, cluster=cluster, is_lent=True)
                writers[topic] = opened.enter_context(writer)
            return writers[topic].submit(mine)

        return Written(_send(rows, chosen, submit))


def _send(batches: Iterator[pa.RecordBatch], chosen: SinkOptions, submit: Send) -> int:
    """How many rows were acknowledged, which is all of them."""
    under_way: deque[tuple[str, pa.RecordBatch, Pending]] = deque()
    count = 0
    try:
        for rows in batches:
            for name, mine in _by_topic(rows, chosen.topic):
                under_way.append((name, mine, submit(name, mine)))
                if len(under_way) > UNDER_WAY_MAX:
                    count += _acknowledged(chosen, *under_way.popleft())
    except TransactionFailed:
        # What failed before says more of it.
        for sent in under_way:
            _acknowledged(chosen, *sent)
        raise
    return count + sum(_acknowledged(chosen, *sent) for sent in under_way)


def _acknowledged(chosen: SinkOptions, topic: str, rows: pa.RecordBatch, pending: Pending) -> int:
    try:
        return len(pending.result())
    except WriteFailed as failed:
        with cluster_at(chosen.bootstrap, chosen.timeout_ms) as cluster:
            name_large_row(cluster, topic, rows, failed, _of_frame)
        raise


def _of_frame(_: int) -> str:
    context = TaskContext.get()
    return f"a row of partition {context.partitionId()} of the frame" if context else "a row"


def _names(rows: pa.RecordBatch) -> list[str]:
    names: list[str] = rows.schema.names
    return names


def _by_topic(rows: pa.RecordBatch, topic: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    sent = rows.select([name for name in _SENT if name in _names(rows)])
    if topic:
        yield topic, sent
        return
    topics = rows["topic"]
    if topics.null_count:
        raise SettingError("a row has a null topic; set option topic, or give every row one")
    for name in pc.unique(topics).to_pylist():
        yield name, sent.filter(pc.equal(topics, name))


_warned: Final[list[bool]] = []


def _warn_once() -> None:
    """By the driver, in the process that plans and commits."""
    if not _warned:
        _warned.append(True)
        told = "headrace: %s: rows are written at least once; option delivery=%s says that this is meant"
        log.warning(told, _NOT_KNOWN, AT_LEAST_ONCE)
