"""A cluster seen by our own client, and topics made for one test."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from brokers import Broker, Brokers
from client.wire_tap import WireTap
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster

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
        operations.create_topic(cluster, name, partitions=partitions, configs=settings)
        return name

    return make


@pytest.fixture(scope="module")
def tapped(brokers: Brokers) -> tuple[WireTap, Broker]:
    """A broker that clients know only by way of the tap."""
    tap = WireTap()
    broker = brokers.start(advertise=(tap.address,))
    host, _, port = next(iter(broker.addresses.values())).rpartition(":")
    tap.upstream = (host, int(port))
    return tap, broker


@pytest.fixture
def tap(tapped: tuple[WireTap, Broker]) -> Iterator[WireTap]:
    tap = tapped[0]
    tap.seen.clear()
    yield tap
    tap.change = lambda seen, answer: None
    tap.lost = lambda seen: False
