"""Topics for tests of SQL and jobs: written and read back by an independent client."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

DEADLINE_S = 120.0


def new_name(stem: str) -> str:
    """A topic name of its own that needs no quotes in SQL."""
    return f"{stem}_{uuid.uuid4().hex[:8]}"


def create(bootstrap: str, topic: str, partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(DEADLINE_S)


def fill(bootstrap: str, topic: str, values: Iterable[Any], key: str = "", headers: Any = None) -> None:
    """Send values: bytes as they are, None as a tombstone, all else as JSON; the key is the field named."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    for value in values:
        sent = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
        its_key = str(value[key]).encode() if key and isinstance(value, dict) else None
        producer.produce(topic, sent, its_key, headers=headers)
    assert producer.flush(DEADLINE_S) == 0


def records(bootstrap: str, topic: str) -> list[Any]:
    """All messages that the topic has now, partition by partition; markers of transactions are among its offsets."""
    chosen = {"group.id": new_name("reader"), "enable.auto.commit": False, "enable.partition.eof": True}
    consumer = Consumer({"bootstrap.servers": bootstrap, **chosen})
    found = []
    for number in consumer.list_topics(topic, timeout=DEADLINE_S).topics[topic].partitions:
        low, _ = consumer.get_watermark_offsets(TopicPartition(topic, number), DEADLINE_S)
        consumer.assign([TopicPartition(topic, number, low)])
        while True:
            message = consumer.poll(DEADLINE_S)
            assert message is not None, f"{topic}-{number} does not come to its end"
            if (error := message.error()) is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                break
            found.append(message)
    consumer.close()
    return found


def json_values(bootstrap: str, topic: str) -> list[Any]:
    return [json.loads(message.value()) for message in records(bootstrap, topic)]
