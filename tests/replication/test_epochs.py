"""Where logs part after failures, and how they become one again. Each case names where it comes from."""

from __future__ import annotations

import errno
import os
import random

import pytest

from headrace.errors import FencedEpoch, NotLeader, UnknownEpoch
from proving import proves
from replication.scene import Scene

PAIRS = (("b1", "b2"), ("b1", "b3"), ("b2", "b3"))


def acknowledged(scene: Scene, *values: bytes) -> None:
    outcome = scene.produce(*values)
    scene.until_answered(outcome)
    assert outcome.calls[0][0] is None


@proves("F5")
def test_a_restarted_follower_keeps_what_its_watermark_does_not_cover_yet() -> None:
    """KIP-101, first scenario: truncating to the watermark would lose a committed record."""
    scene = Scene(brokers=(1, 2), delay_seconds=(0.02, 0.02))
    scene.elect(1, (1, 2))
    acknowledged(scene, b"m1")
    scene.run(1)
    second = scene.produce(b"m2")
    scene.until("the copy", lambda: scene.alive[2].log().written_offset == 2)
    scene.network.cut_one_way("b1", "b2")
    scene.run(0.1)
    assert second.offset == 1
    assert scene.alive[2].partition().high_watermark == 1
    scene.kill(2)
    scene.network.heal("b1", "b2")
    scene.start(2)
    assert scene.alive[2].log().end_offset == 2
    scene.kill(1)
    scene.elect(2, (2,))
    scene.start(1)
    scene.tell(1)
    scene.settle()
    assert scene.alive[1].values() == [b"m1", b"m2"]


def after_power_cut(seed: int) -> Scene:
    """Both brokers hold m1 safely; m2 is acknowledged, but was synced by broker 1 alone when the power fails."""
    scene = Scene(brokers=(1, 2), topic={"flush_ms": 100_000})
    scene.elect(1, (1, 2))
    acknowledged(scene, b"m1")
    for number in (1, 2):
        scene.alive[number].store.close()
        scene.kill(number)
        scene.start(number)
    scene.elect(1, (1, 2))
    acknowledged(scene, b"m2")
    scene.kill(1)
    scene.kill(2, power=seed)
    scene.start(2)
    return scene


@proves("F5", "F7")
def test_two_logs_that_differ_at_one_offset_become_one() -> None:
    """KIP-101, second scenario: power fails everywhere, and the one that comes back first has less."""
    scene = next(scene for scene in map(after_power_cut, range(20)) if scene.alive[2].log().end_offset == 1)
    scene.elect(2, (2,))
    acknowledged(scene, b"m3")
    scene.start(1)
    assert scene.alive[1].values() == [b"m1", b"m2"]
    scene.tell(1)
    scene.settle()
    assert scene.alive[1].values() == [b"m1", b"m3"]


@proves("F5")
def test_a_second_failover_within_the_first_leaves_no_difference() -> None:
    """KIP-279: each of three brokers has led an epoch that another one does not know."""
    scene = Scene()
    scene.elect(1, (1, 2, 3))
    acknowledged(scene, b"a")
    scene.settle()
    for other in (2, 3):
        scene.network.cut("b1", f"b{other}")
    scene.network.cut("b2", "b3")
    scene.produce(b"b", acks=1)
    scene.kill(1)
    scene.elect(2, (2,))
    scene.produce(b"c", b"c2", acks=1)
    scene.kill(2)
    scene.elect(3, (3,))
    acknowledged(scene, b"d")
    for pair in PAIRS:
        scene.network.heal(*pair)
    for number in (1, 2):
        scene.start(number)
        scene.tell(number)
    scene.settle()
    assert scene.alive[1].values() == [b"a", b"d"]
    assert scene.alive[2].log().epoch_starts() == [(0, 0), (2, 1)]


@proves("F5")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_epochs_brokers_have_led_alone_all_become_equal(seed: int, layout: str) -> None:
    """KIP-279 in general: histories of leaders that nobody followed, told apart by epochs alone."""
    chance = random.Random(seed)
    scene = Scene(seed=seed, layout=layout)
    for epoch in range(12):
        for pair in PAIRS:
            (scene.network.cut if chance.random() < 0.6 else scene.network.heal)(*pair)
        if epoch and chance.random() < 0.3:
            number = chance.choice((1, 2, 3))
            scene.kill(number, silent=chance.random() < 0.5)
            scene.start(number)
        leader = chance.choice((1, 2, 3))
        scene.elect(leader, (leader,))
        for nth in range(chance.randint(0, 3)):
            scene.produce(*[b"%d-%d" % (epoch, nth)] * chance.randint(1, 3), acks=1)
            scene.run(chance.choice((0.0, 0.01, 0.3)))
    for pair in PAIRS:
        scene.network.heal(*pair)
    leader = chance.choice((1, 2, 3))
    scene.elect(leader, (leader,))
    acknowledged(scene, b"last")
    assert scene.settle()


