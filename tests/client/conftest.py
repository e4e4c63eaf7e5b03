"""A cluster seen by our own client, and topics made for one test."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from brokers import Broker
from headrace.client import admin
from headrace.client.cluster import Cluster

MakeTopic = Callable[..., str]


@pytest.fixture
def cluster(broker: Broker) -> Iterator[Cluster]:
    with Cluster(broker.bootstrap) as connected:
        yield connected


@pytest.fixture
def topic(cluster: Cluster) -> MakeTopic:
    """Create a topic: `topic(partitions=3, retention_ms=1000)`, and have its name."""

    def make(partitions: int = 1, **configs: object) -> str:
        name = f"client-{uuid.uuid4().hex[:12]}"
        settings = {key.replace("_", "."): str(value) for key, value in configs.items()}
        admin.create_topic(cluster, name, partitions=partitions, configs=settings)
        return name

    return make
