"""Many topics and partitions in one request, and where records without a partition go."""

from __future__ import annotations

import uuid
from collections import Counter

from confluent_kafka import Consumer, Producer, TopicPartition
from kafka import KafkaProducer

from brokers import Broker
from clients.records import Client, Record
from clients.topics import MakeTopic
from clients.with_kafkajs import KafkaJS, encoded
from proving import proves

DEADLINE_S = 120.0
TOPICS, PARTITIONS, EACH = 12, 8, 5


def read_all(broker: Broker, topics: list[str], count: int) -> Counter[tuple[str, int]]:
    """Read that many records over all partitions of the topics, counted by partition."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": str(uuid.uuid4())})
    consumer.assign([TopicPartition(topic, partition, 0) for topic in topics for partition in range(PARTITIONS)])
    seen: Counter[tuple[str, int]] = Counter()
    while seen.total() < count:
        message = consumer.poll(DEADLINE_S)
        assert message is not None, f"{seen.total()} of {count} records came"
        assert message.error() is None, message.error()
        seen[str(message.topic()), int(message.partition() or 0)] += 1
    consumer.close()
    return seen


@proves("J9")
def test_one_request_with_many_topics_and_partitions(broker: Broker, topic: MakeTopic, kafkajs: KafkaJS) -> None:
    """kafkajs puts the whole batch in one produce request; librdkafka fetches all partitions in one request."""
    topics = [topic(PARTITIONS) for _ in range(TOPICS)]
    messages = [{"value": encoded(b"v"), "partition": n % PARTITIONS} for n in range(PARTITIONS * EACH)]
    batch = [{"topic": name, "messages": messages} for name in topics]
    kafkajs.node.ask("produceMany", bootstrap=broker.bootstrap, topicMessages=batch)
    seen = read_all(broker, topics, TOPICS * PARTITIONS * EACH)
    assert set(seen.values()) == {EACH}
    assert len(seen) == TOPICS * PARTITIONS


@proves("J9")
def test_kafka_python_writes_and_reads_many_partitions(
    broker: Broker, topic: MakeTopic, clients: dict[str, Client]
) -> None:
    topics = [topic(PARTITIONS) for _ in range(TOPICS)]
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap, linger_ms=50)
    sent = [producer.send(name, b"v", partition=n % PARTITIONS) for name in topics for n in range(PARTITIONS * EACH)]
    for future in sent:
        future.get(DEADLINE_S)
    producer.close()
    assert set(read_all(broker, topics, len(sent)).values()) == {EACH}
    read = clients["kafka-python"].consume(broker.bootstrap, dict.fromkeys(topics, EACH))
    assert {len(records) for records in read.values()} == {EACH}


@proves("G17")
def test_records_go_to_the_partition_asked_for_or_of_their_key_or_are_spread(broker: Broker, topic: MakeTopic) -> None:
    explicit, keyed, spread = topic(PARTITIONS), topic(PARTITIONS), topic(PARTITIONS)
    settings = {"bootstrap.servers": broker.bootstrap, "sticky.partitioning.linger.ms": 0}
    producer = Producer({**settings, "partitioner": "murmur2_random"})
    placed: dict[bytes, set[int]] = {}

    def delivered(error: object, message: object) -> None:
        assert error is None
        placed.setdefault(message.key(), set()).add(message.partition())  # type: ignore[attr-defined]

    for n in range(200):
        producer.produce(explicit, b"v", partition=n % 3)
        producer.produce(keyed, b"v", b"key %d" % (n % 10), on_delivery=delivered)
        producer.produce(spread, b"v")
    assert producer.flush(DEADLINE_S) == 0
    assert set(read_all(broker, [explicit], 200)) == {(explicit, 0), (explicit, 1), (explicit, 2)}
    assert len(placed) == 10
    assert all(len(partitions) == 1 for partitions in placed.values())
    assert len(read_all(broker, [spread], 200)) > 1


@proves("J2", "G9")
def test_large_batches_come_back_as_they_were(broker: Broker, topic: MakeTopic, clients: dict[str, Client]) -> None:
    """Values of 200 KB leave by the road for large responses."""
    name = topic()
    records = [Record(bytes([n]) * 200_000, key=b"%d" % n) for n in range(20)]
    clients["confluent-kafka"].produce(broker.bootstrap, name, records)
    for reader in clients.values():
        read = reader.consume(broker.bootstrap, {name: len(records)})[name]
        assert [(record.key, record.value) for record in read] == [(record.key, record.value) for record in records]
