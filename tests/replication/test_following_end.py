"""A follower's end of a link, with its leader in the test's hand: what it says, and what it does not listen to."""

from __future__ import annotations

import errno

import pytest

from headrace.errors import CorruptBatch, HeadraceError, StorageFailed, StorageFull
from headrace.replication import frames
from headrace.replication.follower import MEND_AGAIN_SECONDS, RETRY_SECONDS, Following, Stage
from headrace.replication.following import FollowingEnd
from headrace.replication.frames import Frame, Kind, Reason, Reset, Start, Stop, Subscribe, Truncate
from headrace.storage.log import Log
from headrace.storage.producers import UnreadableProducers
from replication.peer import Peer, appended, at, with_leading_peer
from replication.scene import Scene


def end_of(scene: Scene) -> FollowingEnd:
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
    end_of(scene).unfollow(scene.alive[1].partition())
    scene.run(0.05)
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
    monkeypatch.setattr(Following, "may_wait", lambda _: True)
    peer.channel.send([appended(number, 4, at(4))])
    scene.until("the copy", lambda: scene.alive[1].log().end_offset == 5)
    assert positions(peer) == []
    scene.run(1)
    assert positions(peer)[-1][:4] == (number, 3, 5, 5)
