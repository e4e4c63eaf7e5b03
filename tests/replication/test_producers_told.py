"""What is known of producers travels with a copy of a log that does not begin at 0: their batches may be gone."""

from __future__ import annotations

import pytest

from headrace.errors import DuplicateSequence, OutOfOrderSequence, StorageFailed
from headrace.partitions.partition import Partition
from headrace.replication import frames, subscriptions
from headrace.replication.frames import Kind, Producers, Reason, Start
from headrace.storage import producers
from headrace.storage.log import Log
from headrace.storage.producers import ProducerState, SequencedBatch, UnreadableProducers
from proving import proves
from replication.peer import Peer, subscription, with_leading_peer
from replication.scene import Scene
from replication.test_leader_session import end_of, stops

LAYOUTS = pytest.mark.parametrize("layout", ["partitioned", "shared"])


def deleted(layout: str, *, power: int | None = None) -> Scene:
    """Eight batches of a producer were deleted before the third broker, with a new disk, became a member."""
    scene = Scene(layout=layout, topic={"durability": "disk"})
    scene.elect(1, (1, 2, 3))
    scene.kill(3)
    scene.elect(1, (1, 2))
    for sequence in range(8):
        scene.until_answered(scene.produce(b"%d" % sequence, producer=(7, 0, sequence)))
    deletion = scene.delete_before(8)
    scene.until("the deletion", lambda: deletion.answered)
    scene.disks[3].remove_folder("/data")
    scene.disks[3].make_folder("/data")
    scene.disks[3].sync_folder("/")
    scene.start(3)
    scene.tell(3)
    scene.until("the join", lambda: 3 in scene.keys[0].isr)
    if power is not None:
        scene.run(1)
        scene.kill(3, power=power)
        scene.start(3)
    return scene


@proves("J10")
@LAYOUTS
@pytest.mark.parametrize("power", [None, 3])
def test_a_replica_that_copied_nothing_knows_who_wrote_what_is_deleted(layout: str, power: int | None) -> None:
    scene = deleted(layout, power=power)
    scene.kill(1)
    scene.elect(3, (3, 2))
    again = scene.produce(b"7", producer=(7, 0, 7))
    scene.until_answered(again)
    assert again.offset == 7
    assert isinstance(scene.produce(b"2", producer=(7, 0, 2)).error, DuplicateSequence)
    assert isinstance(scene.produce(b"9", producer=(7, 0, 9)).error, OutOfOrderSequence)
    following = scene.produce(b"8", producer=(7, 0, 8))
    scene.until_answered(following)
    assert following.offset == 8


@proves("J10", "T2")
@LAYOUTS
def test_a_replica_whose_past_differs_below_the_start_alone_knows_the_producers_that_its_leader_does(
    layout: str,
) -> None:
    """Its log ends where the leader's begins, and its last batch was never committed."""
    scene = Scene(brokers=(1, 2), layout=layout, topic={"durability": "disk"})
    scene.elect(1, (1, 2))
    scene.until_answered(scene.produce(b"0", producer=(7, 0, 0)))
    scene.run(0.1)
    scene.kill(2)
    scene.elect(1, (1,))
    scene.until_answered(scene.produce(b"lost", producer=(8, 0, 0), acks=1))
    scene.run(0.1)
    scene.kill(1)
    scene.start(2)
    scene.elect(2, (2,))
    scene.until_answered(scene.produce(b"1", producer=(9, 0, 0)))
    deletion = scene.delete_before(2)
    scene.until("the deletion", lambda: deletion.answered)
    assert scene.start(1).log().end_offset == scene.alive[2].log().start_offset == 2
    scene.tell(1)
    scene.until("the join", lambda: 1 in scene.keys[0].isr)
    assert known(scene.alive[1].log()) == known(scene.alive[2].log()) == {7, 9}


