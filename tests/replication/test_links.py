"""Links that drop, fall silent, lie or are slow; and the text's own bugs (F13)."""

from __future__ import annotations

import errno

import pytest

from headrace.errors import NotLeader
from headrace.ports.network import Address
from headrace.replication import frames
from headrace.replication.frames import Frame, Hello, Kind, Start, Subscribe
from headrace.replication.leader_session import CHUNK_BYTES
from headrace.replication.replication import ReplicationSettings
from partitions.led import batch
from proving import proves
from replication.peer import Peer, appended, at, subscription, with_leading_peer, with_peer
from replication.scene import CLUSTER, Scene


@proves("F2")
def test_positions_of_an_earlier_subscription_or_epoch_say_nothing() -> None:
    """Late positions from before a truncation: they would count what is not there any more."""
    scene, peer = with_peer()
    scene.produce(b"a")
    scene.produce(b"b")
    peer.send(subscription(1, 0, -1))
    peer.send(frames.positions([(1, 0, 2, 1, 1, 0)]))
    leader = scene.alive[1].partition()
    assert leader.high_watermark == 1
    peer.send(subscription(2, 1))
    for late in ((1, 0, 2, 2, 2, 0), (2, 1, 2, 2, 2, 0), (3, 0, 2, 2, 2, 0)):
        peer.send(frames.positions([late]))
        assert leader.high_watermark == 1
    peer.send(frames.positions([(2, 0, 2, 2, 2, 0)]))
    assert leader.high_watermark == 2


def test_a_position_beyond_what_was_sent_ends_the_link() -> None:
    scene, peer = with_peer()
    scene.produce(b"a")
    peer.send(subscription(1, 0, -1))
    peer.send(frames.positions([(1, 0, 7, 7, 7, 0)]))
    assert peer.reason
    assert scene.alive[1].partition().high_watermark == 0


@pytest.mark.parametrize(
    "wrong",
    [
        b"\x00\x00\x00\x00\x0b",
        b"\xff\xff\xff\xff\x09",
        b"\x00\x00\x00\x02\x63\x00",
        b"\x00\x00\x00\x05\x02\x00\x00\x00\x01",
        b"\x00\x00\x00\x08\x09" + bytes(7),
        frames.append_head(frames.Append(1, 0, 0, 0, 0), 0),
        frames.hello(Hello(CLUSTER, 9, "run-9")),
    ],
)
def test_a_frame_that_cannot_be_ends_the_link(wrong: bytes) -> None:
    scene, peer = with_peer()
    peer.send(wrong)
    assert peer.reason
    assert scene.produce(b"a", acks=1).offset == 0


def test_a_peer_of_another_cluster_or_with_our_number_is_refused() -> None:
    scene = Scene(brokers=(1, 2))
    scene.elect(1, (1, 2))
    assert Peer(scene, 1, cluster="another").reason
    assert Peer(scene, 1, broker=1).reason
    assert not Peer(scene, 1, broker=8).reason


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (Subscribe(1, bytes(16), 0, 1, -1, 0, 0), frames.Reason.NEW_EPOCH),
        (Subscribe(1, bytes(16), 0, -1, -1, 0, 0), frames.Reason.OLD_EPOCH),
        (Subscribe(1, bytes(16), 5, 0, -1, 0, 0), frames.Reason.NOT_LEADER),
        (Subscribe(1, b"x" * 16, 0, 0, -1, 0, 0), frames.Reason.NOT_LEADER),
    ],
)
def test_a_subscription_that_is_not_served_is_told_why(asked: Subscribe, reason: int) -> None:
    _, peer = with_peer()
    peer.send(frames.subscribe(asked))
    kind, body = peer.frames[-1]
    assert kind == Kind.STOP
    assert frames.read_stop(memoryview(body), Frame(kind, 0, len(body))).reason == reason
    assert not peer.reason


def test_a_broker_without_a_replica_gets_nothing() -> None:
    scene = Scene(brokers=(1, 2))
    scene.elect(1, (1, 2))
    peer = Peer(scene, 1, broker=8)
    peer.send(subscription(1, 0, -1))
    assert peer.kinds() == [Kind.HELLO, Kind.STOP]


