"""A follower's end of a link, with its leader in the test's hand: what it says, and what it does not listen to."""

from __future__ import annotations

import errno

import pytest

from headrace.errors import CorruptBatch, HeadraceError, StorageFailed, StorageFull
from headrace.ports.network import Address
from headrace.replication import frames
from headrace.replication.follower import MEND_AGAIN_SECONDS, RETRY_SECONDS, FollowedPartition, Stage
from headrace.replication.follower_session import FollowerSession
from headrace.replication.frames import Frame, Kind, Reason, Reset, Start, Stop, Subscribe, Truncate
from headrace.storage import producers
from headrace.storage.log import Log
from headrace.storage.producers import UnreadableProducers
from replication.peer import Peer, appended, at, with_leading_peer
from replication.scene import Scene


def end_of(scene: Scene) -> FollowerSession:
    return scene.alive[1].replication._leaders[9]


def copied(count: int = 4) -> tuple[Scene, Peer, int]:
    """A follower that has copied so many records of epoch 3; what it said until then is forgotten."""
    scene, peer, number = with_leading_peer()
    peer.send(appended(number, 0, *(at(offset) for offset in range(count))))
    assert scene.alive[1].log().end_offset == count
    peer.frames.clear()
    return scene, peer, number


def asked(peer: Peer) -> list[Subscribe]:
    return [
        frames.read_subscribe(memoryview(body), Frame(kind, 0, len(body)))
        for kind, body in peer.frames
        if kind == Kind.SUBSCRIBE
    ]


def positions(peer: Peer) -> list[frames.Position]:
    return [
        each
        for kind, body in peer.frames
        if kind == Kind.POSITIONS
        for each in frames.read_positions(memoryview(body), Frame(kind, 0, len(body)))
    ]


def said(peer: Peer) -> list[int]:
    return [kind for kind in peer.kinds() if kind != Kind.POSITIONS]


def test_who_follows_no_more_says_so_once_and_takes_nothing() -> None:
    scene, peer, number = copied()
    partition, end = scene.alive[1].partition(), end_of(scene)
    end.unfollow(partition)
    end.unfollow(partition)
    peer.send(appended(number, 4, at(4)))
    assert said(peer) == [Kind.UNSUBSCRIBE]
    ((_, body),) = [each for each in peer.frames if each[0] == Kind.UNSUBSCRIBE]
    assert frames.read_unsubscribe(memoryview(body), Frame(Kind.UNSUBSCRIBE, 0, len(body))) == (number, 3)
    assert scene.alive[1].log().end_offset == 4
    assert end.is_idle


@pytest.mark.parametrize("linked", [True, False])
def test_who_follows_no_more_and_was_not_served_says_nothing(linked: bool) -> None:
    scene, peer, number = copied()
    if linked:
        peer.send(frames.answer(Stop(number, 3, Reason.NOT_LEADER, "not here")))
    else:
        scene.network.reset("b1", "b9")
        scene.until("the end of the link", lambda: end_of(scene).link is None)
    end = end_of(scene)
    end.unfollow(scene.alive[1].partition())
    assert not end._waiting
    scene.run(3)
    assert said(peer) == []


def test_damage_is_asked_for_once_and_what_was_under_way_is_not_taken() -> None:
    scene, peer, number = copied()
    partition, end = scene.alive[1].partition(), end_of(scene)
    end.mend(partition, 2)
    end.mend(partition, 1)
    peer.send(appended(number, 4, at(4)))
    assert said(peer) == [Kind.UNSUBSCRIBE, Kind.SUBSCRIBE]
    assert asked(peer) == [Subscribe(number + 1, bytes(16), 0, 3, 3, 2, 4)]
    assert scene.alive[1].log().end_offset == 4
    # The leader cannot read it all: what is here stays, and is copied on.
    peer.send(frames.answer(Stop(number + 1, 3, Reason.UNREADABLE, "damaged here too")))
    end.mend(partition, 2)
    scene.run(1)
    assert asked(peer)[1:] == [Subscribe(number + 2, bytes(16), 0, 3, 3, 4, 4)]
    peer.send(frames.answer(Start(number + 2, 3, 4, 0, 0)))
    assert scene.alive[1].log().end_offset == 4
    scene.clock.advance(MEND_AGAIN_SECONDS - 5)
    end.mend(partition, 2)
    scene.run(1)
    assert {each.end for each in asked(peer)[1:]} == {4}
    scene.clock.advance(5)
    end.mend(partition, 2)
    scene.until("asking for it again", lambda: asked(peer)[-1].end == 2)


