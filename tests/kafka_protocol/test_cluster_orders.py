"""Moves of replicas and elections that operators order through Kafka's own APIs."""

from __future__ import annotations

from typing import Any

from brokers import wait_for
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.clustered import SharedCluster
from kafka_protocol.raw import batch_of
from proving import proves

PREFERRED, UNCLEAN = 0, 1


def move(cluster: SharedCluster, topic: str, replicas: list[int] | None, partition: int = 0, **more: Any) -> Any:
    asked = Message(name=topic, partitions=[Message(partition_index=partition, replicas=replicas)])
    return cluster.raw(2).call(
        apis.ALTER_PARTITION_REASSIGNMENTS,
        1,
        timeout_ms=10_000,
        allow_replication_factor_change=more.get("allow_count", True),
        topics=[asked],
    ).responses[0].partitions[0]  # fmt: skip


def moves(cluster: SharedCluster, topic: str) -> list[Any]:
    asked = [Message(name=topic, partition_indexes=[0])]
    found = cluster.raw(3).call(apis.LIST_PARTITION_REASSIGNMENTS, 0, timeout_ms=5000, topics=asked).topics
    return [row for each in found for row in each.partitions]


def elect(cluster: SharedCluster, topic: str, kind: int = PREFERRED, partition: int = 0) -> Any:
    asked = [Message(topic=topic, partitions=[partition])]
    answer = cluster.raw(1).call(apis.ELECT_LEADERS, 2, election_type=kind, topic_partitions=asked, timeout_ms=15_000)
    assert answer.error_code == 0
    return answer.replica_election_results[0].partition_result[0]


@proves("G14", "G15")
def test_a_partition_moves_with_its_data_and_its_leader(cluster: SharedCluster, topic: str) -> None:
    cluster.create(topic, [[1]])
    raw = cluster.raw(1)
    for n in range(10):
        assert raw.produce(topic, batch_of([b"%d" % n]), acks=-1).error_code == 0
    assert move(cluster, topic, [3, 2]).error_code == 0

    def moved() -> bool:
        state = cluster.state(topic)[0]
        return (state.replicas, state.leader, set(state.in_sync)) == ((3, 2), 3, {3, 2})

    wait_for("the move", moved)
    wait_for("the end of the move at the broker that is asked", lambda: moves(cluster, topic) == [])
    wait_for("the data at its new leader", lambda: cluster.raw(3).fetch(topic, 0).high_watermark == 10)


@proves("G14")
def test_orders_that_cannot_be_taken_are_refused_one_by_one(cluster: SharedCluster, topic: str) -> None:
    cluster.create(topic, [[1, 2]])
    refused = [
        (move(cluster, topic, [1, 9]), 39),
        (move(cluster, topic, [1, 1]), 39),
        (move(cluster, topic, []), 39),
        (move(cluster, topic, [1], allow_count=False), 39),
        (move(cluster, topic, None), 85),
        (move(cluster, topic, [1], partition=4), 3),
    ]
    assert [row.error_code for row, _ in refused] == [code for _, code in refused]
    assert all(row.error_message for row, _ in refused)
    assert cluster.state(topic)[0].replicas == (1, 2)


@proves("G15")
def test_the_preferred_leader_is_elected_again_by_order(cluster: SharedCluster, topic: str) -> None:
    cluster.create(topic, [[1, 2]])
    assert elect(cluster, topic).error_code == 84, "it leads already"
    assert elect(cluster, topic, partition=3).error_code == 3
    assert move(cluster, topic, [2, 1]).error_code == 0
    wait_for("the new order of its replicas", lambda: cluster.state(topic)[0].replicas == (2, 1))
    before = cluster.state(topic)[0]
    if before.leader == 1:
        assert elect(cluster, topic).error_code == 0
    after = wait_for("the leader", lambda: cluster.state(topic)[0] if cluster.state(topic)[0].leader == 2 else None)
    assert (set(after.in_sync), after.epoch) == ({1, 2}, before.epoch + (before.leader == 1))
