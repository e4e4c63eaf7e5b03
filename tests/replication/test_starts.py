"""Where a partition begins: all replicas in sync have a start safe on disk before anyone is told of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headrace.errors import NotLeader, OffsetNotAvailable, OffsetOutOfRange
from headrace.partitions.leader_core import START_SECONDS_MAX, UNKNOWN
from headrace.replication.replication import ReplicationSettings
from proving import proves
from replication.scene import Scene

LAYOUTS = pytest.mark.parametrize("layout", ["partitioned", "shared"])
TOPIC: dict[str, object] = {"segment_bytes": 1024, "durability": "disk", "min_insync_replicas": 2}


def filled(layout: str, count: int = 40, **topic: object) -> Scene:
    """Three replicas in sync with so many batches of one record."""
    scene = Scene(layout=layout, topic=TOPIC | topic)
    scene.elect(1, (1, 2, 3))
    for nth in range(count):
        scene.until_answered(scene.produce(b"%d" % nth * 50))
    scene.settle()
    return scene


@proves("F6")
@LAYOUTS
@pytest.mark.parametrize("power", [None, 7])
def test_what_was_reported_deleted_does_not_come_back_with_another_leader(layout: str, power: int | None) -> None:
    scene = filled(layout)
    deletion = scene.delete_before(30)
    assert not deletion.answered
    scene.run(0.05)  # nothing waits for the next tick, or for records
    assert deletion.answered
    assert deletion.error is None
    assert scene.starts() == {1: 30, 2: 30, 3: 30}
    for number in (2, 3):
        scene.kill(number, power=power)
        scene.start(number)
    scene.kill(1, power=power)
    scene.elect(2, (2, 3))
    scene.until("its start", lambda: scene.alive[2].partition().start_offset == 30)
    assert scene.alive[2].log().start_offset == 30


@proves("J6")
@LAYOUTS
def test_retention_of_an_idle_topic_moves_all_starts_together(layout: str) -> None:
    scene = filled(layout, retention_ms=100_000, segment_ms=1000)
    scene.run(700)
    assert scene.starts() == {1: 40, 2: 40, 3: 40}
    scene.kill(1)
    scene.elect(3, (2, 3))
    scene.until("its start", lambda: scene.alive[3].partition().start_offset == 40)


@LAYOUTS
@pytest.mark.parametrize("by", ["time", "size"])
def test_a_follower_does_not_delete_by_its_own_clock_or_size_but_frees_its_disk_with_its_leader(
    layout: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = filled(layout, 200)
    held = scene.alive[2].log()
    settings = held.settings
    held.settings = replace(settings, retention_ms=1) if by == "time" else replace(settings, retention_bytes=1)
    monkeypatch.setattr(scene.alive[2].clock, "wall_ms", lambda: scene.clock.wall_ms() + 10_000_000_000)
    scene.run(700)
    assert scene.starts() == {1: 0, 2: 0, 3: 0}
    assert held.size_bytes == scene.alive[1].log().size_bytes
    leading = scene.alive[1].log()
    leading.settings = replace(leading.settings, retention_bytes=0)
    scene.run(700)
    assert len(set(scene.starts().values())) == 1
    assert held.start_offset > 150
    assert held.size_bytes < scene.alive[1].log().end_offset * 10


@LAYOUTS
def test_a_dead_member_is_waited_for_until_it_has_left_the_set(layout: str) -> None:
    scene = filled(layout)
    scene.kill(3)
    deletion = scene.delete_before(30)
    scene.run(3)
    assert not deletion.answered
    leader = scene.alive[1].partition()
    assert leader.start_offset == 0
    assert leader.log.start_offset == 0
    assert leader.read(0, 1000).count
    scene.until("the answer", lambda: deletion.answered)
    assert 3 not in scene.keys[0].isr
    assert scene.starts() == {1: 30, 2: 30}
    scene.start(3)
    scene.tell(3)
    assert scene.alive[3].log().start_offset == 0
    scene.until("the join", lambda: 3 in scene.keys[0].isr)
    assert scene.alive[3].log().safe_start_offset == 30


@LAYOUTS
def test_a_leader_alone_in_its_set_needs_nobody(layout: str) -> None:
    scene = Scene(brokers=(1,), layout=layout, topic=TOPIC | {"min_insync_replicas": 1})
    scene.elect(1, (1,))
    for _ in range(10):
        scene.until_answered(scene.produce(b"a"))
    deletion = scene.delete_before(4)
    scene.until("the answer", lambda: deletion.answered)
    scene.kill(1, power=3)
    scene.start(1)
    assert scene.elect(1, (1,)).start_offset == 4


@LAYOUTS
def test_who_waits_hears_that_the_leader_has_changed(layout: str) -> None:
    scene = filled(layout)
    scene.kill(3)
    deletion = scene.delete_before(30)
    scene.run(1)
    scene.elect(2, (1, 2))
    assert isinstance(deletion.error, NotLeader)
    # Broker 2 had raised its start, and leads: what was asked for is done after all, and not taken back again.
    leader = scene.alive[2].partition()
    scene.until("its start", lambda: leader.start_offset == 30)
    assert scene.starts() == {1: 30, 2: 30}


@LAYOUTS
def test_a_new_leader_tells_no_start_before_all_members_have_it(layout: str) -> None:
    """Broker 2 alone has raised its start. If it told that and died, broker 3 would tell a lower one."""
    scene = filled(layout)
    scene.network.cut("b1", "b3")
    scene.delete_before(30)
    scene.run(1)
    assert scene.starts() == {1: 0, 2: 30, 3: 0}
    scene.kill(1)
    scene.network.cut("b2", "b3")
    leader = scene.elect(2, (2, 3))
    scene.run(1)
    assert leader.start_offset == UNKNOWN
    with pytest.raises(OffsetNotAvailable):
        leader.first_offset()
    with pytest.raises(OffsetNotAvailable):
        leader.read(10, 1000)
    assert leader.read(30, 1000).count
    scene.network.heal("b2", "b3")
    scene.until("its start", lambda: leader.start_offset == 30)
    assert scene.alive[3].log().safe_start_offset == 30
    with pytest.raises(OffsetOutOfRange):
        leader.read(10, 1000)


@LAYOUTS
def test_both_sets_count_while_a_change_is_not_answered(layout: str) -> None:
    scene = filled(layout)
    scene.held = []
    scene.kill(3)
    scene.until("the wish", lambda: scene.held)
    deletion = scene.delete_before(30)
    scene.run(5)
    assert not deletion.answered
    scene.release_answers()
    scene.until("the answer", lambda: deletion.answered)


@LAYOUTS
def test_a_leader_that_dies_before_anyone_has_heard_has_deleted_nothing(layout: str) -> None:
    scene = filled(layout)
    scene.network.cut("b1", "b2")
    scene.network.cut("b1", "b3")
    deletion = scene.delete_before(30)
    scene.run(1)
    assert not deletion.answered
    scene.kill(1, power=1)
    scene.network.heal("b1", "b2")
    scene.network.heal("b1", "b3")
    scene.start(1)
    leader = scene.elect(1, (1, 2, 3))
    assert leader.start_offset == 0
    with pytest.raises(OffsetOutOfRange):
        scene.delete_before(41)
    scene.until("its watermark", lambda: leader.high_watermark == 40)
    again = scene.delete_before(30)
    scene.until("the answer", lambda: again.answered)
    more = scene.delete_before(30)
    assert more.answered
    assert scene.starts() == {1: 30, 2: 30, 3: 30}


@LAYOUTS
def test_a_member_that_cannot_keep_its_start_leaves_the_set(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = filled(layout)
    monkeypatch.setattr(scene.alive[3].store._checkpoints, "_begin", lambda: None)
    deletion = scene.delete_before(30)
    scene.run(START_SECONDS_MAX - 1)
    assert not deletion.answered
    scene.until("the answer", lambda: deletion.answered)
    assert sorted(scene.keys[0].isr) == [1, 2]


@proves("F6")
@LAYOUTS
def test_a_follower_that_begins_anew_has_its_leaders_start_safe_before_it_joins(layout: str) -> None:
    scene = Scene(brokers=(1, 2), layout=layout, topic=TOPIC | {"min_insync_replicas": 1})
    scene.elect(1, (1, 2))
    scene.kill(2)
    scene.elect(1, (1,))
    for _ in range(20):
        scene.until_answered(scene.produce(*[b"five"] * 5))
    scene.delete_before(52)  # inside a batch
    scene.run(1)
    scene.start(2)
    scene.tell(2)
    scene.until("the join", lambda: 2 in scene.keys[0].isr)
    scene.kill(2, power=1)
    scene.start(2)
    assert scene.alive[2].log().start_offset == 52


@LAYOUTS
@pytest.mark.parametrize("seed", range(12))
def test_no_course_of_deletions_kills_and_elections_lowers_a_start(layout: str, seed: int) -> None:
    """Elections are from the in-sync set, as the controller makes them; machines lose power."""
    chance = random.Random(seed)
    scene = Scene(
        layout=layout,
        seed=seed,
        topic=TOPIC,
        replication=ReplicationSettings(lag_time_max_ms=1000, link_timeout_ms=500),
        sync_seconds=lambda: chance.choice((0.001, 0.02, 0.3)),
    )
    scene.elect(1, (1, 2, 3))
    told = 0

    def leader() -> int:
        return scene.keys[0].leader

    def look() -> None:
        nonlocal told
        if leader() in scene.alive:
            start = scene.alive[leader()].partition().start_offset
            assert start == UNKNOWN or start >= told, f"{start} after {told}"
            told = max(told, start)

    def told_now() -> int:
        look()
        return told

    def elect() -> None:
        isr = [
            number
            for number, run in scene.keys[0].isr.items()
            if number in scene.alive and scene.alive[number].incarnation == run
        ]
        if isr:
            scene.elect(chance.choice(isr), isr)

    def restart() -> None:
        number = chance.choice(list(scene.alive))
        was_member = number in scene.keys[0].isr
        scene.kill(number, power=chance.randrange(1000) if chance.random() < 0.7 else None)
        scene.run(chance.choice((0.0, 0.05, 2.0)))
        look()
        scene.start(number)
        if was_member and number in scene.keys[0].isr:  # carried over: with durability disk nothing is lost
            scene.keys[0].isr[number] = scene.alive[number].incarnation
            scene.keys[0].revision += 1
        elect()

    def delete() -> None:
        if leader() in scene.alive:
            watermark = scene.alive[leader()].partition().high_watermark
            wanted = chance.randint(0, watermark)
            deletion = scene.delete_before(wanted)
            scene.run(chance.choice((0.0, 0.003, 0.05, 1.0)))
            assert not deletion.answered or deletion.error is not None or told_now() >= wanted

    for _ in range(40):
        for _ in range(5):
            if leader() in scene.alive:
                scene.produce(b"%d" % chance.randrange(1000) * 30, acks=1)
                scene.run(0.002)
        chance.choice((delete, delete, delete, restart, elect))()
        look()
    elect()
    scene.run(10)
    look()
    assert leader() in scene.alive
    assert told <= min(scene.starts().values())