def test_damage_is_asked_for_though_the_leader_could_not_read_something_else_before() -> None:
    scene, peer, number = copied()
    peer.send(frames.answer(Stop(number, 3, Reason.UNREADABLE, "damaged")))
    end_of(scene).mend(scene.alive[1].partition(), 2)
    scene.until("asking", lambda: asked(peer))
    assert asked(peer)[0].end == 2


def test_damage_of_what_is_not_followed_is_nothing_to_this_link() -> None:
    scene, peer, _ = copied()
    end, partition = end_of(scene), scene.alive[1].partition()
    end.unfollow(partition)
    scene.run(0.1)
    peer.frames.clear()
    end.mend(partition, 2)
    scene.run(0.1)
    assert said(peer) == []


def test_damage_that_is_found_without_a_link_is_asked_for_with_the_next_one() -> None:
    scene, peer, _ = copied()
    end = end_of(scene)
    scene.network.reset("b1", "b9")
    scene.until("the end of the link", lambda: end.link is None)
    end.mend(scene.alive[1].partition(), 2)
    scene.run(1)
    assert asked(peer)[-1][-2:] == (2, 4)


def test_answers_of_an_earlier_subscription_or_epoch_change_nothing() -> None:
    scene, peer, number = copied()
    end, log = end_of(scene), scene.alive[1].log()
    for late in (
        Truncate(number, 3, 3, 1), Reset(number, 3, 9), Start(number, 3, 1, 1, 0),  # it copies already
        Truncate(number - 1, 3, 3, 1), Reset(number - 1, 3, 9), Stop(number - 1, 3, Reason.NOT_LEADER, "late"),
    ):  # fmt: skip
        peer.send(frames.answer(late))
    end.mend(scene.alive[1].partition(), 4)
    end._ask(*end._followings.values())
    scene.run(0.05)
    again = asked(peer)[-1].subscription
    for late in (
        Truncate(again, 2, 3, 1), Reset(again, 2, 9), Start(again, 2, 1, 1, 0),
        Truncate(number, 3, 3, 1), Reset(number, 3, 9), Start(number, 3, 1, 1, 0),
    ):  # fmt: skip
        peer.send(frames.answer(late))
    assert (log.start_offset, log.end_offset, peer.reason) == (0, 4, "")
    (following,) = end._followings.values()
    assert following.stage is Stage.ASKING
    peer.send(frames.answer(Truncate(again, 3, 3, 3)))
    assert log.end_offset == 3
    assert asked(peer)[-1][-2:] == (3, 3)


def test_positions_are_told_of_what_was_written_and_only_of_what_is_copied() -> None:
    scene, peer, number = copied()
    log = scene.alive[1].log()
    peer.send(appended(number, 4, at(4)))
    told = positions(peer)
    assert told[-1][:4] == (number, 3, 5, 5)
    assert all(each[4] <= log.durable_offset for each in told)
    peer.send(frames.answer(Stop(number, 3, Reason.NOT_LEADER, "not now")))
    peer.frames.clear()
    end_of(scene).durable(scene.alive[1].partition())
    scene.run(RETRY_SECONDS / 2)
    assert positions(peer) == []


def asking(mend_from: int = 2) -> tuple[Scene, Peer, int]:
    """It has asked for its log from there on again; all that it has is known to be committed."""
    scene, peer, _ = copied()
    assert scene.alive[1].partition().high_watermark == 4
    end_of(scene).mend(scene.alive[1].partition(), mend_from)
    scene.run(0.05)
    number = asked(peer)[-1].subscription
    peer.frames.clear()
    return scene, peer, number


def failing_cut(scene: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception, cut_to: int) -> None:
    held = type(scene.alive[1].log())
    truncate = held.truncate

    def cut(log: Log, _offset: int) -> None:
        truncate(log, cut_to)
        raise error

    monkeypatch.setattr(held, "truncate", cut)


