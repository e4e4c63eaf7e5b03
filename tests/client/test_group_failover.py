"""A group whose coordinator is killed: its members go on, and what they read is saved with the next one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from brokers import wait_for
from clients.records import Record
from clients.with_confluent import ConfluentKafka
from clusters import BrokerCluster
from headrace import Consumer
from headrace.client.admin import groups
from headrace.client.admin.cluster import Cluster
from proving import proves

PARTITIONS = 6
SESSION_MS = 120_000
"""Nobody is to lose its partitions because the machine is busy: what it had read would then be read again."""
SETTINGS = {
    "broker.lease.ms": 2000,
    "offsets.topic.partitions": 1,
    "default.replication.factor": 3,
    "group.initial.rebalance.delay.ms": 50,
}


@pytest.fixture
def three_brokers(tmp_path: Path) -> Iterator[BrokerCluster]:
    with BrokerCluster(tmp_path, brokers=3, etcd=1, settings=SETTINGS) as cluster:
        yield cluster


def write(bootstrap: str, topic: str, first: int, count: int) -> set[bytes]:
    values = [b"%d" % n for n in range(first, first + count)]
    records = [Record(value, partition=n % PARTITIONS) for n, value in enumerate(values)]
    ConfluentKafka().produce(bootstrap, topic, records)
    return set(values)


@proves("R8")
def test_members_go_on_when_their_coordinator_is_killed(three_brokers: BrokerCluster) -> None:
    cluster = three_brokers
    cluster.create_topic("orders", PARTITIONS, replicas=3)
    cluster.wait_in_sync({"orders": PARTITIONS})
    bootstrap = cluster.bootstrap
    with (
        Cluster(bootstrap) as admin,
        Consumer("orders", bootstrap=bootstrap, group="g", client_id="a", session_timeout_ms=SESSION_MS) as first,
        Consumer("orders", bootstrap=bootstrap, group="g", client_id="b", session_timeout_ms=SESSION_MS) as second,
    ):
        seen: list[bytes] = []

        def came(wanted: set[bytes]) -> bool:
            for consumer in (first, second):
                seen.extend(record.value for record in consumer.poll(50))
            return wanted <= set(seen)

        def shared() -> bool:
            came(set())
            return sorted([*first.assignment, *second.assignment]) == [("orders", n) for n in range(PARTITIONS)]

        wait_for("both to have partitions", lambda: shared() and first.assignment and second.assignment)
        before = write(bootstrap, "orders", 0, 60)
        wait_for("the records before", lambda: came(before))
        for consumer in (first, second):
            consumer.commit()
        address = admin.coordinator("g").address
        dead = next(broker for broker in cluster.brokers if broker.listen[0] == str(address))
        cluster.wait_in_sync({"orders": PARTITIONS, "__consumer_offsets": 1})
        dead.kill()
        after = write(bootstrap, "orders", 60, 60)
        wait_for("the records after", lambda: came(after))
        assert len(seen) == len(set(seen)) == 120
        for consumer in (first, second):
            consumer.commit()
        assert set(groups.fetch_offsets(admin, "g").values()) == {20}
    with Cluster(bootstrap) as admin:
        assert set(groups.fetch_offsets(admin, "g").values()) == {20}


@pytest.mark.long
def test_a_join_that_waits_at_a_coordinator_that_stops_answering_goes_on_at_the_next(
    three_brokers: BrokerCluster,
) -> None:
    """The second waits for the first to join, which works on its records; meanwhile the coordinator is stopped."""
    cluster = three_brokers
    cluster.create_topic("orders", PARTITIONS, replicas=3)
    cluster.wait_in_sync({"orders": PARTITIONS})
    write(cluster.bootstrap, "orders", 0, 60)
    with Cluster(cluster.bootstrap) as admin:
        address = admin.coordinator("g").address
    number = next(n for n, broker in enumerate(cluster.brokers) if broker.listen[0] == str(address))
    with Consumer("orders", bootstrap=cluster.bootstrap, group="g", client_id="a") as first:
        wait_for("its records", lambda: first.poll(500))
        with Consumer("orders", bootstrap=cluster.bootstrap, group="g", client_id="b") as second:
            with Cluster(cluster.bootstrap) as admin:
                wait_for(
                    "the group to wait for the first",
                    lambda: groups.describe_group(admin, "g").state == "PreparingRebalance",
                    60,
                )
            cluster.pause(number)
            try:
                wait_for(
                    "both to have partitions",
                    lambda: (
                        first.poll(50) is not None
                        and second.poll(50) is not None
                        and first.assignment
                        and second.assignment
                    ),
                    90,
                )
            finally:
                cluster.resume(number)