@proves("F8")
def test_a_silent_link_holds_no_more_than_its_window_and_is_closed() -> None:
    settings = ReplicationSettings(window_bytes=1 << 20, link_timeout_ms=2000)
    scene = Scene(replication=settings, topic={"max_message_bytes": 2 << 20})
    scene.elect(1, (1, 2, 3))
    scene.until_copying()
    scene.network.cut("b1", "b3")
    (silent,) = [end for end in scene.alive[1].replication._accepted if end.broker == 3]
    waiting = [scene.produce(bytes(100_000), timeout_ms=60_000) for _ in range(100)]
    assert silent.under_way_bytes <= (1 << 20) + CHUNK_BYTES
    scene.run(1)
    assert silent.under_way_bytes <= (1 << 20) + CHUNK_BYTES
    scene.run(2)
    assert silent.under_way_bytes == 0
    assert [end.broker for end in scene.alive[1].replication._accepted] == [2]
    scene.until_answered(*waiting)
    assert [outcome.offset for outcome in waiting] == list(range(100))
    scene.network.heal("b1", "b3")
    scene.settle()


def test_an_idle_link_stays() -> None:
    scene = Scene(replication=ReplicationSettings(link_timeout_ms=1000))
    scene.elect(1, (1, 2, 3))
    scene.run(60)
    assert [scene.alive[n].replication._leaders[1].connects for n in (2, 3)] == [1, 1]
    assert scene.changes == []


@proves("F9")
def test_a_new_follower_catches_up_at_its_rate_and_live_traffic_does_not_wait_for_it() -> None:
    settings = ReplicationSettings(catchup_bytes_per_second=1 << 20)
    scene = Scene(replication=settings, topic={"max_message_bytes": 2 << 20})
    scene.kill(3)
    scene.elect(1, (1, 2))
    for _ in range(100):
        scene.produce(bytes(100_000))
    scene.until("the second copy", lambda: scene.alive[2].log().end_offset == 100)
    scene.start(3)
    scene.tell(3)
    began, slowest = scene.clock.now(), 0.0
    while scene.alive[3].log().end_offset < 100:
        sent = scene.clock.now()
        outcome = scene.produce(b"live")
        while outcome.waiting:
            scene.run(0.001)
        slowest = max(slowest, scene.clock.now() - sent)
        scene.run(0.05)
    took = scene.clock.now() - began
    assert 8 < took < 12
    assert slowest < 0.02
    scene.until("the join", lambda: 3 in scene.keys[0].isr)
    scene.settle()


@proves("F9")
def test_the_rate_of_catching_up_is_changed_on_the_way_and_what_was_sent_without_one_is_forgotten() -> None:
    settings = ReplicationSettings(catchup_bytes_per_second=0)
    scene = Scene(replication=settings, topic={"max_message_bytes": 2 << 20})
    scene.kill(2)
    scene.kill(3)
    scene.elect(1, (1,))
    for _ in range(200):
        scene.produce(bytes(100_000))
    scene.start(2)
    scene.tell(2)
    scene.until("a copy without a limit", lambda: scene.alive[2].log().end_offset == 200, seconds=2)
    scene.alive[1].replication.limit_catchup(1 << 20)
    scene.start(3)
    scene.tell(3)
    began, log = scene.clock.now(), scene.alive[3].log
    scene.until("half of it", lambda: log().end_offset >= 100, seconds=60)
    assert 8 < scene.clock.now() - began < 12
    scene.alive[1].replication.limit_catchup(0)
    scene.until("the rest", lambda: log().end_offset == 200, seconds=2)
    scene.settle()


def test_a_member_that_returns_is_not_held_back() -> None:
    settings = ReplicationSettings(catchup_bytes_per_second=1 << 16, lag_time_max_ms=60_000)
    scene = Scene(replication=settings, topic={"max_message_bytes": 2 << 20})
    scene.elect(1, (1, 2, 3))
    scene.until_copying()
    scene.network.cut("b1", "b3")
    waiting = [scene.produce(bytes(100_000)) for _ in range(40)]
    scene.run(5)
    scene.network.heal("b1", "b3")
    scene.network.reset("b1", "b3")
    scene.until_answered(*waiting, seconds=3)
    scene.settle()