@proves("F5", "G2")
def test_a_leader_that_wakes_up_after_its_successor_was_elected_can_commit_nothing() -> None:
    """KIP-320: it is fenced by the epoch, at followers, at consumers and in the end by its own image."""
    scene = Scene()
    scene.elect(1, (1, 2, 3))
    acknowledged(scene, b"a")
    old = scene.alive[1]
    old.clock.pause()
    scene.run(5)
    key = scene.keys[0]
    key.leader, key.epoch, key.isr, key.revision = 2, 1, {n: scene.alive[n].incarnation for n in (2, 3)}, 9
    for number in (2, 3):
        scene.tell(number)
    acknowledged(scene, b"b")
    old.clock.resume()
    lost = scene.produce(b"lost", to=1)
    scene.run(5)
    assert lost.waiting
    assert old.partition().high_watermark == 1
    with pytest.raises(UnknownEpoch):
        old.partition().check_epoch(1)
    scene.tell(1)
    assert isinstance(lost.error, NotLeader)
    with pytest.raises(FencedEpoch):
        old.partition().check_epoch(0)
    scene.settle()
    assert old.values() == [b"a", b"b"]


@proves("F6")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_follower_behind_the_log_start_begins_there_and_joins_only_when_it_has_the_rest(layout: str) -> None:
    scene = Scene(brokers=(1, 2), layout=layout, topic={"segment_bytes": 1024})
    scene.elect(1, (1, 2))
    acknowledged(scene, b"a")
    scene.settle()
    scene.kill(2)
    scene.elect(1, (1,))
    for _ in range(50):
        acknowledged(scene, bytes(200))
    scene.delete_before(40)
    scene.start(2)
    scene.changes.clear()
    scene.tell(2)
    follower = scene.alive[2]
    scene.until("the join", lambda: 2 in scene.keys[0].isr)
    assert follower.log().start_offset == 40
    assert follower.log().end_offset == 51
    assert [change.added for change in scene.changes] == [(2,)]
    scene.settle()


@proves("F7")
@pytest.mark.parametrize("seed", range(4))
def test_a_follower_ahead_of_a_leader_that_lost_its_tail_gives_up_what_is_not_there(seed: int) -> None:
    scene = Scene(brokers=(1, 2), topic={"flush_ms": 100_000})
    scene.elect(1, (1, 2))
    for nth in range(20):
        acknowledged(scene, b"%d" % nth)
    scene.settle()
    scene.kill(1, power=seed)
    scene.start(1)
    kept = scene.alive[1].log().end_offset
    assert scene.alive[2].log().end_offset == 20
    scene.elect(1, (1,))
    acknowledged(scene, b"after")
    scene.settle()
    assert scene.alive[2].values() == [b"%d" % nth for nth in range(kept)] + [b"after"]


@proves("F6")
def test_a_follower_deletes_what_its_leader_has_deleted() -> None:
    scene = Scene(brokers=(1, 2), topic={"segment_bytes": 1024})
    scene.elect(1, (1, 2))
    for _ in range(20):
        acknowledged(scene, bytes(200))
    scene.delete_before(10)
    acknowledged(scene, b"next")
    scene.settle()
    assert scene.alive[2].log().start_offset == 10


@proves("F6")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_an_empty_follower_that_begins_behind_its_leaders_end_gets_all_that_there_is(layout: str) -> None:
    """Possible after an unclean election: what it had, and had deleted, the new leader never saw."""
    scene = Scene(brokers=(1, 2), layout=layout)
    scene.elect(1, (1,))
    scene.alive[2].replication.unfollow(scene.alive[2].log().topic_partition)
    for nth in range(10):
        acknowledged(scene, b"%d" % nth)
    scene.alive[2].log().restart_at(50)
    scene.elect(1, (1,))
    scene.until("the join", lambda: 2 in scene.keys[0].isr)
    scene.settle()
    assert scene.alive[2].values() == [b"%d" % nth for nth in range(10)]


def test_a_follower_that_cannot_delete_what_its_leader_has_deleted_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(brokers=(1, 2), topic={"segment_bytes": 1024})
    scene.elect(1, (1, 2))
    for _ in range(20):
        acknowledged(scene, bytes(200))
    scene.settle()

    def fails(source: str, _target: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), source)

    with monkeypatch.context() as patched:
        patched.setattr(scene.disks[2], "rename", fails)
        scene.delete_before(10)
        for _ in range(3):
            acknowledged(scene, b"next")
    scene.settle()
    assert scene.alive[2].log().start_offset == 10
    assert scene.alive[2].replication._leaders[1].connects == 1
