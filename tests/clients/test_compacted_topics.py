"""Compaction as a client sees it: soon after it has written, and without another write (librdkafka's case 0077)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from brokers import Broker, wait_for
from clients.topics import create_topic
from proving import proves

DEADLINE_S = 120.0
KEYS, ROUNDS = 3, 20


def read(broker: Broker, topic: str, end: int) -> dict[int, bytes | None]:
    """Key by offset, of all that is there below the end."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "reader", "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: dict[int, bytes | None] = {}
    try:
        while (message := consumer.poll(DEADLINE_S)) is not None and message.error() is None:
            offset = message.offset()
            assert offset is not None
            if offset < end:
                key = message.key()
                found[offset] = key if isinstance(key, bytes) else None
    finally:
        consumer.close()
    return found


@proves("J6")
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_topic_is_compacted_soon_and_for_its_age(fresh_broker: Callable[..., Broker], codec: str) -> None:
    broker = fresh_broker(settings={"retention.check.ms": 86_400_000, "log.cleaner.backoff.ms": 200})
    limits = {"segment_ms": 500, "segment_bytes": 1 << 20, "max_compaction_lag_ms": 100}
    topic = create_topic(
        broker, "states", cleanup_policy="compact", min_cleanable_dirty_ratio=0.9, delete_retention_ms=86_400, **limits
    )
    producer = Producer({"bootstrap.servers": broker.bootstrap, "compression.codec": codec, "linger.ms": 10})
    for nth in range(ROUNDS * KEYS):
        producer.produce(topic, b"%d" % nth, b"k%d" % (nth % KEYS), partition=0)
    assert not producer.flush(DEADLINE_S)
    end = ROUNDS * KEYS
    latest = {end - KEYS + n: b"k%d" % n for n in range(KEYS)}
    wait_for("compaction", lambda: read(broker, topic, end) == latest, DEADLINE_S)
