"""Rows into topics: `df.write.format("headrace").mode("append")` and `df.writeStream.format("headrace")`.

Columns are those of Spark's Kafka sink: `value` (string or binary), and where they are there `key` (string or binary),
`topic` (string; option `topic` comes first), `headers` (array of key string, value binary), `partition` (int); also
`timestamp`. Other columns are left out. A null value is a tombstone; without a partition the key decides as in Kafka's
clients, and rows without either go to one partition after another.

**At least once.** Each task writes with an identity of its own under which the broker drops batches that a retry on the
wire repeats. But a task that Spark runs again, or a micro-batch repeated after a restart, writes its rows once more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headrace.arrow.write import Pending, Writer
from headrace.errors import SettingError
from headrace.records.codecs import Codec
from headrace.spark import options
from headrace.spark.connections import cluster_at

UNDER_WAY_MAX: Final = 2

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
    """Send the rows of a task; it ends when all are acknowledged."""
    writers: dict[str, Writer] = {}
    under_way: deque[Pending] = deque()
    count = 0
    with ExitStack() as opened:
        for rows in batches:
            for topic, mine in _by_topic(rows, chosen.topic):
                if topic not in writers:
                    writers[topic] = opened.enter_context(_writer(chosen, topic))
                under_way.append(writers[topic].submit(mine))
                if len(under_way) > UNDER_WAY_MAX:
                    count += len(under_way.popleft().result())
        count += sum(len(pending.result()) for pending in under_way)
    return Written(count)


def _writer(chosen: SinkOptions, topic: str) -> Writer:
    # The address was right when the query was planned.
    return Writer(topic, bootstrap=chosen.bootstrap, codec=chosen.codec, timeout_ms=chosen.timeout_ms)


def _by_topic(rows: pa.RecordBatch, topic: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    sent = rows.select([name for name in _SENT if name in rows.schema.names])
    if topic:
        yield topic, sent
        return
    topics = rows["topic"]
    if topics.null_count:
        raise SettingError("a row has a null topic; set option topic, or give every row one")
    for name in pc.unique(topics).to_pylist():
        yield name, sent.filter(pc.equal(topics, name))