@proves("F13")
def test_followers_go_on_where_they_were_when_the_link_to_their_leader_drops() -> None:
    """The text's bug: after the leader's link dropped, followers restarted for ever."""
    scene = Scene()
    scene.elect(1, (1, 2, 3))
    partition = scene.alive[2].partition()
    for nth in range(10):
        outcome = scene.produce(b"%d" % nth)
        scene.network.reset("b1", "b2")
        scene.until_answered(outcome)
    assert scene.alive[2].partition() is partition
    before = scene.alive[2].replication._leaders[1].connects
    scene.run(30)
    assert scene.alive[2].replication._leaders[1].connects == before <= 12
    scene.kill(1)
    scene.run(10)
    assert scene.alive[2].replication._leaders[1].connects < before + 25
    scene.start(1)
    scene.elect(1, (1, 2, 3))
    scene.settle()


@proves("F13")
@pytest.mark.parametrize("elected", [1, 2])
def test_a_restarted_leader_is_produced_to_again(elected: int) -> None:
    """The text's bug: nothing could be produced any more after the leader had restarted."""
    scene = Scene()
    scene.elect(1, (1, 2, 3))
    assert scene.produce(b"a").waiting
    scene.run(1)
    for _ in range(3):
        scene.kill(1)
        scene.start(1)
        scene.elect(elected, (1, 2, 3))
        outcome = scene.produce(b"b")
        scene.until_answered(outcome)
        assert outcome.offset > 0
    scene.settle()
    assert scene.alive[3].values() == [b"a", b"b", b"b", b"b"]


@proves("F13", "F3")
def test_who_waits_is_answered_before_the_next_role_exists() -> None:
    """The text's bug: the state changed first, and the queue of requests was cleared against the new one."""
    scene = Scene()
    old = scene.elect(1, (1, 2, 3))
    scene.network.cut("b1", "b2")
    broker = scene.alive[1]
    seen: list[tuple[bool, bool]] = []

    def done(error: object, _offset: int) -> None:
        found = broker.partitions.find_replica("orders", 0)
        seen.append((isinstance(error, NotLeader), found is old))
        with pytest.raises(NotLeader):
            old.append(memoryview(batch(b"late")), -1)

    for _ in range(3):
        broker.partitions.submit(old, batch(b"a"), -1, 60_000, done)
    broker.partitions.end_turn()
    scene.run(1)
    assert seen == []
    scene.elect(2, (2, 3))
    assert seen == [(True, True)] * 3
    assert broker.partition() is not old
    scene.network.heal("b1", "b2")
    scene.settle()


def test_a_batch_that_was_damaged_on_its_way_is_not_written_and_ends_the_link() -> None:
    scene = Scene(brokers=(1, 2), layout="partitioned")
    scene.elect(1, (1, 2))
    scene.until_copying()
    scene.network.cut("b1", "b2")
    scene.produce(b"some value")
    scene.produce(b"another")
    path = f"/data/orders/orders-0/{0:020d}.log"
    scene.network.reset("b1", "b2")
    scene.disks[1].flip(path, 70)
    scene.network.heal("b1", "b2")
    scene.run(5)
    assert scene.alive[2].log().end_offset == 0
    assert scene.alive[2].replication._leaders[1].connects < 12
    scene.disks[1].flip(path, 70)
    scene.settle()


def test_a_batch_that_comes_damaged_each_time_holds_up_its_partition_alone() -> None:
    scene = Scene(brokers=(1, 2), partitions=2, layout="partitioned")
    for index in (0, 1):
        scene.elect(1, (1, 2), index)
        scene.until_copying(index)
    scene.network.cut("b1", "b2")
    scene.produce(b"some value")
    path = f"/data/orders/orders-0/{0:020d}.log"
    scene.network.reset("b1", "b2")
    scene.disks[1].flip(path, 70)
    scene.network.heal("b1", "b2")
    link = scene.alive[2].replication._leaders[1]
    before = link.connects
    for _ in range(10):
        scene.until_answered(scene.produce(b"of another partition", index=1))
        scene.run(0.5)
    assert scene.alive[2].log().end_offset == 0
    assert link.connects == before + 2
    scene.disks[1].flip(path, 70)
    scene.settle()
    scene.settle(index=1)
    assert link.connects == before + 2


