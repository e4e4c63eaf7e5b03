"""The producer beside confluent-kafka: the same partitions for keys, and each reads what the other has written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import confluent_kafka
import pytest

from brokers import Broker, wait_for
from client.conftest import MakeTopic
from client.reading_back import read_topic
from headrace import Producer
from headrace.client.admin.cluster import Cluster
from proving import proves

PARTITIONS = 7
KEYS = 1_000
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
HEADERS: list[Any] = [("one", b"\x00\xff"), ("one", None), ("", b""), ("zwölf", b"x" * 300)]


def records(seed: int) -> list[tuple[bytes | None, bytes | None]]:
    rng = random.Random(seed)
    odd: list[tuple[bytes | None, bytes | None]] = [(None, None), (b"", b""), (b"k", None), (None, b"v" * 70_000)]
    return odd + [(rng.randbytes(rng.randrange(20)), rng.randbytes(rng.randrange(400))) for _ in range(100)]


def read_by_confluent(broker: Broker, topic: str, count: int) -> list[Any]:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": f"of-{topic}",
            "auto.offset.reset": "earliest",
            "check.crcs": True,
            "enable.auto.commit": False,
        }
    )
    places = [confluent_kafka.TopicPartition(topic, index, 0) for index in range(PARTITIONS)]
    consumer.assign(places)
    found: list[Any] = []

    def all_there() -> bool:
        found.extend(consumer.consume(1_000, timeout=0.2))
        return len(found) >= count

    try:
        wait_for(f"{count} records", all_there)
    finally:
        consumer.close()
    assert all(message.error() is None for message in found)
    return found


def write_by_confluent(
    broker: Broker, topic: str, codec: str, sent: Sequence[tuple[bytes | None, bytes | None]]
) -> None:
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "partitioner": "murmur2_random",
            "compression.type": codec,
            "enable.idempotence": True,
        }
    )
    for key, value in sent:
        producer.produce(topic, value=value, key=key, headers=HEADERS)
    assert producer.flush(30.0) == 0


@proves("G17")
def test_a_thousand_keys_go_to_the_same_partitions(
    broker: Broker, cluster: Cluster, topic: MakeTopic, seed: int
) -> None:
    rng = random.Random(seed)
    keys = [b"%d-%s" % (nth, rng.randbytes(rng.randrange(24))) for nth in range(KEYS)]
    ours, theirs = topic(partitions=PARTITIONS), topic(partitions=PARTITIONS)
    with Producer(broker.bootstrap) as producer:
        deliveries = [producer.send_async(ours, b"v", key=key) for key in keys]
        producer.flush(30.0)
        by_us = {key: delivery.result().partition for key, delivery in zip(keys, deliveries, strict=True)}
    write_by_confluent(broker, theirs, "none", [(key, b"v") for key in keys])
    found = read_topic(cluster, theirs)
    by_them = {record.key: partition for partition, records in found.items() for record in records}
    assert by_us == by_them
    assert len(set(by_us.values())) == PARTITIONS


@proves("G17")
@pytest.mark.parametrize("codec", CODECS)
def test_what_we_write_is_read_by_confluent_kafka(broker: Broker, topic: MakeTopic, codec: str, seed: int) -> None:
    name, sent = topic(partitions=PARTITIONS), records(seed)
    with Producer(broker.bootstrap, codec=codec) as producer:
        deliveries = [producer.send_async(name, value, key=key, headers=HEADERS) for key, value in sent]
        producer.flush(30.0)
    reports = [delivery.result() for delivery in deliveries]
    found = {(message.partition(), message.offset()): message for message in read_by_confluent(broker, name, len(sent))}
    assert len(found) == len(sent)
    for (key, value), report in zip(sent, reports, strict=True):
        message = found[report.partition, report.offset]
        assert (message.key(), message.value()) == (key, value)
        assert message.headers() == HEADERS
        assert message.timestamp() == (confluent_kafka.TIMESTAMP_CREATE_TIME, report.timestamp_ms)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_confluent_kafka_writes_is_in_the_log_as_what_we_write(
    broker: Broker, cluster: Cluster, topic: MakeTopic, codec: str, seed: int
) -> None:
    ours, theirs = topic(partitions=PARTITIONS), topic(partitions=PARTITIONS)
    sent = [(key, value) for key, value in records(seed) if key]
    with Producer(broker.bootstrap, codec=codec) as producer:
        for key, value in sent:
            producer.send_async(ours, value, key=key, headers=HEADERS)
        producer.flush(30.0)
    write_by_confluent(broker, theirs, codec, sent)

    def contents(name: str) -> dict[int, list[tuple[bytes | None, bytes | None, list[Any]]]]:
        found = read_topic(cluster, name)
        return {part: [(each.key, each.value, each.headers) for each in found[part]] for part in found}

    assert contents(ours) == contents(theirs)


def test_a_topic_that_stamps_records_itself_has_its_time_in_the_report(
    broker: Broker, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(message_timestamp_type="LogAppendTime")
    with Producer(broker.bootstrap) as producer:
        report = producer.send(name, b"v", timestamp_ms=1_000)
    assert report.timestamp_ms > 1_000
    (message,) = read_topic(cluster, name)[0]
    assert message.timestamp_ms == report.timestamp_ms
