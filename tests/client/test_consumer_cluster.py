"""A consumer in a cluster of three brokers in three racks: leaders that move and die, followers that are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from brokers import wait_for
from client.test_consumer_pull import collect, send, values
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.placement import elect_leaders, order_moves
from headrace.client.consumer.consumer import Consumer
from headrace.records.consumer_records import ReceivedRecord
from kafka_protocol.clustered import SharedCluster
from proving import proves

_numbers = itertools.count()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    cluster = SharedCluster(tmp_path_factory.mktemp("three"))
    yield cluster
    cluster.close()


@pytest.fixture
def brokers3(three: SharedCluster) -> Iterator[SharedCluster]:
    three.begin_test()
    yield three
    three.end_test()


@pytest.fixture
def name() -> str:
    return f"read-{next(_numbers)}"


@proves("R8", "F11")
def test_a_consumer_with_a_rack_reads_the_follower_there_and_the_leader_when_it_dies(
    brokers3: SharedCluster, name: str
) -> None:
    brokers3.create(name, [[1, 2, 3]])
    with Cluster(brokers3.bootstrap) as client:
        send(client, name, range(500))
        before = {number: brokers3.fetches(number) for number in (1, 3)}
        with Consumer(name, bootstrap=brokers3.bootstrap, rack="rack-3", max_wait_ms=50) as consumer:
            found = collect(consumer, 500)
            wait_for(
                "ten fetches at the follower",
                lambda: consumer.poll(timeout_ms=50) or brokers3.fetches(3) - before[3] >= 10,
            )
            assert brokers3.fetches(1) - before[1] <= 3, "the leader was only asked who serves that rack"
            brokers3.broker(3).kill()
            send(client, name, range(500, 600))
            found += collect(consumer, 100)
    assert values(found) == list(range(600))


@proves("R8", "G6")
def test_a_leader_that_dies_or_moves_is_followed_without_an_error(brokers3: SharedCluster, name: str) -> None:
    brokers3.create(name, [[1, 2, 3], [2, 3, 1]])
    found: list[ReceivedRecord] = []
    with (
        Cluster(brokers3.bootstrap) as client,
        Consumer(name, bootstrap=brokers3.bootstrap, max_wait_ms=100, partition_fetch_bytes=10_000) as consumer,
    ):
        for partition in (0, 1):
            send(client, name, range(3000), partition)
        while len(found) < 1000:
            found += consumer.poll(timeout_ms=5000)
        brokers3.broker(1).kill()
        found += collect(consumer, 6000 - len(found))
        for partition in (0, 1):
            send(client, name, range(3000, 3100), partition)
        found += collect(consumer, 200)
        brokers3.broker(1).start()
        brokers3.wait_in_sync(name)
        elect_leaders(client, "preferred", [(name, 0)])
        for partition in (0, 1):
            send(client, name, range(3100, 3200), partition)
        found += collect(consumer, 200)
    for partition in (0, 1):
        assert values(record for record in found if record.partition == partition) == list(range(3200))


@proves("R8", "G6")
def test_a_partition_that_moves_to_another_broker_is_read_on(brokers3: SharedCluster, name: str) -> None:
    brokers3.create(name, [[1]])
    with (
        Cluster(brokers3.bootstrap) as client,
        Consumer(name, bootstrap=brokers3.bootstrap, max_wait_ms=100) as consumer,
    ):
        send(client, name, range(1000))
        found = collect(consumer, 1000)
        order_moves(client, {(name, 0): [2]})
        wait_for("the move", lambda: brokers3.state(name)[0].replicas == (2,))
        client.forget()
        send(client, name, range(1000, 1500))
        found += collect(consumer, 500)
    assert values(found) == list(range(1500))