def test_the_address_of_a_leader_that_listens_elsewhere_is_followed() -> None:
    scene = Scene(brokers=(1, 2))
    scene.elect(1, (1, 2))
    scene.produce(b"a")
    scene.alive[2].replication.peers({})
    scene.run(1)
    assert scene.alive[2].replication._leaders[1].link is not None
    scene.network.reset("b1", "b2")
    outcome = scene.produce(b"b")
    scene.run(1)
    assert outcome.waiting
    scene.alive[2].replication.peers({1: (Address("b1", 1), "run-1")})
    scene.run(1)
    scene.alive[2].replication.peers({1: (scene.alive[1].address, "run-1")})
    scene.until_answered(outcome)
    scene.settle()


def test_start_is_answered_once_per_subscription() -> None:
    scene, peer = with_peer()
    scene.produce(b"a")
    peer.send(subscription(1, 0, -1))
    kind, body = peer.frames[1]
    start = frames.read_start(memoryview(body), Frame(kind, 0, len(body)))
    assert start == Start(1, 0, 0, 0, 0)
    assert peer.kinds() == [Kind.HELLO, Kind.START, Kind.EPOCHS, Kind.APPEND]
    peer.send(frames.unsubscribe(1, 0))
    scene.produce(b"b")
    scene.run(1)
    assert peer.kinds() == [Kind.HELLO, Kind.START, Kind.EPOCHS, Kind.APPEND]


def test_a_follower_takes_records_in_one_unbroken_stream_only() -> None:
    """Offsets may have gaps where a log was compacted, so a lost frame must not look like one."""
    scene, peer, number = with_leading_peer()
    held = scene.alive[1].log()
    peer.send(appended(number, 0, at(0), at(1)))
    assert (held.end_offset, scene.alive[1].partition().high_watermark) == (2, 2)
    peer.send(appended(number + 1, 2, at(2)))
    peer.send(appended(number, 2, at(2), epoch=2))
    assert held.end_offset == 2
    assert not peer.reason
    peer.send(appended(number, 2, at(4)))
    assert held.end_offset == 5
    peer.send(appended(number, 7, at(7)))
    assert peer.reason
    assert held.end_offset == 5


@pytest.mark.parametrize("wrong", [at(0)[:-1], at(0)[:30], at(0) + b"x", bytearray(61)])
def test_what_is_not_a_row_of_whole_batches_is_not_written(wrong: bytearray) -> None:
    scene, peer, number = with_leading_peer()
    peer.send(appended(number, 0, wrong))
    assert peer.reason
    assert scene.alive[1].log().end_offset == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_was_staged_before_an_error_is_written_before_its_buffer_is_used_again(number: int) -> None:
    scene, peer, subscribed = with_leading_peer("partitioned")
    held = scene.alive[1].log()
    peer.send(appended(subscribed, 0, at(1)))
    scene.disks[1].fail_open(f"/data/orders/orders-0/{0:020d}.index", number)
    sent = [at(offset) for offset in range(3, 2003, 2)]
    peer.send(appended(subscribed, 2, *sent))
    assert not peer.reason
    assert 2 < held.end_offset == held.written_offset < 2000
    assert (held.offline is None) == (number == errno.ENOSPC)
    count = (held.end_offset - 2) // 2
    assert scene.alive[1].content() == b"".join([at(1), *sent[:count]])
    scene.run(1)
    assert (peer.kinds()[-1] == Kind.SUBSCRIBE) == (number == errno.ENOSPC)


def test_batches_of_an_older_epoch_do_not_follow_newer_ones() -> None:
    scene, peer, number = with_leading_peer()
    peer.send(appended(number, 0, at(0, epoch=3)))
    peer.send(appended(number, 1, at(1, epoch=2)))
    assert scene.alive[1].log().end_offset == 1


def test_a_leader_that_starts_elsewhere_than_asked_is_not_believed() -> None:
    scene, peer, number = with_leading_peer()
    broker = scene.alive[1]
    broker.replication.follow(broker.partitions.follow(broker.log(), 4, 9), 9, 4)
    scene.run(0.1)
    peer.send(frames.answer(Start(number + 1, 4, 5, 5, 0)))
    assert peer.reason
    assert broker.log().end_offset == 0
