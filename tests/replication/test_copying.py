"""Records on their way to followers: one round trip, whole and in order, on both layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from headrace.replication.frames import Frame, Kind
from headrace.replication.link import LinkSession
from partitions.led import Outcome, batch
from proving import proves
from replication.scene import Scene


@proves("F2", "G16")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("durability", ["os", "disk"])
def test_followers_hold_what_the_leader_does(layout: str, durability: str) -> None:
    scene = Scene(layout=layout, topic={"durability": durability})
    scene.elect(1, (1, 2, 3))
    outcomes = [scene.produce(b"%d" % nth) for nth in range(50)]
    scene.until_answered(*outcomes)
    assert [outcome.offset for outcome in outcomes] == list(range(50))
    scene.settle()
    for broker in scene.alive.values():
        assert broker.values() == [b"%d" % nth for nth in range(50)]


@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_old_pages_are_read_ahead_and_checked_before_they_are_sent(layout: str) -> None:
    """What a store finds at its start is neither checked nor in the page cache."""
    scene = Scene(brokers=(1, 2), layout=layout, topic={"segment_bytes": 100_000})
    scene.kill(2)
    scene.elect(1, (1,))
    for _ in range(100):
        scene.produce(bytes(10_000))
    scene.alive[1].store.close()
    scene.kill(1)
    disk = scene.disks[1]
    folder = "/data/@commitlog" if layout == "shared" else "/data/orders/orders-0"
    for name in disk.list(folder):
        disk.evict(f"{folder}/{name}")
    scene.start(1)
    scene.start(2)
    scene.elect(1, (1,))
    scene.settle()
    assert len(scene.alive[2].values()) == 100


@proves("F2")
def test_a_turn_of_many_appends_to_many_partitions_is_one_frame_of_positions_and_one_of_watermarks() -> None:
    scene = Scene(brokers=(1, 2), partitions=20, delay_seconds=(0.01, 0.01))
    for index in range(20):
        scene.elect(1, (1, 2), index)
        scene.until_copying(index)
        scene.until_answered(scene.produce(b"the first of its epoch", index=index))
    scene.run(1)
    counts = count_frames(scene)
    leader = scene.alive[1]
    outcomes = []
    for _ in range(5):
        for index in range(20):
            outcome = Outcome()
            leader.partitions.submit(leader.partition(index), batch(b"value"), -1, 10_000, outcome)
            outcomes.append(outcome)
    leader.partitions.end_turn()
    began = scene.clock.now()
    while any(outcome.waiting for outcome in outcomes):
        scene.run(0.0005)
    assert scene.clock.now() - began < 0.0215
    scene.run(0.05)
    assert counts == {Kind.APPEND: 20, Kind.POSITIONS: 1, Kind.WATERMARKS: 1}


def count_frames(scene: Scene) -> Counter[int]:
    """Frames other than pings that any link takes from now on."""
    counts: Counter[int] = Counter()
    for broker in scene.alive.values():
        ends: list[LinkSession] = [*broker.replication._accepted, *broker.replication._leaders.values()]
        for end in ends:
            setattr(end, "take", counting(end.take, counts))  # noqa: B010
    return counts


def counting(take: Callable[[memoryview, Frame], None], counts: Counter[int]) -> Callable[[memoryview, Frame], None]:
    def counted(data: memoryview, frame: Frame) -> None:
        counts[Kind(frame.kind)] += 1
        take(data, frame)

    return counted


@proves("F2", "F3")
@pytest.mark.parametrize("durability", ["os", "disk"])
def test_acks_all_takes_one_round_trip_and_no_second_sync(durability: str) -> None:
    """The records leave in the turn that writes them: the leader's own sync runs beside the followers'."""
    sync, way = 0.004, 0.02
    scene = Scene(topic={"durability": durability}, delay_seconds=(way, way))
    scene.elect(1, (1, 2, 3))
    scene.until_copying()
    scene.run(1)
    for broker in scene.alive.values():
        broker.disk.serve(broker.clock, lambda: sync)
    began = scene.clock.now()
    outcome = scene.produce(b"value")
    while outcome.waiting:
        scene.run(0.0005)
    took = scene.clock.now() - began
    assert took < 2 * way + (sync if durability == "disk" else 0.0) + 0.001