@pytest.mark.parametrize("told", [True, False])
def test_a_cut_that_failed_halfway_leaves_no_watermark_above_the_end_and_is_tried_again(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, peer, number = asking()
    failing_cut(scene, monkeypatch, OSError(errno.EIO, "broken"), 3)
    peer.channel.send([frames.answer(Truncate(number, 3, 3, 1) if told else Start(number, 3, 2, 0, 0))])
    scene.until("the cut", lambda: scene.alive[1].log().end_offset == 3)
    assert scene.alive[1].partition().high_watermark == 3
    scene.run(RETRY_SECONDS / 2)
    assert said(peer) == ([] if told else [Kind.UNSUBSCRIBE])
    monkeypatch.undo()
    scene.run(1)
    assert asked(peer)[-1].end == 2


def test_a_cut_that_does_not_find_its_place_is_asked_for_lower_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer, number = asking()
    failing_cut(scene, monkeypatch, CorruptBatch("damaged there too"), 4)
    peer.channel.send([frames.answer(Start(number, 3, 2, 0, 0))])
    scene.run(RETRY_SECONDS / 2)
    assert [each.end for each in asked(peer)] == [1]
    assert scene.alive[1].log().end_offset == 4


def refusing(scene: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: object) -> int:
        # A new one each time: it holds the frames that it passes, and their buffers.
        raise error.again() if isinstance(error, HeadraceError) else type(error)(str(error))

    monkeypatch.setattr(type(scene.alive[1].log()), "append_copied", refuse)


def test_records_that_cannot_be_taken_end_their_subscription_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer, number = copied()
    refusing(scene, monkeypatch, StorageFull("no room"))
    peer.send(appended(number, 4, at(4)))
    monkeypatch.undo()
    assert said(peer)[0] == Kind.UNSUBSCRIBE
    scene.run(1)
    assert asked(peer)[-1].end == 4
    assert not peer.reason


def test_records_that_cannot_be_taken_for_damage_of_our_own_are_no_fault_of_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, peer, number = copied()
    refusing(scene, monkeypatch, UnreadableProducers("the producers cannot be read", 2))
    peer.channel.send([appended(number, 4, at(4))])
    damaged = scene.alive[1].partitions.damaged
    scene.until("damage", lambda: damaged, 0.5)
    assert list(damaged.values()) == [2]
    scene.run(RETRY_SECONDS / 2)
    assert not peer.reason
    assert said(peer) == [Kind.UNSUBSCRIBE]


def test_records_that_could_not_be_written_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer, number = copied()
    broker = scene.alive[1]
    log, write = broker.log(), broker.store.write_staged

    def fail() -> list[tuple[Log, HeadraceError]]:
        write()
        return [(log, StorageFull("no room"))]

    monkeypatch.setattr(broker.store, "write_staged", fail)
    peer.channel.send([appended(number, 4, at(4))])
    scene.run(RETRY_SECONDS / 2)
    monkeypatch.undo()
    assert said(peer) == [Kind.UNSUBSCRIBE]
    assert positions(peer) == []


def test_what_a_link_left_behind_is_not_told_on_the_next_one() -> None:
    scene, peer, number = copied()
    end = end_of(scene)
    end._to_tell.update(dict.fromkeys(end._followings.values()))
    scene.network.reset("b1", "b9")
    scene.until("the end of the link", lambda: end.link is None)
    assert not end._to_tell
    scene.run(1)
    assert asked(peer)[-1].subscription > number
    assert positions(peer) == []


def test_a_sync_that_comes_back_is_told_and_one_that_failed_ends_the_subscription() -> None:
    scene, peer, number = copied()
    log, partition, end = scene.alive[1].log(), scene.alive[1].partition(), end_of(scene)
    log.durable_offset = 3
    end.durable(partition)
    scene.run(0.01)
    assert positions(peer)[-1][:5] == (number, 3, 4, 4, 3)
    peer.frames.clear()
    log.durable_offset, log.offline = 4, StorageFailed("a sync failed")
    end.durable(partition)
    scene.run(0.01)
    assert (said(peer), positions(peer)) == ([Kind.UNSUBSCRIBE], [])
    end.durable(partition)
    end.unfollow(partition)
    end.durable(partition)
    scene.run(0.01)
    assert (said(peer), positions(peer)) == ([Kind.UNSUBSCRIBE], [])


def test_a_position_that_may_wait_for_its_sync_is_told_after_a_while_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, peer, number = copied()
    monkeypatch.setattr(FollowedPartition, "may_wait", lambda _: True)
    peer.channel.send([appended(number, 4, at(4))])
    scene.until("the copy", lambda: scene.alive[1].log().end_offset == 5)
    assert positions(peer) == []
    scene.run(1)
    assert positions(peer)[-1][:4] == (number, 3, 5, 5)


# Where the leader is.

NOWHERE = Address("b9", 4711)


def test_a_link_stays_while_its_leader_stands_where_it_did() -> None:
    scene, peer, _ = copied()
    end = end_of(scene)
    link = end.link
    for address, incarnation in ((peer.address, "run-9"), (None, ""), (None, ""), (peer.address, "run-9")):
        end.reach(address, incarnation)
        assert end.link is link
    scene.run(1)
    assert (end.connects, peer.reason) == (1, "")


@pytest.mark.parametrize("moved", [True, False])
def test_a_link_to_a_leader_that_has_moved_or_started_anew_is_opened_again_at_once(moved: bool) -> None:
    scene, peer, _ = copied()
    end = end_of(scene)
    before = end.link
    end.reach(NOWHERE if moved else peer.address, "run-9" if moved else "run-10")
    assert end.connects == 2
    assert end.link not in (None, before)
    scene.run(0.01)
    assert peer.reason


def test_a_link_that_is_being_opened_does_not_know_yet_whom_it_reaches() -> None:
    scene, _, _ = copied()
    end = end_of(scene)
    end.reach(NOWHERE, "run-9")
    opening = end.link
    end.reach(NOWHERE, "run-10")
    assert end.link is opening


def test_a_leader_that_is_not_reached_is_tried_ever_less_often_unless_it_moves() -> None:
    scene, _, _ = copied()
    end = end_of(scene)
    end.reach(NOWHERE, "run-9")
    scene.run(10)
    before = end.connects
    for _ in range(50):
        end.reach(NOWHERE, "run-9")
        scene.run(0.1)
    assert before + 4 <= end.connects <= before + 6, "about once a second, however often it is told"
    before = end.connects
    end.reach(Address("b9", 4712), "run-9")
    assert end.connects == before + 1


def test_a_leader_of_which_nothing_is_followed_is_not_reached_for() -> None:
    scene, _, _ = copied()
    end = end_of(scene)
    end.unfollow(scene.alive[1].partition())
    end.close("nothing is followed")
    end.close("nothing is followed")
    end.tick(scene.clock.now() + 60)
    assert end.link is None
    end.reach(NOWHERE, "run-9")
    assert end.link is None


def test_a_link_that_is_closed_ends_at_once() -> None:
    scene, peer, _ = copied()
    end_of(scene).close("this broker stops")
    scene.run(0.01)
    assert peer.reason


def test_another_broker_at_the_address_of_the_leader_is_not_asked() -> None:
    scene = Scene(brokers=(1,))
    peer = Peer(scene, None, broker=8)
    broker = scene.alive[1]
    broker.replication.peers({9: (peer.address, "run-9")})
    broker.replication.follow(broker.partitions.follow(broker.log(), 3, 9), 9, 3)
    scene.run(0.05)
    assert peer.reason
    assert Kind.SUBSCRIBE not in peer.kinds()


def test_what_is_followed_over_a_link_that_stands_is_asked_for_at_once() -> None:
    scene, peer, _ = copied()
    broker = scene.alive[1]
    broker.replication.follow(broker.partitions.follow(broker.log(), 4, 9), 9, 4)
    scene.run(0.005)
    assert [each.epoch for each in asked(peer)] == [4]


# What comes when it copies, and when it does not.


def test_a_log_that_is_offline_is_not_asked_for() -> None:
    scene, peer, _ = copied()
    end, partition = end_of(scene), scene.alive[1].partition()
    scene.alive[1].log().offline = StorageFailed("a sync failed")
    end.mend(partition, 2)
    (following,) = end._followings.values()
    assert following.stage is Stage.WAITING
    scene.run(1)
    assert said(peer) == [Kind.UNSUBSCRIBE]
    scene.alive[1].log().offline = None
    scene.until("asking for it", lambda: asked(peer))
    assert asked(peer)[0].end == 2


def test_records_of_a_subscription_that_was_stopped_are_not_taken_when_it_copies_again() -> None:
    scene, peer, number = copied()
    peer.send(frames.answer(Stop(number, 3, Reason.NOT_LEADER, "not now")))
    scene.run(1)
    (again,) = asked(peer)
    peer.send(frames.answer(Start(again.subscription, 3, 4, 0, 0)))
    peer.send(appended(number, 4, at(4)))
    assert scene.alive[1].log().end_offset == 4
    peer.send(appended(again.subscription, 4, at(4)))
    assert scene.alive[1].log().end_offset == 5


def test_watermarks_and_starts_are_those_of_what_is_copied_and_of_nothing_else() -> None:
    scene, peer, number = with_leading_peer()
    data = b"".join(at(offset) for offset in range(4))
    peer.send(frames.append_head(frames.Append(number, 3, 0, 1, 0), len(data)) + data)
    log, partition = scene.alive[1].log(), scene.alive[1].partition()
    peer.send(frames.watermarks([(number - 1, 3, 4, 2), (number, 2, 4, 2)]))
    assert (partition.high_watermark, log.start_offset) == (1, 0)
    peer.send(frames.watermarks([(number, 3, 3, 2)]))
    assert (partition.high_watermark, log.start_offset) == (3, 2)
    scene.run(1)
    assert positions(peer)[-1] == (number, 3, 4, 4, 4, 2)
    peer.send(frames.watermarks([(number, 3, 3, 4)]))
    assert log.start_offset == 3, "nothing goes that is not known to be committed"
    peer.send(frames.watermarks([(number, 3, 4, 4)]))
    assert log.start_offset == 4


def test_epochs_are_those_of_what_is_copied_and_of_nothing_else() -> None:
    scene, peer, number = copied()
    for subscription, epoch, starts in ((number - 1, 3, [(2, 1)]), (number, 2, [(2, 1)]), (number, 3, [(3, 2)])):
        peer.send(frames.epochs(frames.Epochs(subscription, epoch, starts)))
    (following,) = end_of(scene)._followings.values()
    assert list(following.epoch_starts) == [(3, 2)]


def test_a_start_that_could_not_be_made_safe_is_raised_again_at_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer, number = copied()
    log = scene.alive[1].log()

    def refuse(*_: object) -> None:
        raise StorageFull("no room")

    monkeypatch.setattr(type(log), "delete_before", refuse)
    peer.send(frames.watermarks([(number, 3, 4, 2)]))
    scene.run(1)
    assert log.start_offset == 0
    assert all(start == 0 for *_, start in positions(peer))
    monkeypatch.undo()
    scene.run(1)
    assert log.start_offset == 2
    assert positions(peer)[-1] == (number, 3, 4, 4, 4, 2)


def test_a_start_that_settles_when_nothing_is_copied_tells_nothing() -> None:
    scene, peer, number = copied()
    end, partition = end_of(scene), scene.alive[1].partition()
    peer.send(frames.answer(Stop(number, 3, Reason.NOT_LEADER, "not now")))
    for error in (None, StorageFull("no room")):
        end._start_settled(partition, error)
    assert not end._to_tell
    assert not end._low
    end.unfollow(partition)
    end._start_settled(partition, None)
    scene.run(1)
    assert positions(peer) == []


def test_watermark_and_start_come_with_the_first_answer_and_with_records_too() -> None:
    scene, peer, number = with_leading_peer()
    log, partition = scene.alive[1].log(), scene.alive[1].partition()
    data = b"".join(at(offset) for offset in range(6))
    peer.send(frames.append_head(frames.Append(number, 3, 0, 4, 2), len(data)) + data)
    assert (partition.high_watermark, log.start_offset) == (4, 2)
    peer.send(frames.answer(Stop(number, 3, Reason.NOT_LEADER, "not now")))
    peer.frames.clear()
    scene.until("asking again", lambda: asked(peer))
    peer.send(frames.answer(Start(asked(peer)[0].subscription, 3, 6, 5, 3)))
    assert (partition.high_watermark, log.start_offset) == (5, 3)


def test_an_error_that_a_log_may_keep_does_not_keep_the_receive_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer, number = copied()
    kept: list[HeadraceError] = []

    def refuse(*_: object) -> int:
        try:
            raise OSError(errno.ENOSPC, "no room")
        except OSError as error:
            kept.append(StorageFull("no room"))
            raise kept[-1] from error

    monkeypatch.setattr(type(scene.alive[1].log()), "append_copied", refuse)
    peer.send(appended(number, 4, at(4)))
    (error,) = kept
    assert error.__traceback__ is None
    assert error.__cause__ is not None
    assert error.__cause__.__traceback__ is None


def test_producers_that_cannot_be_kept_end_their_subscription_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, peer, number = with_leading_peer()

    def refuse(*_: object) -> None:
        raise StorageFull("no room")

    monkeypatch.setattr(type(scene.alive[1].log()), "learn_producers", refuse)
    peer.frames.clear()
    peer.channel.send([frames.producers(frames.Producers(number, 3, producers.encode({})))])
    scene.run(RETRY_SECONDS / 2)
    assert (said(peer), peer.reason) == ([Kind.UNSUBSCRIBE], "")
