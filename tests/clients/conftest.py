"""The five clients, and topics made for one test."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator

import pytest

from brokers import Broker
from clients.records import Client
from clients.topics import MakeTopic, create_topic
from clients.with_aiokafka import AioKafka
from clients.with_confluent import ConfluentKafka
from clients.with_kafka_python import KafkaPython
from clients.with_kafkajs import KafkaJS
from clients.with_kcat import Kcat

numbers = itertools.count(1)


@pytest.fixture(scope="session")
def kafkajs() -> Iterator[KafkaJS]:
    client = KafkaJS()
    yield client
    client.close()


@pytest.fixture(scope="session")
def clients(kafkajs: KafkaJS) -> dict[str, Client]:
    every: list[Client] = [ConfluentKafka(), KafkaPython(), AioKafka(), kafkajs, Kcat()]
    return {client.name: client for client in every}


@pytest.fixture
def topic(broker: Broker) -> MakeTopic:
    """Create a topic on the shared broker: `topic(partitions=4, retention_ms=1000)`, and have its name."""

    def make(partitions: int = 1, **config: object) -> str:
        return create_topic(broker, f"t{next(numbers)}-{uuid.uuid4().hex[:8]}", partitions, **config)

    return make
