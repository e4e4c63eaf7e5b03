"""Dead letters of share groups (KIP-1191) with librdkafka's share consumer, read by a plain one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka import AcknowledgeType, Consumer, Message, Producer

from brokers import Broker, Brokers
from clients.sharing import DEADLINE_S, QUICK, accept, commit, member, poll, share_group, values, write
from clients.topics import create_topic
from headrace.storage.folder import PARTITIONED, SHARED
from proving import proves


@pytest.fixture(scope="module", params=[PARTITIONED, SHARED])
def share_broker(brokers: Brokers, request: pytest.FixtureRequest) -> Iterator[Broker]:
    broker = brokers.start(settings={**QUICK, "log.layout": request.param, "group.share.delivery.count.limit": 2})
    yield broker
    broker.discard()


def read_all(bootstrap: str, topic: str, count: int) -> list[Message]:
    """All that a plain consumer finds, at least so many."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"r-{uuid.uuid4()}",
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    found: list[Message] = []
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        message = consumer.poll(1.0)
        if message is not None and message.error() is None:
            found.append(message)
        elif message is None and len(found) >= count:
            break
    consumer.close()
    return found


def headers_of(message: Message) -> dict[str, str]:
    return {name: (value or b"").decode() for name, value in message.headers() or []}  # type: ignore[union-attr,str-unpack]


@proves("R10", "Q1")
def test_rejected_records_and_those_delivered_too_often_are_found_in_the_dead_letter_topic(
    share_broker: Broker,
) -> None:
    bootstrap = share_broker.bootstrap
    topic = create_topic(share_broker, f"t-{uuid.uuid4()}")
    letters = create_topic(share_broker, f"dlq.{topic}", 3, errors_deadletterqueue_group_enable="true")
    group = share_group(
        bootstrap, errors_deadletterqueue_topic_name=letters, errors_deadletterqueue_copy_record_enable="true"
    )
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 50, "compression.type": "lz4", "log_level": 0})
    for number in range(4):
        producer.produce(
            topic, b"%d" % number, b"key", headers={"own": b"header"}, timestamp=1_700_000_000_000 + number
        )
    assert producer.flush(DEADLINE_S) == 0
    consumer = member(bootstrap, group, topic)
    found = poll(consumer)
    assert values(found) == ["0", "1", "2", "3"]
    for message, how in zip(found, ["accept", "reject", "release", "accept"], strict=True):
        consumer.acknowledge(message, AcknowledgeType[how.upper()])
    assert not commit(consumer)
    accept(consumer, poll(consumer), AcknowledgeType.RELEASE)
    assert not commit(consumer)
    dead = {message.value(): message for message in read_all(bootstrap, letters, 2)}
    assert set(dead) == {b"1", b"2"}
    rejected, exhausted = headers_of(dead[b"1"]), headers_of(dead[b"2"])
    assert rejected == {
        "own": "header",
        "__dlq.errors.topic": topic,
        "__dlq.errors.partition": "0",
        "__dlq.errors.offset": "1",
        "__dlq.errors.group": group,
        "__dlq.errors.delivery.count": "1",
        "__dlq.errors.message": "Offset rejected by client.",
        "headrace.dlq.timestamp": "1700000000001",
    }
    assert (exhausted["__dlq.errors.delivery.count"], exhausted["__dlq.errors.offset"]) == ("2", "2")
    assert exhausted["__dlq.errors.message"] == "Offset delivery count exceeded the threshold."
    assert dead[b"1"].key() == b"key"
    consumer.close()


@proves("R10", "Q1")
def test_a_dead_letter_topic_is_created_where_the_cluster_allows_it(brokers: Brokers) -> None:
    broker = brokers.start(settings={**QUICK, "errors.deadletterqueue.auto.create.topics.enable": True})
    try:
        bootstrap, topic = broker.bootstrap, create_topic(broker, f"t-{uuid.uuid4()}")
        group = share_group(bootstrap, errors_deadletterqueue_topic_name="dlq.made")
        write(bootstrap, topic, ["a", "b"])
        consumer = member(bootstrap, group, topic)
        accept(consumer, poll(consumer), AcknowledgeType.REJECT)
        assert not commit(consumer)
        found = read_all(bootstrap, "dlq.made", 2)
        assert [(message.value(), headers_of(message)["__dlq.errors.offset"]) for message in found] == [
            (None, "0"), (None, "1"),
        ]  # fmt: skip
        consumer.close()
    finally:
        broker.discard()
