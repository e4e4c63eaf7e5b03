"""acks=-1 at the level of its topic, over links: answered early by name only, and read below the watermark always."""

from __future__ import annotations

import pytest

from headrace.errors import NotEnoughReplicas
from proving import proves
from replication.scene import Scene


@proves("F1", "G7", "R14")
@pytest.mark.parametrize("name", ["page-cache", "local-disk"])
def test_a_level_without_replication_does_not_wait_for_followers(name: str) -> None:
    scene = Scene(topic={"reliability": name, "min_insync_replicas": 0})
    leader = scene.elect(1, (1, 2, 3))
    for number in (2, 3):
        scene.network.cut("b1", f"b{number}")
    outcome = scene.produce(b"a")
    scene.run(0.01)
    assert outcome.offset == 0
    assert leader.high_watermark == 0
    assert leader.read(0, 1000).count == 0
    scene.run(20)
    assert sorted(scene.keys[0].isr) == [1]
    alone = scene.produce(b"b")
    scene.until_answered(alone)
    assert alone.offset == 1


@proves("F1", "G7")
def test_one_replica_is_enough_where_the_level_says_so() -> None:
    scene = Scene(topic={"reliability": "one-replica"})
    leader = scene.elect(1, (1, 2, 3))
    scene.until_copying()
    scene.network.cut("b1", "b3")
    outcome = scene.produce(b"a")
    scene.run(0.1)
    assert outcome.offset == 0
    assert scene.alive[2].log().durable_offset == 1
    assert leader.high_watermark == 0
    scene.network.cut("b1", "b2")
    waiting = scene.produce(b"b")
    scene.run(1)
    assert waiting.waiting
    for number in (2, 3):
        scene.network.heal("b1", f"b{number}")
    scene.until_answered(waiting)
    scene.settle()


@proves("F1", "R14")
def test_the_strongest_level_waits_for_every_sync() -> None:
    scene = Scene(topic={"reliability": "all-replicas"})
    scene.elect(1, (1, 2, 3))
    scene.until_copying()
    scene.disks[3].hold_syncs()
    outcome = scene.produce(b"a")
    scene.run(1)
    assert outcome.waiting
    assert scene.alive[3].log().written_offset == 1
    scene.disks[3].release_syncs()
    scene.until_answered(outcome)
    scene.settle()


@proves("F1")
@pytest.mark.parametrize(("point", "held_back"), [("received", False), ("written", False), ("flushed", True)])
def test_a_point_before_the_sync_does_not_wait_for_it(point: str, held_back: bool) -> None:
    scene = Scene(topic={"durability": "disk", "replication_point": point})
    scene.elect(1, (1, 2, 3))
    scene.until_copying()
    for number in (2, 3):
        scene.disks[number].hold_syncs()
    outcome = scene.produce(b"a")
    scene.run(0.05)
    assert outcome.waiting == held_back
    for number in (2, 3):
        scene.disks[number].release_syncs()
    scene.settle()


@proves("F1")
@pytest.mark.parametrize("point", ["queued", "sent"])
def test_a_point_of_the_leaders_own_side_needs_no_answer(point: str) -> None:
    scene = Scene(topic={"replication_point": point}, delay_seconds=(0.05, 0.05))
    scene.elect(1, (1, 2, 3))
    scene.until_copying()
    outcome = scene.produce(b"a")
    assert outcome.offset == 0
    scene.settle()


@proves("F1")
def test_racks_needs_a_follower_in_the_leaders_room_and_one_in_another() -> None:
    scene = Scene(topic={"replication_policy": "racks"})
    scene.elect(1, (1, 2, 3))
    scene.until_copying()
    with pytest.raises(NotEnoughReplicas, match="no replica stands in another rack"):
        raise scene.produce(b"a").error
    scene.alive[1].partitions.racks.update({1: "a", 2: "a", 3: "b"})
    scene.network.cut("b1", "b3")
    outcome = scene.produce(b"a")
    scene.run(1)
    assert outcome.waiting
    scene.network.heal("b1", "b3")
    scene.until_answered(outcome)
    scene.settle()
