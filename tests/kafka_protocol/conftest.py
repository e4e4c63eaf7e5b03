"""Raw connections that are closed when the test ends, and topic names of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from brokers import Broker
from kafka_protocol.clustered import SharedCluster
from kafka_protocol.raw import Raw

_count = itertools.count()


@pytest.fixture
def connect() -> Iterator[Callable[[Broker], Raw]]:
    opened: list[Raw] = []

    def open_one(broker: Broker) -> Raw:
        opened.append(Raw(broker.host_port))
        return opened[-1]

    yield open_one
    for raw in opened:
        raw.close()


@pytest.fixture
def topic() -> str:
    return f"frontend-{next(_count)}"


@pytest.fixture(scope="package")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    cluster = SharedCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(shared_cluster: SharedCluster) -> Iterator[SharedCluster]:
    """Three brokers, all alive when the test begins."""
    shared_cluster.begin_test()
    yield shared_cluster
    shared_cluster.end_test()