@LAYOUTS
def test_a_batch_that_spans_the_start_is_known_once(layout: str) -> None:
    """It is copied, and is not told as one from before."""
    scene = Scene(layout=layout, topic={"durability": "disk"})
    scene.elect(1, (1, 2))
    scene.until_answered(scene.produce(b"0", b"1", producer=(7, 0, 0)))
    scene.until_answered(scene.produce(b"2", b"3", producer=(7, 0, 2)))
    deletion = scene.delete_before(3)
    scene.until("the deletion", lambda: deletion.answered)
    scene.tell(3)
    scene.until("the join", lambda: 3 in scene.keys[0].isr)
    told = scene.alive[3].log().producers_before(4)
    assert told[7].batches == (SequencedBatch(0, 1, 0), SequencedBatch(2, 3, 2))


def test_many_producers_are_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "PRODUCERS_MAX", 3)
    scene = Scene(brokers=(1,))
    scene.elect(1, (1,))
    for number in range(7):
        scene.until_answered(scene.produce(b"value", producer=(number, 0, 0)))
    told = subscriptions.producers_before(Start(1, 0, 6, 7, 6), scene.alive[1].log())
    parts = [producers.decode(each.snapshot) for each in told]
    assert [sorted(part or {}) for part in parts] == [[0, 1, 2], [3, 4, 5]], "the last is no older than the start"


def with_deletions() -> tuple[Scene, Peer]:
    scene = Scene(brokers=(1, 9))
    scene.kill(9)
    scene.elect(1, (1,))
    scene.until_answered(scene.produce(b"value", producer=(7, 0, 0)), scene.produce(b"value"))
    scene.delete_before(1)
    scene.run(0.1)
    return scene, Peer(scene, 1)


def test_nothing_is_told_to_who_holds_something_and_all_before_the_records_to_who_does_not() -> None:
    _, peer = with_deletions()
    peer.send(subscription(1, 2))
    assert Kind.PRODUCERS not in peer.kinds()
    peer.send(subscription(2, 1, -1))
    kinds = peer.kinds()
    assert kinds.index(Kind.PRODUCERS) < kinds.index(Kind.APPEND)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_who_holds_nothing_waits_while_the_leader_cannot_tell_its_producers(
    is_damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, peer = with_deletions()
    held = scene.alive[1].log()

    def fail(_: object) -> None:
        if is_damaged:
            raise UnreadableProducers("damaged here", 1)
        raise StorageFailed("not now")

    found: list[int] = []
    monkeypatch.setattr(type(held.producers), "load", fail)
    monkeypatch.setattr(Partition, "found_damage", lambda _, offset: found.append(offset))
    peer.send(subscription(1, 1, -1))
    assert [stop.reason for stop in stops(peer)] == [Reason.UNREADABLE if is_damaged else Reason.INSPECTING]
    assert not end_of(scene)._streams
    assert found == [1] * is_damaged


@pytest.mark.parametrize("is_alone", [False, True])
def test_who_has_left_out_damage_tells_its_producers_only_if_nobody_else_can(
    is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, peer = with_deletions()
    scene.alive[1].log().producers.left_out.append(1)
    found: list[int] = []
    monkeypatch.setattr(Partition, "found_damage", lambda _, offset: found.append(offset))
    monkeypatch.setattr(Partition, "others_hold", not is_alone)
    peer.send(subscription(1, 1, -1))
    assert [stop.reason for stop in stops(peer)] == ([] if is_alone else [Reason.UNREADABLE])
    assert found == ([] if is_alone else [1])


STATES = {7: ProducerState(0, (SequencedBatch(0, 4, 0),), 1_750_000_000_000)}


def known(held: Log) -> set[int]:
    return set(held.producers_before(1 << 62))


def test_what_is_told_out_of_turn_or_not_whole_is_not_believed() -> None:
    scene, peer, number = with_leading_peer()
    held = scene.alive[1].log()
    peer.send(frames.producers(Producers(number + 1, 3, producers.encode(STATES))))
    peer.send(frames.producers(Producers(number, 2, producers.encode(STATES))))
    assert known(held) == set()
    peer.send(frames.producers(Producers(number, 3, producers.encode(STATES))))
    assert known(held) == {7}
    peer.send(frames.producers(Producers(number, 3, producers.encode({8: STATES[7]})[:-1])))
    assert peer.reason
    assert known(held) == {7}
