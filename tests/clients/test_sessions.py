"""Clients with fetch sessions over many partitions: written to, moved on, paused and sought while a session goes on."""

from __future__ import annotations

import asyncio
import random
import time
import urllib.request
import uuid
from collections import Counter

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AioPartition
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as ConfluentPartition
from kafka import KafkaConsumer, TopicPartition

from brokers import Broker, wait_for
from clients.topics import MakeTopic
from proving import proves

DEADLINE_S = 120.0
PARTITIONS, ROUNDS = 120, 4

Seen = Counter[tuple[int, int]]
"""By partition and offset."""


def metric(broker: Broker, name: str) -> float:
    with urllib.request.urlopen(broker.http + "/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def write(broker: Broker, topic: str, partitions: list[int]) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for partition in partitions:
        producer.produce(topic, b"v", partition=partition)
    assert producer.flush(DEADLINE_S) == 0


def read_on(consumer: KafkaConsumer, seen: Seen, count: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while seen.total() < count:
        assert time.monotonic() < end, f"{seen.total()} of {count} records came"
        for where, records in consumer.poll(timeout_ms=500).items():
            seen.update((where.partition, record.offset) for record in records)


@proves("N2")
def test_kafka_python_reads_many_partitions_in_a_session(broker: Broker, topic: MakeTopic, seed: int) -> None:
    name, chance = topic(PARTITIONS), random.Random(seed)
    before = metric(broker, "headrace_fetch_sessions")
    consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap, enable_auto_commit=False, fetch_max_wait_ms=100)
    consumer.assign([TopicPartition(name, index) for index in range(PARTITIONS)])
    for index in range(PARTITIONS):
        consumer.seek(TopicPartition(name, index), 0)
    seen: Seen = Counter()
    written: Seen = Counter()
    ends = [0] * PARTITIONS
    for _ in range(ROUNDS):
        partitions = [chance.randrange(PARTITIONS) for _ in range(40)]
        paused = [TopicPartition(name, index) for index in chance.sample(range(PARTITIONS), 30)]
        consumer.pause(*paused)
        write(broker, name, partitions)
        for index in partitions:
            written[index, ends[index]] += 1
            ends[index] += 1
        read_on(consumer, seen, seen.total() + 1)  # of those that are not paused
        consumer.resume(*paused)
        again = TopicPartition(name, partitions[0])
        read_on(consumer, seen, written.total())
        assert seen == written
        consumer.seek(again, 0)
        written.update((again.partition, offset) for offset in range(ends[again.partition]))
    read_on(consumer, seen, written.total())
    assert seen == written
    assert metric(broker, "headrace_fetch_sessions") >= before + 1
    consumer.close()
    wait_for("the end of its session", lambda: metric(broker, "headrace_fetch_sessions") <= before)


@proves("N2")
def test_clients_without_sessions_read_as_before(broker: Broker, topic: MakeTopic) -> None:
    name = topic(PARTITIONS)
    write(broker, name, list(range(PARTITIONS)))
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": str(uuid.uuid4())})
    consumer.assign([ConfluentPartition(name, index, 0) for index in range(PARTITIONS)])
    found = {message.partition() for message in consumer.consume(PARTITIONS, DEADLINE_S)}
    consumer.close()
    assert found == set(range(PARTITIONS))

    async def read() -> set[int]:
        reader = AIOKafkaConsumer(bootstrap_servers=broker.bootstrap, enable_auto_commit=False)
        reader.assign([AioPartition(name, index) for index in range(PARTITIONS)])
        await reader.start()
        await reader.seek_to_beginning()
        seen: set[int] = set()
        async with asyncio.timeout(DEADLINE_S):
            while len(seen) < PARTITIONS:
                seen |= {where.partition for where in await reader.getmany(timeout_ms=500)}
        await reader.stop()
        return seen

    assert asyncio.run(read()) == set(range(PARTITIONS))
