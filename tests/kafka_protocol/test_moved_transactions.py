"""Transactions that are open while what they are written to, and who coordinates them, moves to other brokers."""

from __future__ import annotations

import uuid

from brokers import wait_for
from headrace import Admin, Consumer, Producer
from headrace.cluster.names import TRANSACTIONS_TOPIC
from headrace.coordinators.state_log import partition_of
from kafka_protocol.clustered import SharedCluster
from kafka_protocol.test_cluster_orders import elect, move
from proving import proves

DEADLINE_S = 60.0


def moved(cluster: SharedCluster, topic: str, partition: int, replicas: list[int]) -> None:
    """The replicas of a partition are these, and the first of them leads."""
    assert move(cluster, topic, replicas, partition).error_code == 0

    def done() -> bool:
        state = cluster.state(topic)[partition]
        return state.replicas == tuple(replicas) and set(state.in_sync) == set(replicas)

    wait_for(f"the move of {topic}-{partition}", done, DEADLINE_S)

    def leads() -> bool:
        return (
            cluster.state(topic)[partition].leader == replicas[0] or elect(cluster, topic, partition=partition) is None
        )

    wait_for(f"the leader of {topic}-{partition}", leads, DEADLINE_S)


@proves("T2", "G14")
def test_transactions_stay_open_while_their_partitions_and_their_coordinator_move(
    cluster: SharedCluster, topic: str
) -> None:
    cluster.create(topic, [[1], [2]])
    kept_id, lost_id = (f"moved-{uuid.uuid4().hex[:8]}" for _ in range(2))
    with (
        Producer(cluster.bootstrap, transactional_id=kept_id) as first,
        Producer(cluster.bootstrap, transactional_id=lost_id) as second,
    ):
        kept, lost = first.transaction(), second.transaction(two_phase=True)
        for producer, transaction, value in ((first, kept, b"kept"), (second, lost, b"lost")):
            transaction.begin()
            for partition in (0, 1):
                transaction.send(topic, value, partition=partition)
            producer.flush()
        count = len(cluster.state(TRANSACTIONS_TOPIC))
        moved(cluster, topic, 0, [3])
        moved(cluster, topic, 1, [1, 2])
        for coordinated in {partition_of(each, count) for each in (kept_id, lost_id)}:
            before = cluster.state(TRANSACTIONS_TOPIC)[coordinated]
            follower = next(each for each in before.replicas if each != before.leader)
            moved(cluster, TRANSACTIONS_TOPIC, coordinated, [follower, *(set(before.replicas) - {follower})])
        for partition in (0, 1):
            kept.send(topic, b"after", partition=partition)
        kept.commit()
        with Admin(cluster.bootstrap) as admin:
            (found,) = admin.describe_transactions([lost_id])
            assert found.state == "Ongoing"
        lost.abort()
        with first.transaction() as again:
            for partition in (0, 1):
                again.send(topic, b"again", partition=partition)
    values: list[bytes] = []
    with Consumer(topic, bootstrap=cluster.bootstrap) as consumer:
        while len(values) < 6:
            values += [record.value for record in consumer.poll(int(DEADLINE_S * 1000))]
        assert sum(consumer.lag().values()) == 0
    assert sorted(values) == [b"after", b"after", b"again", b"again", b"kept", b"kept"]
