"""Topics written and read by confluent-kafka, as rows to compare with Spark's."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from brokers import Broker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
START_MS = 1_700_000_000_000
Headers = Sequence[tuple[str, bytes | None]]
Row = tuple[Any, ...]
"""topic, partition, offset, key, value, headers or None, timestamp in ms, timestamp type"""


def create_topic(broker: Broker, partitions: int = 1, name: str = "", **config: object) -> str:
    """A topic of a name that no other has; settings are named with underscores for dots."""
    name = name or f"topic-{uuid.uuid4().hex[:12]}"
    settings = {key.replace("_", "."): str(value) for key, value in config.items()}
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, partitions, 1, config=settings)])[name].result(30)
    return name


def delete_topic(broker: Broker, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.delete_topics([name])[name].result(30)


def send(broker: Broker, topic: str, records: Iterable[dict[str, Any]], **settings: object) -> None:
    """Records as the arguments of confluent's produce(); all are acknowledged when this returns."""
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5, **settings})
    failed: list[Any] = []
    for record in records:
        producer.produce(topic, **record, on_delivery=lambda error, _: failed.append(error) if error else None)
    assert producer.flush(30) == 0
    assert failed == []


def numbered(count: int, first: int = 0, **more: Any) -> list[dict[str, Any]]:
    return [{"key": b"k%d" % n, "value": b"v%d" % n, **more} for n in range(first, first + count)]


def odd_records() -> list[dict[str, Any]]:
    """Nulls, empty values, tombstones, headers of all kinds, times out of order."""
    return [
        {"key": None, "value": b"no key", "timestamp": START_MS + 50},
        {"key": b"k", "value": None, "timestamp": START_MS + 10},
        {"key": b"", "value": b"", "timestamp": START_MS + 90},
        {"key": None, "value": None, "timestamp": START_MS + 20},
        {"key": b"k", "value": b"v" * 5000, "headers": [("a", b"1"), ("a", b"2")], "timestamp": START_MS + 30},
        {"key": b"\xff\x00", "value": b"\xfe" * 10, "headers": [("null", None), ("empty", b"")]},
        {"key": b"k", "value": "ünïcode".encode(), "headers": [("ключ", "значение".encode())]},
    ]


def rows_of(broker: Broker, *topics: str) -> list[Row]:
    """Every record that the topics have now, in order."""
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": "confluent-rows",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
    }
    consumer = Consumer(settings)
    try:
        known = consumer.list_topics(timeout=30).topics
        places = [TopicPartition(topic, n, 0) for topic in topics for n in known[topic].partitions]
        consumer.assign(places)
        rows: list[Row] = []
        ended: set[tuple[object, object]] = set()
        while len(ended) < len(places):
            message = consumer.poll(30)
            assert message is not None, "nothing came within 30 s"
            error = message.error()
            if error is None:
                rows.append(_row(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add((message.topic(), message.partition()))
            else:
                raise AssertionError(error)
        return sorted(rows, key=lambda row: row[:3])
    finally:
        consumer.close()


def _row(message: Any) -> Row:
    kind, time_ms = message.timestamp()
    headers = message.headers()
    place = (message.topic(), message.partition(), message.offset())
    return (*place, message.key(), message.value(), tuple(headers) if headers else None, time_ms, kind - 1)


def rows_in(frame: DataFrame) -> list[Row]:
    """The same of a DataFrame of our source with headers."""
    times = frame.selectExpr(
        "topic", "partition", "offset", "key", "value", "headers", "unix_millis(timestamp)", "timestampType"
    )
    found = [
        (*row[:3], _bytes(row[3]), _bytes(row[4]), _headers(row[5]), *row[6:]) for row in map(tuple, times.collect())
    ]
    return sorted(found, key=lambda row: row[:3])


def _bytes(value: bytearray | bytes | None) -> bytes | None:
    return None if value is None else bytes(value)


def _headers(headers: list[Any] | None) -> tuple[tuple[str, bytes | None], ...] | None:
    return None if headers is None else tuple((each["key"], _bytes(each["value"])) for each in headers)
