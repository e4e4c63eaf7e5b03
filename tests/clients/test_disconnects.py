"""Idempotent producers over connections that break at random: no duplicate, no gap, order kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import Consumer, Producer, TopicPartition
from kafka import KafkaProducer

from brokers import Broker
from clients.cutting import CuttingProxy
from clients.records import Client, Record
from clients.topics import create_topic
from clients.with_kafkajs import KafkaJS
from proving import proves

DEADLINE_S = 90.0
RECORDS = 300
PADDING = b"." * 100
CUT_AFTER_BYTES = (1500, 12_000)
BACKOFF_MS = 20
VALUES = [b"%05d" % n + PADDING for n in range(RECORDS)]
# A consumer asks again after each cut, and waits before it does.
READ_OVER_CUTS = VALUES[:120]

Send = Callable[[str, str], None]


@pytest.fixture
def proxied(fresh_broker: Callable[..., Broker], seed: int) -> Iterator[tuple[Broker, CuttingProxy]]:
    """A broker that one listener shows only through the proxy, and another one directly."""
    proxy = CuttingProxy(seed, CUT_AFTER_BYTES)
    broker = fresh_broker(listen=("direct=127.0.0.1:0", "cut=127.0.0.1:0"), advertise=(f"cut={proxy.address}",))
    host, _, port = broker.addresses["kafka.cut"].rpartition(":")
    proxy.upstream = host, int(port)
    yield broker, proxy
    proxy.close()


def with_confluent(bootstrap: str, topic: str, values: Sequence[bytes] = VALUES) -> None:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "batch.num.messages": 10,
            "linger.ms": 1,
            "reconnect.backoff.ms": BACKOFF_MS,
            "reconnect.backoff.max.ms": BACKOFF_MS,
            "retry.backoff.ms": BACKOFF_MS,
            "log_level": 0,
        }
    )
    errors: list[object] = []
    for value in values:
        producer.produce(topic, value, partition=0, on_delivery=lambda error, _m: errors.append(error))
        producer.poll(0)
    assert producer.flush(DEADLINE_S) == 0
    assert errors == [None] * len(values)


def with_kafka_python(bootstrap: str, topic: str) -> None:
    producer = KafkaProducer(
        bootstrap_servers=bootstrap,
        enable_idempotence=True,
        batch_size=1200,
        linger_ms=1,
        reconnect_backoff_ms=BACKOFF_MS,
        reconnect_backoff_max_ms=BACKOFF_MS,
        retry_backoff_ms=BACKOFF_MS,
    )
    sent = [producer.send(topic, value, partition=0) for value in VALUES]
    for future in sent:
        future.get(DEADLINE_S)
    producer.close()


def with_aiokafka(bootstrap: str, topic: str) -> None:
    async def run() -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            enable_idempotence=True,
            max_batch_size=1200,
            linger_ms=1,
            retry_backoff_ms=BACKOFF_MS,
        )
        await producer.start()
        try:
            sent = [await producer.send(topic, value, partition=0) for value in VALUES]
            await asyncio.wait_for(asyncio.gather(*sent), DEADLINE_S)
        finally:
            await producer.stop()

    asyncio.run(run())


@proves("J10")
@pytest.mark.parametrize("send", [with_confluent, with_kafka_python, with_aiokafka])
def test_every_record_once_and_in_order(
    proxied: tuple[Broker, CuttingProxy], clients: dict[str, Client], send: Send
) -> None:
    broker, proxy = proxied
    topic = create_topic(broker, "cut")
    send(proxy.address, topic)
    assert proxy.cuts > 3
    read = clients["confluent-kafka"].consume(broker.bootstrap, {topic: RECORDS})[topic]
    assert [record.value for record in read] == VALUES
    assert end_offset(broker, topic) == RECORDS


@proves("J10")
def test_every_record_once_with_kafkajs(
    proxied: tuple[Broker, CuttingProxy], clients: dict[str, Client], kafkajs: KafkaJS
) -> None:
    broker, proxy = proxied
    topic = create_topic(broker, "cut")
    retry = {"initialRetryTime": BACKOFF_MS, "maxRetryTime": BACKOFF_MS * 5, "retries": 100}
    records = [Record(value) for value in VALUES]
    kafkajs.produce(proxy.address, topic, records, idempotent=True, batch=10, options={"retry": retry})
    assert proxy.cuts > 3
    read = clients["confluent-kafka"].consume(broker.bootstrap, {topic: RECORDS})[topic]
    assert [record.value for record in read] == VALUES
    assert end_offset(broker, topic) == RECORDS


def test_a_consumer_reads_everything_over_breaking_connections(
    proxied: tuple[Broker, CuttingProxy],
) -> None:
    broker, proxy = proxied
    topic = create_topic(broker, "cut")
    # Small batches, so that one of them can pass before the next cut.
    with_confluent(broker.bootstrap, topic, READ_OVER_CUTS)
    consumer = Consumer(
        {
            "bootstrap.servers": proxy.address,
            "group.id": "g",
            "fetch.message.max.bytes": 2000,
            "fetch.error.backoff.ms": BACKOFF_MS,
            "reconnect.backoff.ms": BACKOFF_MS,
            "reconnect.backoff.max.ms": BACKOFF_MS,
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    values: list[bytes | None] = []
    while len(values) < len(READ_OVER_CUTS):
        message = consumer.poll(DEADLINE_S)
        assert message is not None
        if message.error() is None:
            values.append(message.value())
    assert values == READ_OVER_CUTS
    assert proxy.cuts > 3
    consumer.close()


def end_offset(broker: Broker, topic: str) -> int:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "g"})
    _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=DEADLINE_S)
    consumer.close()
    return int(end)
