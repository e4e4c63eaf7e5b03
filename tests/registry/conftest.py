"""Two brokers on one etcd node with two registries, shared by all tests here; each finds all of it alive."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator

import pytest

from brokers import free_port, wait_for
from clusters import BrokerCluster
from registries import Registry, begin

LEASE_MS = 2000
SETTINGS = {
    "broker.lease.ms": LEASE_MS,
    "replica.lag.time.max.ms": 1000,
    "offsets.topic.partitions": 2,
    "group.initial.rebalance.delay.ms": 50,
}
_numbers = itertools.count()


@pytest.fixture(scope="package")
def without_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A registry whose etcd is not there. It takes its time to say so: other tests run meanwhile."""
    folder = tmp_path_factory.mktemp("without-etcd")
    process = begin(Registry(folder / "registry", f"etcd://127.0.0.1:{free_port()}", coordination_wait_ms=0))
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="package")
def started_cluster(
    tmp_path_factory: pytest.TempPathFactory, without_etcd: subprocess.Popen[str]
) -> Iterator[BrokerCluster]:
    made = BrokerCluster(tmp_path_factory.mktemp("registry"), brokers=2, etcd=1, settings=SETTINGS)
    for broker in made.brokers:
        broker.listen.append("inside=127.0.0.1:0")
    with made as cluster:
        yield cluster


@pytest.fixture(scope="package")
def started_registries(started_cluster: BrokerCluster) -> Iterator[list[Registry]]:
    folder = started_cluster.folder
    registries = [Registry(folder / f"registry-{n}", started_cluster.etcd.uri) for n in (1, 2)]
    try:
        for registry in registries:
            registry.start()
        yield registries
    finally:
        for registry in registries:
            registry.kill()


@pytest.fixture
def registries(started_registries: list[Registry]) -> list[Registry]:
    """Both, alive; one that a test before has killed is started again in its place."""
    for registry in started_registries:
        if registry.process is None:
            registry.start()
        registry.check_alive()
    return started_registries


@pytest.fixture
def registry(registries: list[Registry]) -> Registry:
    return registries[0]


@pytest.fixture
def cluster(started_cluster: BrokerCluster, registries: list[Registry]) -> BrokerCluster:
    """All brokers are there, and the registries know it."""
    started_cluster.etcd.start_all()
    for broker in started_cluster.brokers:
        if broker.process is None:
            broker.start()
    for registry in registries:
        wait_for("all brokers in a registry", lambda: len(registry.ask("/brokers")["brokers"]) == 2)  # noqa: B023
    return started_cluster


@pytest.fixture
def topic(cluster: BrokerCluster) -> str:
    """A topic of two partitions with two replicas each."""
    name = f"orders-{next(_numbers)}"
    cluster.create_topic(name, 2, 2)
    return name
