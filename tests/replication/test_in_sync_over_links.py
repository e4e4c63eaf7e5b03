"""The in-sync set over real links: who leaves, who joins, and what is acknowledged meanwhile."""

from __future__ import annotations

import pytest

from headrace.errors import NotEnoughReplicas, NotEnoughReplicasAfterAppend
from headrace.replication.replication import ReplicationSettings
from proving import proves
from replication.scene import Scene


def isr(scene: Scene) -> list[int]:
    return sorted(scene.keys[0].isr)


@proves("G10", "F8")
def test_a_follower_that_falls_silent_leaves_and_its_waiters_are_answered() -> None:
    scene = Scene()
    scene.elect(1, (1, 2, 3))
    scene.until_answered(scene.produce(b"a"))
    scene.network.cut("b1", "b3")
    waiting = scene.produce(b"b")
    scene.run(2)
    assert waiting.waiting
    scene.until("the shrink", lambda: isr(scene) == [1, 2], 15)
    scene.until_answered(waiting)
    assert waiting.offset == 1
    scene.network.heal("b1", "b3")
    scene.until("the return", lambda: isr(scene) == [1, 2, 3])
    scene.settle()


@proves("G10")
def test_a_hitch_of_one_follower_is_one_slow_round_though_another_catches_up() -> None:
    """Each position of the one that catches up has the set judged."""
    settings = ReplicationSettings(round_max_ms=50, catchup_bytes_per_second=4 << 20)
    scene = Scene(replication=settings)
    scene.kill(3)
    scene.elect(1, (1, 2))
    for _ in range(200):
        scene.until_answered(scene.produce(bytes(100_000)))
    scene.start(3)
    scene.tell(3)
    scene.run(1.2)
    scene.network.slow("b1", "b2", (0.15, 0.15))
    for _ in range(60):
        scene.produce(b"live")
        scene.run(0.005)
    assert 0 < scene.alive[3].log().end_offset < 200, "it catches up"
    scene.network.slow("b1", "b2", None)
    scene.until("the join", lambda: isr(scene) == [1, 2, 3])
    assert [change.removed for change in scene.changes] == [()]


@proves("G10")
def test_a_follower_whose_rounds_stay_slow_leaves_and_one_that_is_quick_again_returns() -> None:
    scene = Scene(replication=ReplicationSettings(round_max_ms=50))
    scene.elect(1, (1, 2, 3))

    def load(seconds: float) -> None:
        end = scene.clock.now() + seconds
        while scene.clock.now() < end:
            scene.produce(b"live")
            scene.run(0.005)

    load(2)
    scene.network.slow("b1", "b2", (0.15, 0.15))
    load(2)
    assert isr(scene) == [1, 2, 3]
    load(3)
    assert isr(scene) == [1, 3]
    scene.network.slow("b1", "b2", None)
    load(10)
    assert isr(scene) == [1, 3]
    load(12)
    assert isr(scene) == [1, 2, 3]
    assert [change.removed for change in scene.changes] == [(2,), ()]


@proves("G5")
def test_with_too_few_in_sync_nothing_is_acknowledged_and_the_watermark_stands_still() -> None:
    """KIP-966, strict minimum: no silent weaker acknowledgement."""
    scene = Scene(topic={"min_insync_replicas": 2})
    leader = scene.elect(1, (1, 2, 3))
    scene.until_answered(scene.produce(b"a"))
    scene.kill(2)
    scene.kill(3)
    waiting = scene.produce(b"b")
    scene.until("the shrink", lambda: isr(scene) == [1], 15)
    scene.until_answered(waiting)
    assert isinstance(waiting.error, NotEnoughReplicasAfterAppend)
    refused = scene.produce(b"c")
    assert isinstance(refused.error, NotEnoughReplicas)
    assert scene.produce(b"d", acks=1).offset == 2
    scene.run(1)
    assert leader.high_watermark == 1
    for number in (2, 3):
        scene.start(number)
        scene.tell(number)
    scene.until("the return", lambda: isr(scene) == [1, 2, 3])
    scene.settle()
    assert scene.alive[2].values() == [b"a", b"b", b"d"]


def test_while_the_answer_to_a_change_is_lost_the_watermark_needs_both_sets() -> None:
    scene = Scene()
    leader = scene.elect(1, (1, 2, 3))
    scene.until_answered(scene.produce(b"a"))
    scene.held = []
    scene.network.cut("b1", "b3")
    waiting = scene.produce(b"b")
    scene.until("the shrink in the key", lambda: isr(scene) == [1, 2], 15)
    scene.run(5)
    assert waiting.waiting
    assert leader.high_watermark == 1
    assert len(scene.changes) == 1
    scene.release_answers()
    assert waiting.offset == 1


