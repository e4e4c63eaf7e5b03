"""Topics made, filled and read by confluent-kafka."""

from __future__ import annotations

import datetime
import uuid
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from brokers import Broker

NOW_MS = 1_700_000_000_000


def make_topic(broker: Broker, partitions: int = 2, **configs: str) -> str:
    name = f"arrow-{uuid.uuid4().hex[:10]}"
    settings = {key.replace("_", "."): value for key, value in configs.items()}
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, partitions, 1, config=settings)])[name].result(30)
    return name


def send(broker: Broker, topic: str, count: int, codec: str = "none", partitions: int = 2) -> None:
    """Records of all kinds: nulls, empty ones, headers; partition and number in the key."""
    producer = Producer({"bootstrap.servers": broker.bootstrap, "compression.type": codec, "linger.ms": 5})
    for n in range(count):
        producer.produce(
            topic,
            partition=n % partitions,
            key=[b"key-%d" % n, b"", None][n % 3],
            value=[b"value-%d" % n * 20, None, b""][n % 5 if n % 5 < 3 else 0],
            timestamp=NOW_MS + n,
            headers=[("trace", b"%d" % n), ("né", None), ("empty", b"")] if n % 4 == 0 else None,
        )
    assert producer.flush(30) == 0


def consumed(broker: Broker, topic: str, count: int, partitions: int = 2) -> list[dict[str, Any]]:
    """What confluent-kafka reads, as rows."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "none", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, n, 0) for n in range(partitions)])
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        for message in consumer.consume(count - len(rows), 10):
            assert message.error() is None
            kind, at_ms = message.timestamp()
            headers = [{"key": name, "value": value} for name, value in list(message.headers() or ())]
            rows.append({
                "key": message.key(), "value": message.value(), "topic": message.topic(),
                "partition": message.partition(), "offset": message.offset(),
                "timestamp": datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC),
                "timestampType": kind - 1, "headers": headers or None,
            })  # fmt: skip
    consumer.close()
    return sorted(rows, key=lambda row: (row["partition"], row["offset"]))
