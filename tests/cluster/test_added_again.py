"""A broker is taken from a partition's replicas and added again, and somebody has not heard that it was away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.participants import Cluster, Machine, run
from proving import proves

VALUES = [b"%d" % n for n in range(10)]


async def seen_by(cluster: Cluster, machines: Sequence[Machine]) -> None:
    revision = cluster.store.revision
    await cluster.until(lambda: all(each.participant.view.image.revision >= revision for each in machines))


async def moving(cluster: Cluster) -> tuple[Machine, Machine, tuple[int, ...]]:
    """The leader of a partition, the broker that a move has added and that is in sync, and the move's target, which
    is not reached: another broker of it is not there.
    """
    for number in (1, 2, 3, 4):
        await cluster[number].start()
    await cluster.create(replicas=3)
    await cluster.produce(*VALUES)
    leader = cluster.leader()
    assert leader is not None
    first = next(number for number in (1, 2, 3, 4) if number not in cluster.state().replicas)
    added = cluster[first]
    await cluster[5].start()
    await seen_by(cluster, cluster.alive())
    for other in cluster.machines.values():
        cluster.network.cut(cluster[5].host, other.host)
    target = added.number, 5, *(broker for broker in cluster.state().replicas if broker != leader.number)
    cluster.order_move(target)
    await cluster.until(lambda: added.number in cluster.state().isr)
    await seen_by(cluster, cluster.alive())
    return leader, added, target


@proves("L6")
def test_a_broker_that_was_added_again_is_not_in_sync_by_what_it_had_before() -> None:
    """Its leader hears only that it is a replica, as it was: the log that it had told of is deleted."""

    async def body(cluster: Cluster) -> None:
        leader, added, target = await moving(cluster)
        others = [each for each in cluster.alive() if each is not leader]
        cluster.store.cut(leader.host)
        cluster.network.cut_one_way(added.host, leader.host)
        cluster.order_move(None)
        await seen_by(cluster, others)
        assert added.participant.partitions.find_replica("t", 0) is None
        cluster.order_move(target)
        await seen_by(cluster, others)
        assert added.held() == []
        cluster.store.heal(leader.host)
        await seen_by(cluster, [leader])
        for _ in range(50):  # one second
            assert added.number not in cluster.state().isr or added.held() == VALUES
            await asyncio.sleep(0.02)
        cluster.network.heal(added.host, leader.host)
        await cluster.until(lambda: added.number in cluster.state().isr)
        assert added.held() == VALUES

    run(5, body)


@proves("L6")
def test_a_broker_that_was_added_again_and_never_heard_of_it_comes_in_again() -> None:
    async def body(cluster: Cluster) -> None:
        _, added, target = await moving(cluster)
        others = [each for each in cluster.alive() if each is not added]
        cluster.store.cut(added.host)
        cluster.order_move(None)
        await seen_by(cluster, others)
        cluster.order_move(target)
        await seen_by(cluster, others)
        cluster.store.heal(added.host)
        await cluster.until(lambda: added.number in cluster.state().isr)
        assert added.held() == VALUES

    run(5, body)
