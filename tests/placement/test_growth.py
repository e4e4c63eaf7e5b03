"""Internal topics grow to their replicas when brokers come (KIP-115)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from brokers import wait_for
from cluster.participants import Cluster, run
from clusters import BrokerCluster
from headrace.client.admin import groups
from headrace.client.admin.cluster import Cluster as Client
from headrace.client.admin.cluster import Retry
from headrace.cluster.image import Image
from headrace.cluster.names import OFFSETS_TOPIC
from headrace.cluster.topics import CreateTopic
from headrace.placement.internal_topics import plan_growth
from placement.placed import Placement, image_of
from proving import proves

INTERNAL = "__of_its_own"


def internal(brokers: tuple[int, ...], placement: Placement, racks: dict[int, str] | None = None) -> Image:
    image = image_of(brokers, placement, racks=racks)
    return replace(image, topics={name: replace(topic, internal=True) for name, topic in image.topics.items()})


@proves("G15")
def test_replicas_are_added_up_to_the_factor_as_far_as_there_are_brokers() -> None:
    image = internal((1, 2), {INTERNAL: [(1,), (1,), (2, 1)]})
    assert {move.partition: set(move.after) for move in plan_growth(image, 3)} == {0: {1, 2}, 1: {1, 2}}
    assert plan_growth(image, 1) == ()
    more = internal((1, 2, 3, 4), {INTERNAL: [(1,), (1,), (2, 1)]})
    assert [len(move.after) for move in plan_growth(more, 3)] == [3, 3, 3]


def test_leaders_and_replicas_are_spread() -> None:
    image = internal((1, 2, 3, 4), {INTERNAL: [(1,)] * 12})
    moves = plan_growth(image, 3)
    assert Counter(move.after[0] for move in moves).keys() >= {2, 3}
    assert max(Counter(move.after[0] for move in moves).values()) <= 4
    assert {Counter(broker for move in moves for broker in move.after)[broker] for broker in (2, 3, 4)} == {8}


def test_new_replicas_stand_in_other_racks() -> None:
    image = internal((1, 2, 3), {INTERNAL: [(1,)] * 4}, racks={1: "a", 2: "a", 3: "b"})
    assert all(set(move.after) == {1, 3} for move in plan_growth(image, 2))


def test_other_topics_and_brokers_that_go_are_left_alone() -> None:
    assert plan_growth(image_of((1, 2, 3), {"t": [(1,)]}), 3) == ()
    image = image_of((1, 2, 3), {INTERNAL: [(1,)]}, draining=(2, 3))
    image = replace(image, topics={INTERNAL: replace(image.topics[INTERNAL], internal=True)})
    assert plan_growth(image, 3) == ()


@proves("G15")
def test_an_internal_topic_of_the_first_broker_grows_when_the_others_come() -> None:
    async def body(cluster: Cluster) -> None:
        await cluster[1].start()
        request = CreateTopic(INTERNAL, 2, 1, internal=True)
        await cluster[1].process.run(cluster[1].participant.topics.create(request))
        await cluster.until(lambda: cluster.leader(INTERNAL) is not None)
        await cluster.produce(b"first", topic=INTERNAL)
        await cluster[2].start()
        await cluster.until(lambda: all(len(cluster.state(INTERNAL, index).isr) == 2 for index in (0, 1)))
        await cluster[3].start()
        await cluster.until(lambda: all(len(cluster.state(INTERNAL, index).isr) == 3 for index in (0, 1)))
        await cluster.until(lambda: not cluster.state(INTERNAL).target)
        assert [machine.held(INTERNAL) for machine in cluster.machines.values()] == [[b"first"]] * 3

    run(3, body)


@proves("F10")
def test_offsets_committed_while_one_broker_was_there_outlive_it(tmp_path: Path) -> None:
    settings = {"broker.lease.ms": 2000, "offsets.topic.partitions": 3, "leader.rebalance.ms": 1000}
    cluster = BrokerCluster(tmp_path, 3, 1, settings)
    try:
        cluster.etcd.start_all()
        cluster.brokers[0].start()
        cluster.create_topic("t", 1, 1)
        with Client(cluster.brokers[0].listen[0]) as client:
            groups.commit_offsets(client, "g", {("t", 0): 7})
            assert replicas_of_offsets(client) == {1}
        for broker in cluster.brokers[1:]:
            broker.start()
        with Client(cluster.bootstrap, retry=Retry(within_ms=60_000)) as client:
            wait_for("three replicas in sync", lambda: replicas_of_offsets(client) == {3})
            cluster.brokers[0].kill()
            assert groups.fetch_offsets(client, "g") == {("t", 0): 7}
    finally:
        cluster.close()


def replicas_of_offsets(client: Client) -> set[int]:
    """How many replicas of the partitions are in sync."""
    topic = client.topology([OFFSETS_TOPIC]).topics[OFFSETS_TOPIC]
    return {len(partition.in_sync) for partition in topic.partitions}
