"""Rows into topics: `df.write.format("headrace").mode("append")` and `df.writeStream.format("headrace")`.

Columns are those of Spark's Kafka sink: `value` (string or binary), and where they are there `key` (string or binary),
`topic` (string; option `topic` comes first), `headers` (array of key string, value binary), `partition` (int); also
`timestamp`. Other columns are left out. A null value is a tombstone; without a partition the key decides as in Kafka's
clients, and rows without either go to one partition after another.

**At least once.** Each task writes with an identity of its own under which the broker drops batches that a retry on the
wire repeats. But a task that Spark runs again, or a micro-batch repeated after a restart, writes its rows once more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headrace.client.cluster import Cluster, UnknownTopic
from headrace.client.produce import Outgoing, ProducerId, init_producer_id, produce
from headrace.errors import HeadraceError, SettingError
from headrace.records.arrow import build, partitions_of
from headrace.records.codecs import Codec
from headrace.spark import options
from headrace.spark.connections import cluster_at

BATCH_BYTES: Final = 256 << 10
ROUND_BYTES: Final = 4 << 20

_ROW_OVERHEAD_BYTES: Final = 20
_SEQUENCE_MASK: Final = 0x7FFFFFFF
_TEXT_OR_BYTES: Final = ("string", "binary")
_TYPES: Final = {
    "topic": ("string",),
    "key": _TEXT_OR_BYTES,
    "value": _TEXT_OR_BYTES,
    "headers": ("array<struct<key:string,value:binary>>",),
    "partition": ("int",),
    "timestamp": ("timestamp",),
}
_SENT: Final = ("key", "value", "headers", "timestamp")


@dataclass(frozen=True, slots=True)
class SinkOptions:
    bootstrap: str
    topic: str
    codec: Codec
    timeout_ms: int


def parse(given: Mapping[str, str]) -> SinkOptions:
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
    return SinkOptions(options.bootstrap(given), given.get("topic", ""), codecs[name], timeout_ms)


def check_schema(rows: StructType, chosen: SinkOptions) -> None:
    """SettingError unless rows of this schema can be written."""
    found = {field.name: field.dataType.simpleString() for field in rows}
    if "value" not in found:
        raise SettingError(f"there is no column 'value' to write, only {', '.join(found) or 'none'}")
    if not chosen.topic and "topic" not in found:
        raise SettingError("no topic to write to: set option topic, or have a column 'topic'")
    for name, types in _TYPES.items():
        if name in found and found[name] not in types:
            raise SettingError(f"column {name!r} is {found[name]}; to be written it has to be {' or '.join(types)}")


@dataclass
class Written(WriterCommitMessage):
    rows: int


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, chosen: SinkOptions, rows: StructType, overwrite: bool) -> None:
        if overwrite:
            raise SettingError("a topic cannot be overwritten, only added to: use mode append")
        check_schema(rows, chosen)
        check_topic(chosen)
        self._options = chosen

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return write(self._options, iterator)


class StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, chosen: SinkOptions, rows: StructType, overwrite: bool) -> None:
        if overwrite:
            raise SettingError("a topic cannot be overwritten, only added to: use output mode append or update")
        check_schema(rows, chosen)
        self._options = chosen

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return write(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing is left to do: rows are in their topics when their task ends."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """What was written stays; the batch is written again when the query goes on."""


def check_topic(chosen: SinkOptions) -> None:
    """That the broker answers and has the topic, or makes it, before any task runs."""
    with cluster_at(chosen.bootstrap, chosen.timeout_ms) as cluster:
        if chosen.topic:
            cluster.topic(chosen.topic, create=True)


def write(chosen: SinkOptions, batches: Iterator[pa.RecordBatch]) -> Written:
    with cluster_at(chosen.bootstrap, chosen.timeout_ms, patient=True) as cluster:
        sender = Sender(cluster, chosen)
        for rows in batches:
            sender.add(rows)
        sender.flush()
    return Written(sender.rows)


class Sender:
    """The rows of one task, cut into record batches and sent in rounds."""

    def __init__(self, cluster: Cluster, chosen: SinkOptions) -> None:
        self.rows = 0
        self._cluster = cluster
        self._options = chosen
        self._identity: ProducerId | None = None
        self._sequences: dict[tuple[str, int], int] = {}
        self._ready: list[Outgoing] = []
        self._ready_bytes = 0
        self._turn = random.randrange(1 << 16)

    def add(self, rows: pa.RecordBatch) -> None:
        for topic, chosen in self._by_topic(rows):
            count = len(self._cluster.topic(topic, create=True).partitions)
            targets = self._targets(chosen, topic, count)
            sent = chosen.select([name for name in _SENT if name in chosen.schema.names])
            for partition in pc.unique(targets).to_pylist():
                self._cut(topic, partition, sent.filter(pc.equal(targets, partition)))

    def _by_topic(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._options.topic:
            yield self._options.topic, rows
            return
        topics = rows["topic"]
        if topics.null_count:
            raise SettingError("a row has a null topic; set option topic, or give every row one")
        for topic in pc.unique(topics).to_pylist():
            yield topic, rows.filter(pc.equal(topics, topic))

    def _targets(self, rows: pa.RecordBatch, topic: str, count: int) -> pa.Array:
        names = rows.schema.names
        self._turn += 1
        found = pa.array(np.full(len(rows), self._turn % count, np.int32))
        if "key" in names:
            found = pc.coalesce(partitions_of(rows["key"], count), found)
        if "partition" in names:
            found = pc.coalesce(rows["partition"], found)
            wrong = found.filter(pc.or_(pc.less(found, 0), pc.greater_equal(found, count)))
            if len(wrong):
                raise UnknownTopic(topic, wrong[0].as_py(), count)
        return found

    def _cut(self, topic: str, partition: int, rows: pa.RecordBatch) -> None:
        """Record batches of about `BATCH_BYTES`; a row that is larger has one to itself."""
        ends = np.cumsum(_row_bytes(rows))
        start, before = 0, 0
        while start < len(rows):
            end = max(start + 1, int(np.searchsorted(ends, before + BATCH_BYTES, side="right")))
            self._build(topic, partition, rows.slice(start, end - start))
            start, before = end, int(ends[end - 1])

    def _build(self, topic: str, partition: int, rows: pa.RecordBatch) -> None:
        if self._identity is None:
            self._identity = init_producer_id(self._cluster)
        sequence = self._sequences.get((topic, partition), 0)
        batch = build(
            rows,
            self._options.codec,
            now_ms=time.time_ns() // 1_000_000,
            producer_id=self._identity.producer_id,
            producer_epoch=self._identity.producer_epoch,
            base_sequence=sequence,
        )
        self._sequences[topic, partition] = sequence + len(rows) & _SEQUENCE_MASK
        self._ready.append(Outgoing(topic, partition, batch))
        self._ready_bytes += len(batch)
        self.rows += len(rows)
        if self._ready_bytes >= ROUND_BYTES:
            self.flush()

    def flush(self) -> None:
        sent, self._ready, self._ready_bytes = self._ready, [], 0
        for answer in produce(self._cluster, sent, timeout_ms=self._options.timeout_ms) if sent else ():
            if isinstance(answer, HeadraceError):
                raise answer


def _row_bytes(rows: pa.RecordBatch) -> Any:
    """About how many bytes each row takes in a record batch; headers by their share of all."""
    sizes = np.full(len(rows), _ROW_OVERHEAD_BYTES, np.int64)
    for name in ("key", "value"):
        if name in rows.schema.names:
            sizes += pc.fill_null(pc.binary_length(rows[name]), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    if "headers" in rows.schema.names and len(rows):
        sizes += rows["headers"].nbytes // len(rows)
    return sizes