def test_a_member_whose_joining_is_not_answered_yet_is_waited_for() -> None:
    scene = Scene()
    scene.elect(1, (1, 2))
    scene.held = []
    scene.until_answered(scene.produce(b"a"))
    scene.until("the join in the key", lambda: isr(scene) == [1, 2, 3])
    scene.network.cut("b1", "b3")
    waiting = scene.produce(b"b")
    scene.run(1)
    assert waiting.waiting
    scene.kill(1)
    scene.elect(3, (3,))
    assert scene.alive[3].values() == [b"a"]


def test_a_broker_that_came_back_is_not_the_member_that_it_was() -> None:
    """KIP-903: its positions count only once the set names its new incarnation."""
    scene = Scene(brokers=(1, 2))
    leader = scene.elect(1, (1, 2))
    scene.until_answered(scene.produce(b"a"))
    before = scene.keys[0].isr[2]
    scene.kill(2)
    scene.start(2)
    scene.held = []
    scene.tell(2)
    waiting = scene.produce(b"b")
    scene.run(1)
    assert scene.alive[2].log().end_offset == 2
    assert waiting.waiting
    assert leader.high_watermark == 1
    scene.release_answers()
    scene.until_answered(waiting)
    assert scene.keys[0].isr[2] != before


@proves("J10")
def test_a_duplicate_is_acknowledged_only_when_its_original_has_passed_the_watermark() -> None:
    scene = Scene()
    scene.elect(1, (1, 2, 3))
    scene.until_copying()
    scene.network.cut("b1", "b3")
    original = scene.produce(b"a", producer=(9, 0, 0))
    duplicate = scene.produce(b"a", producer=(9, 0, 0))
    scene.run(1)
    assert original.waiting
    assert duplicate.waiting
    scene.kill(1)
    scene.elect(2, (2, 3))
    scene.network.cut("b2", "b3")
    again = scene.produce(b"a", producer=(9, 0, 0))
    scene.run(1)
    assert again.waiting
    scene.network.heal("b2", "b3")
    scene.until_answered(again)
    assert again.offset == 0
    scene.settle()
    assert scene.alive[3].values() == [b"a"]


@proves("G2")
def test_a_follower_serves_what_its_leader_has_committed_and_no_more() -> None:
    scene = Scene()
    scene.elect(1, (1, 2, 3))
    scene.until_answered(scene.produce(b"a"))
    scene.settle()
    scene.network.cut("b1", "b3")
    scene.produce(b"b")
    scene.run(1)
    follower = scene.alive[2].partition()
    assert (follower.log.end_offset, follower.high_watermark) == (2, 1)
    assert follower.read(1, 1000).count == 0
    assert follower.read(2, 1000).count == 0
    assert follower.read(0, 1000).count > 0


@proves("G11")
@pytest.mark.parametrize("clean", [True, False])
def test_watermarks_are_known_again_after_a_restart(clean: bool) -> None:
    scene = Scene()
    scene.elect(1, (1, 2, 3))
    for nth in range(10):
        scene.until_answered(scene.produce(b"%d" % nth))
    scene.run(12)
    for broker in list(scene.alive.values()):
        if clean:
            broker.watermarks.close()
            broker.store.close()
        scene.kill(broker.number)
    for number in scene.brokers:
        scene.start(number)
        scene.network.cut("b1", f"b{number}")
    partition = scene.elect(1, (1, 2, 3))
    assert partition.high_watermark == 10


@proves("G10")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_follower_whose_disk_is_full_leaves_and_returns_when_there_is_room(layout: str) -> None:
    scene = Scene(layout=layout)
    scene.elect(1, (1, 2, 3))
    scene.until_answered(scene.produce(b"a"))
    scene.settle()
    disk = scene.disks[2]
    capacity, disk.capacity_bytes = disk.capacity_bytes, 0
    waiting = scene.produce(b"b", timeout_ms=60_000)
    scene.until("the shrink", lambda: isr(scene) == [1, 3], 15)
    scene.until_answered(waiting)
    assert waiting.offset == 1
    disk.capacity_bytes = capacity
    scene.until("the return", lambda: isr(scene) == [1, 2, 3])
    scene.settle()


@proves("G10")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_follower_whose_log_is_offline_leaves_and_asks_no_more(layout: str) -> None:
    scene = Scene(layout=layout, topic={"durability": "disk"})
    scene.elect(1, (1, 2, 3))
    scene.until_answered(scene.produce(b"a"))
    scene.settle()
    folder = "/data/@commitlog" if layout == "shared" else "/data/orders/orders-0"
    for name in scene.disks[2].list(folder):
        if name.endswith(".log"):
            scene.disks[2].fail_sync(f"{folder}/{name}")
    waiting = scene.produce(b"b", timeout_ms=60_000)
    scene.until("the shrink", lambda: isr(scene) == [1, 3], 15)
    scene.until_answered(waiting)
    assert scene.alive[2].log().offline is not None
    assert [end.broker for end, _ in scene.alive[1].replication._streams[scene.alive[1].partition()]] == [3]
    for _ in range(5):
        scene.until_answered(scene.produce(b"c"))
        scene.run(5)
    assert isr(scene) == [1, 3]
