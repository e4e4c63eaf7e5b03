"""All links of one broker: which there are, what they hear of, and what is looked at from time to time."""

from __future__ import annotations

import pytest

from headrace.partitions.partition import Partition
from headrace.records.batch import HEADER_BYTES
from headrace.replication import frames, replication
from headrace.replication.frames import Kind
from headrace.replication.replication import DAMAGE_RETRY_SECONDS, JUDGEMENT_TICKS, Replication
from replication.peer import Peer, subscription, with_leading_peer, with_peer
from replication.scene import Scene

# What is followed.


def test_a_leader_is_reached_for_when_its_address_comes_to_be_known() -> None:
    scene = Scene(brokers=(1,))
    peer, broker = Peer(scene, None), scene.alive[1]
    broker.replication.follow(broker.partitions.follow(broker.log(), 3, 9), 9, 3)
    assert broker.replication._leaders[9].connects == 0
    broker.replication.peers({9: (peer.address, "run-9")})
    assert broker.replication._leaders[9].connects == 1


def test_a_partition_is_copied_from_one_leader_at_a_time() -> None:
    scene, _, _ = with_leading_peer()
    broker = scene.alive[1]
    before = broker.replication._leaders[9]
    broker.replication.follow(broker.partition(), 8, 3)
    assert before.is_idle
    assert not broker.replication._leaders[8].is_idle


def test_what_is_not_followed_any_more_is_not_copied_and_its_link_ends() -> None:
    scene, peer, _ = with_leading_peer()
    broker = scene.alive[1]
    partition = broker.partition()
    assert partition.replicated
    broker.replication.unfollow(partition.topic_partition)
    assert not partition.replicated
    scene.run(0.05)
    assert Kind.UNSUBSCRIBE in peer.kinds()
    scene.run(0.2)
    assert peer.reason
    assert broker.replication._leaders == {}


def test_a_role_that_ends_takes_its_copying_along_and_no_later_one() -> None:
    scene, _, _ = with_leading_peer()
    broker = scene.alive[1]
    old = broker.partition()
    new = broker.partitions.follow(broker.log(), 4, 9)
    assert broker.replication._leaders[9].is_idle
    broker.replication.follow(new, 9, 4)
    broker.replication.closed(old)
    assert not broker.replication._leaders[9].is_idle


# Links.


def test_a_broker_that_stops_ends_all_its_links_and_takes_no_more() -> None:
    scene, peer = with_peer()
    broker = scene.alive[1]
    leading = Peer(scene, None, broker=8)
    broker.replication.peers({8: (leading.address, "run-8")})
    broker.replication.follow(broker.partitions.follow(broker.log(), 5, 8), 8, 5)
    scene.run(0.05)
    assert (peer.reason, leading.reason) == ("", "")
    broker.replication.close()
    scene.run(0.05)
    assert peer.reason
    assert leading.reason
    assert broker.replication._accept() is None
    late = Peer(scene, 1, broker=7)
    assert late.kinds() == []
    broker.host.listen(broker.address, lambda: None)  # the address is free


def test_a_broker_that_never_listened_stops_too() -> None:
    scene = Scene(brokers=(1,))
    made = scene.alive[1]
    never = Replication(
        made.host, made.partitions, made.clock, 2, "run", "test", replication.ReplicationSettings(), made.disk
    )
    never.close()
    assert made.partitions.links is None


def test_so_many_links_are_taken_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, _ = with_peer()
    monkeypatch.setattr(replication, "LINKS_MAX", 2)
    assert Kind.HELLO in Peer(scene, 1, broker=8).kinds()
    assert Peer(scene, 1, broker=7).kinds() == []


def test_a_follower_has_one_link_the_last_one() -> None:
    scene, peer = with_peer()
    again = Peer(scene, 1)
    assert peer.reason
    assert not again.reason


def test_a_follower_that_falls_silent_is_let_go() -> None:
    scene, peer = with_peer()
    scene.run(2.5)
    assert not peer.reason
    scene.run(1)
    assert peer.reason


def test_of_a_stream_that_has_ended_nothing_is_kept() -> None:
    scene, peer = with_peer()
    peer.send(subscription(1, 0, -1))
    assert len(scene.alive[1].replication._streams) == 1
    peer.send(frames.unsubscribe(1, 0))
    assert scene.alive[1].replication._streams == {}
    assert not scene.alive[1].partition().replicated


def test_a_budget_that_is_spent_comes_back_with_time() -> None:
    scene, _ = with_peer()
    budget = scene.alive[1].replication._budget
    budget.spend(2 * budget.bytes_per_second)
    assert budget.is_spent
    scene.run(1.5)
    assert not budget.is_spent


# From time to time.


def test_each_led_partition_is_judged_once_in_so_many_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(brokers=(1, 2), partitions=25)
    for index in range(25):
        scene.elect(1, (1, 2), index)
    broker = scene.alive[1]
    judged: list[int] = []
    monkeypatch.setattr(Replication, "_judge_isr", lambda _, each: judged.append(each.topic_partition.partition))
    broker.replication._judgement_ticks_left = 0
    for _ in range(2):
        judged.clear()
        for _ in range(JUDGEMENT_TICKS):
            broker.replication._judge_some()
        assert sorted(judged) == list(range(25))
    judged.clear()
    scene.run(1.05)
    assert set(judged) == set(range(25)), "a tick does it"


