"""A topic as confluent-kafka reads it and an archive as deltalake and pyarrow read it, to be compared. No Spark."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition
from deltalake import DeltaTable

from headrace.client.admin import groups
from headrace.client.admin.cluster import Cluster

FIRST_TIMESTAMP_MS = 1_700_000_000_000
READ_WITHIN_S = 60.0


class Row(NamedTuple):
    """One record, with all that both sides know of it; timestamps are in ms."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestampType: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] | None


def produce(bootstrap: str, topic: str, values: Iterable[bytes | None], partitions: int = 1) -> int:
    """Records of all kinds: with and without key, value and headers, over several days. How many."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "compression.type": "lz4"})
    count = 0
    for count, value in enumerate(values, 1):
        extra: dict[str, Any] = {"headers": [("n", b"%d" % count), ("none", None)]} if count % 3 == 0 else {}
        producer.produce(
            topic,
            value,
            key=None if count % 5 == 0 else b"key %d" % (count % 100),
            partition=count % partitions,
            timestamp=FIRST_TIMESTAMP_MS + count * 60_000,
            **extra,
        )
        if count % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(60) == 0
    return count


def values(count: int, seed: int = 0) -> list[bytes | None]:
    draw = random.Random(seed)
    return [
        None if n % 17 == 0 else b"" if n % 19 == 0 else draw.randbytes(draw.randrange(1, 60)) for n in range(count)
    ]


def topic_rows(bootstrap: str, topic: str) -> list[Row]:
    """All records of a topic, by partition and offset; retention may be at work meanwhile."""
    chosen = {"group.id": "unused", "enable.auto.commit": False, "enable.partition.eof": True}
    consumer = Consumer({"bootstrap.servers": bootstrap, "auto.offset.reset": "earliest", **chosen})
    waiting = set(consumer.list_topics(topic, timeout=30).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in waiting])
    rows = []
    deadline = time.monotonic() + READ_WITHIN_S
    while waiting:
        assert time.monotonic() < deadline, f"the ends of {waiting} do not come"
        # It returns when so many records are there or the time is up, and not before.
        for message in consumer.consume(10_000, timeout=0.1):
            if (error := message.error()) is None:
                rows.append(_row(message))
            else:
                assert error.code() == KafkaError._PARTITION_EOF
                waiting.discard(message.partition())
    consumer.close()
    return sorted(rows, key=lambda row: row[:3])


def _row(message: Any) -> Row:
    kind, at = message.timestamp()
    headers = tuple(message.headers() or ()) or None
    record = (message.key(), message.value(), headers)
    return Row(message.topic(), message.partition(), message.offset(), at, kind - 1, *record)


def records_table(archive: Path) -> pa.Table:
    return DeltaTable(str(archive / "records")).to_pyarrow_table()


def parquet_table(archive: Path) -> pa.Table:
    """A Parquet archive without regard to Spark's log: only for archives that nothing was killed in."""
    layout = ds.partitioning(pa.schema([("topic", pa.string()), ("date", pa.date32())]), flavor="hive")
    return ds.dataset(archive / "records", format="parquet", partitioning=layout).to_table()


def archive_rows(table: pa.Table, topic: str | None = None) -> list[Row]:
    """By topic, partition and offset, with the date checked."""
    if topic is not None:
        table = table.filter(pc.equal(table["topic"], topic))
    listed = table.to_pylist()
    assert all(each["timestamp"].date() == each["date"] for each in listed)
    return sorted_rows(listed)


def dead_rows(archive: Path) -> list[Row]:
    """By topic, partition and offset; a dead letter's timestamp is taken for its sender's."""
    if not DeltaTable.is_deltatable(str(archive / "dead_letters")):
        return []
    dead = DeltaTable(str(archive / "dead_letters")).to_pyarrow_table().to_pylist()
    return sorted_rows([{**each, "timestampType": 0} for each in dead])


def sorted_rows(listed: list[dict[str, Any]]) -> list[Row]:
    """By topic, partition and offset."""
    rows = []
    for each in listed:
        at: datetime.datetime = each["timestamp"]
        headers = each["headers"]
        rows.append(
            Row(
                each["topic"], each["partition"], each["offset"], round(at.timestamp() * 1000), each["timestampType"],
                each["key"], each["value"], headers and tuple((h["key"], h["value"]) for h in headers),
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: row[:3])


def committed(bootstrap: str, group: str = "headrace-archive") -> dict[tuple[str, int], int]:
    with Cluster(bootstrap) as cluster:
        return groups.fetch_offsets(cluster, group)


def orphans(archive: Path) -> list[Path]:
    """Files in the tables' folders that the tables do not name."""
    left = []
    for name in ("records", "dead_letters"):
        if (archive / name).exists():
            listed = pa.table(DeltaTable(str(archive / name)).get_add_actions())["path"].to_pylist()
            known = {archive / name / path for path in listed}
            left += [path for path in (archive / name).rglob("*.parquet") if path not in known]
    return left
