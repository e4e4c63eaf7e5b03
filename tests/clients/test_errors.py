"""Errors as the clients see them: each says what Kafka would say."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka import errors as aiokafka_errors
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from kafka import KafkaProducer
from kafka import errors as kafka_python_errors

from brokers import Broker
from clients.records import Record
from clients.topics import MakeTopic
from clients.with_kafkajs import KafkaJS, KafkaJSError
from proving import proves

DEADLINE_S = 120.0
LIMIT_BYTES = 2000
TOO_LARGE = b"x" * (LIMIT_BYTES * 2)


def confluent_error(broker: Broker, topic: str, value: bytes, **settings: Any) -> KafkaError | None:
    """The error that the delivery report of one record brings."""
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0, **settings})
    reported: list[KafkaError | None] = []
    producer.produce(topic, value, on_delivery=lambda error, _message: reported.append(error))
    producer.flush(DEADLINE_S)
    (error,) = reported
    return error


@proves("L7")
def test_a_message_too_large_is_refused_alone(broker: Broker, topic: MakeTopic, kafkajs: KafkaJS) -> None:
    name = topic(max_message_bytes=LIMIT_BYTES)
    error = confluent_error(broker, name, TOO_LARGE)
    assert error is not None
    assert error.code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert confluent_error(broker, name, b"small") is None

    producer = KafkaProducer(bootstrap_servers=broker.bootstrap)
    with pytest.raises(kafka_python_errors.MessageSizeTooLargeError):
        producer.send(name, TOO_LARGE).get(DEADLINE_S)
    producer.close()

    with pytest.raises(KafkaJSError, match="MESSAGE_TOO_LARGE"):
        kafkajs.produce(broker.bootstrap, name, [Record(TOO_LARGE)], options={"retry": {"retries": 0}})

    async def send() -> None:
        aio = AIOKafkaProducer(bootstrap_servers=broker.bootstrap)
        await aio.start()
        try:
            with pytest.raises(aiokafka_errors.MessageSizeTooLargeError):
                await aio.send_and_wait(name, TOO_LARGE)
        finally:
            await aio.stop()

    asyncio.run(send())


@pytest.mark.parametrize("together", [True, False])
def test_a_record_that_is_wrong_is_told_from_those_that_came_with_it(
    broker: Broker, topic: MakeTopic, together: bool
) -> None:
    name = topic(cleanup_policy="compact")
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 500 if together else 0})
    reported: dict[int, KafkaError | None] = {}

    def report(place: int) -> Callable[[KafkaError | None, object], None]:
        return lambda error, _message: reported.__setitem__(place, error)

    for place in range(20):
        key = None if place % 10 == 0 else b"k%d" % place
        producer.produce(name, b"v", key, partition=0, on_delivery=report(place))
        if not together:
            assert not producer.flush(DEADLINE_S)
    assert not producer.flush(DEADLINE_S)
    codes = {place: error.code() if error is not None else 0 for place, error in reported.items()}
    others = KafkaError._INVALID_DIFFERENT_RECORD if together else 0
    assert codes == {place: KafkaError.INVALID_RECORD if place % 10 == 0 else others for place in range(20)}


def test_a_record_that_is_wrong_with_kafka_python_and_aiokafka(broker: Broker, topic: MakeTopic) -> None:
    name = topic(cleanup_policy="compact")
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap)
    with pytest.raises(kafka_python_errors.InvalidRecordError):
        producer.send(name, b"v").get(DEADLINE_S)
    producer.close()

    async def send() -> None:
        aio = AIOKafkaProducer(bootstrap_servers=broker.bootstrap)
        await aio.start()
        try:
            with pytest.raises(aiokafka_errors.KafkaError):
                await aio.send_and_wait(name, b"v")
            assert (await aio.send_and_wait(name, b"v", b"k")).offset == 0
        finally:
            await aio.stop()

    asyncio.run(send())


@proves("R15")
def test_a_topic_name_against_the_rules(broker: Broker) -> None:
    error = confluent_error(broker, "not/allowed", b"v", **{"message.timeout.ms": 10_000})
    assert error is not None
    assert error.code() == KafkaError.TOPIC_EXCEPTION


@proves("L3")
def test_unknown_topics_where_none_is_created(fresh_broker: Callable[..., Broker], kafkajs: KafkaJS) -> None:
    broker = fresh_broker(settings={"auto.create.topics.enable": False})
    name = f"unknown-{uuid.uuid4()}"
    error = confluent_error(broker, name, b"v", **{"topic.metadata.propagation.max.ms": 100})
    assert error is not None
    assert error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)

    producer = KafkaProducer(bootstrap_servers=broker.bootstrap, max_block_ms=500)
    with pytest.raises(kafka_python_errors.KafkaError):
        producer.send(name, b"v").get(DEADLINE_S)
    producer.close()

    with pytest.raises(KafkaJSError, match="UNKNOWN_TOPIC_OR_PARTITION"):
        kafkajs.produce(broker.bootstrap, name, [Record(b"v")], options={"retry": {"retries": 1}})

    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "g", "log_level": 0})
    consumer.subscribe([name])
    message = consumer.poll(DEADLINE_S)
    assert message is not None
    reported = message.error()
    assert reported is not None
    assert reported.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    consumer.close()


@proves("L3")
def test_a_consumer_does_not_create_what_it_does_not_want_to(broker: Broker) -> None:
    name = f"unknown-{uuid.uuid4()}"
    settings = {"bootstrap.servers": broker.bootstrap, "group.id": str(uuid.uuid4()), "log_level": 0}
    consumer = Consumer({**settings, "allow.auto.create.topics": False})
    consumer.subscribe([name])
    message = consumer.poll(DEADLINE_S)
    assert message is not None
    reported = message.error()
    assert reported is not None
    assert reported.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    consumer.close()


def test_an_offset_out_of_range_goes_where_the_client_says(broker: Broker, topic: MakeTopic) -> None:
    name = topic()
    assert confluent_error(broker, name, b"only") is None
    settings = {"bootstrap.servers": broker.bootstrap, "group.id": "g", "log_level": 0}
    resetting = Consumer({**settings, "auto.offset.reset": "earliest"})
    resetting.assign([TopicPartition(name, 0, 100)])
    message = resetting.poll(DEADLINE_S)
    assert message is not None
    assert message.value() == b"only"
    resetting.close()
    failing = Consumer({**settings, "auto.offset.reset": "error"})
    failing.assign([TopicPartition(name, 0, 100)])
    told = failing.poll(DEADLINE_S)
    assert told is not None
    error = told.error()
    assert error is not None
    assert error.code() == KafkaError._AUTO_OFFSET_RESET
    failing.close()