@pytest.mark.parametrize(
    ("isr", "replicas", "has_followers"),
    [((1,), (1,), False), ((1,), (1, 2), True), ((1, 2), (1,), True), ((1, 2), (1, 2), True), ((1,), (), False)],
)
def test_only_partitions_with_other_replicas_are_judged(
    isr: tuple[int, ...], replicas: tuple[int, ...], has_followers: bool
) -> None:
    scene = Scene(brokers=(1,))
    broker = scene.alive[1]
    led = broker.partitions.lead(broker.log(), 7, {each: f"run-{each}" for each in isr}, replicas)
    assert broker.replication._has_followers(led) is has_followers
    assert not broker.replication._has_followers(broker.partitions.follow(broker.log(), 8, 2))


def test_a_broker_that_has_stopped_and_one_that_does_not_lead_want_no_other_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, _ = with_peer()
    broker = scene.alive[1]
    led = broker.partition()
    assert led.core is not None
    wanted = led.core.judge_isr
    asked: list[int] = []

    def noted(*given: object) -> object:
        asked.append(1)
        return wanted(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(type(led.core), "judge_isr", lambda _, *given: noted(*given))
    broker.replication._judge_isr(led)
    assert len(asked) == 1
    broker.replication._closed = True
    broker.replication._judge_isr(led)
    broker.replication._closed = False
    broker.replication._judge_isr(broker.partitions.follow(broker.log(), 5, 9))
    assert len(asked) == 1


# Damage.


def test_a_place_that_is_deleted_is_not_damaged_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "_can_read", lambda *_: False)
    scene, _, _ = with_leading_peer()
    partition, damaged = scene.alive[1].partition(), scene.alive[1].partitions.damaged
    partition.found_damage(2)
    partition.log.start_offset = 2
    scene.run(0.2)
    assert damaged == {partition: 2}
    partition.log.start_offset = 3
    scene.run(0.2)
    assert damaged == {}


def test_a_place_that_cannot_be_read_is_tried_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(brokers=(1,))
    scene.elect(1, (1,))
    tried: list[float] = []
    is_whole = False

    def can_read(_partition: Partition, _offset: int) -> bool:
        tried.append(scene.clock.now())
        return is_whole

    monkeypatch.setattr(replication, "_can_read", can_read)
    partition, damaged = scene.alive[1].partition(), scene.alive[1].partitions.damaged
    partition.found_damage(2)
    scene.run(3 * DAMAGE_RETRY_SECONDS)
    assert 2 <= len(tried) <= 4
    assert damaged == {partition: 2}
    is_whole = True
    scene.run(DAMAGE_RETRY_SECONDS + 1)
    assert damaged == {}


def test_a_follower_copies_a_damaged_place_again_and_a_leader_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "_can_read", lambda *_: False)
    scene, _, _ = with_leading_peer()
    broker = scene.alive[1]
    partition = broker.partition()
    partition.found_damage(0)
    scene.run(0.2)
    (following,) = broker.replication._leaders[9]._followings.values()
    assert following.mend_from == 0
    scene = Scene(brokers=(1,))
    scene.elect(1, (1,))
    led = scene.alive[1].partition()
    led.found_damage(0)
    scene.run(0.2)
    assert scene.alive[1].partitions.damaged == {led: 0}


def test_damage_of_an_earlier_role_is_not_copied_again_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "_can_read", lambda *_: False)
    scene, _, _ = with_leading_peer()
    broker = scene.alive[1]
    old = broker.partition()
    broker.replication.follow(broker.partitions.follow(broker.log(), 4, 9), 9, 4)
    broker.partitions.damaged.clear()
    broker.partitions.damaged[old] = 0
    scene.run(0.2)
    (following,) = broker.replication._leaders[9]._followings.values()
    assert following.mend_from is None


@pytest.mark.parametrize(("offset", "readable"), [(0, True), (1, False), (2, False), (3, True), (4, True)])
def test_a_place_can_be_read_if_its_batch_and_the_one_behind_it_are_whole(offset: int, readable: bool) -> None:
    scene = Scene(brokers=(1,))
    scene.elect(1, (1,))
    for nth in range(4):
        scene.produce(b"value %d" % nth)
    log = scene.alive[1].log()
    piece = log.read(2, 1, 4).slices[0]
    scene.disks[1].flip(piece.file.path, piece.position + HEADER_BYTES)
    assert replication._can_read(scene.alive[1].partition(), offset) is readable


def test_the_address_of_a_broker_that_is_gone_is_forgotten() -> None:
    scene, peer, _ = with_leading_peer()
    broker = scene.alive[1]
    end = broker.replication._leaders[9]
    assert end._address == peer.address
    broker.replication.peers({})
    assert end._address is None
