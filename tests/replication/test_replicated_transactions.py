"""Transactions on a leader and its followers: each replica tells by its own log and watermark what is decided."""

from __future__ import annotations

import pytest

from headrace.partitions.partition import Partition
from headrace.records import kernel
from headrace.records.batch import TRANSACTIONAL, batches
from headrace.replication.leader_session import CHUNK_BYTES
from partitions.committed_reader import read
from partitions.led import Outcome
from proving import proves
from replication.scene import Broker, Scene

LAYOUTS = pytest.mark.parametrize("layout", ["partitioned", "shared"])


COMPACTED = {
    "cleanup_policy": "compact",
    "min_cleanable_dirty_ratio": 0.0,
    "segment_ms": 1000,
    "segment_bytes": 1024,
    "delete_retention_ms": 1000,
    "durability": "disk",
}


def write(
    scene: Scene,
    leader: Broker,
    producer_id: int,
    sequence: int,
    value: bytes,
    *,
    key: bytes = b"k",
    epoch: int = 0,
    acks: int = -1,
) -> None:
    partition = leader.partition()
    if not partition.has_open_transaction(producer_id, epoch):
        assert partition.verified(partition.verification(producer_id, epoch))
    batch = kernel.build(
        [(1, key, value, [])],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        attributes=TRANSACTIONAL,
    )
    outcome = Outcome()
    leader.partitions.submit(partition, batch, acks, 30_000, outcome)
    leader.partitions.end_turn()
    scene.until("the write", lambda: not outcome.waiting)
    assert outcome.offset >= 0


def mark(
    scene: Scene, leader: Broker, producer_id: int, number: int, *, committed: bool, epoch: int = 0, version: int = 0
) -> int:
    partition, outcome = leader.partition(), Outcome()
    leader.partitions.submit_marker(
        partition,
        lambda: partition.append_marker(
            producer_id, epoch, 0, committed=committed, number=number, transaction_version=version
        ),
        30_000,
        outcome,
    )
    leader.partitions.end_turn()
    scene.until("the marker", lambda: not outcome.waiting)
    return outcome.offset


def committed(partition: Partition) -> list[bytes]:
    return read(partition, partition.log.start_offset, committed=True)


@proves("T2")
@LAYOUTS
def test_a_new_leader_goes_on_with_the_transactions_of_the_last_one(layout: str) -> None:
    scene = Scene(layout=layout, topic={"durability": "disk"})
    scene.elect(1, (1, 2, 3))
    leader = scene.alive[1]
    write(scene, leader, 7, 0, b"aborted")
    write(scene, leader, 8, 0, b"open")
    first = mark(scene, leader, 7, 0, committed=False)
    write(scene, leader, 7, 1, b"committed")
    mark(scene, leader, 7, 1, committed=True)
    scene.settle(1, 2, 3)
    scene.kill(1)
    scene.elect(2, (2, 3))
    leader = scene.alive[2]
    assert leader.partition().last_stable_offset == 1
    end = leader.log().end_offset
    assert mark(scene, leader, 7, 0, committed=False) >= first
    assert leader.log().end_offset == end, "the marker of the last leader's time is not appended again"
    mark(scene, leader, 8, 0, committed=True)
    assert committed(leader.partition()) == [b"open", b"committed"]
    scene.settle(2, 3)
    scene.until("the watermark", lambda: scene.alive[3].partition().high_watermark == leader.log().end_offset)
    assert committed(scene.alive[3].partition()) == [b"open", b"committed"]


@proves("T2")
@LAYOUTS
def test_a_replica_that_copied_nothing_knows_of_transactions_that_began_before_the_start(layout: str) -> None:
    scene = Scene(layout=layout, topic={"durability": "disk"})
    scene.elect(1, (1, 2))
    leader = scene.alive[1]
    write(scene, leader, 7, 0, b"deleted")
    write(scene, leader, 8, 0, b"deleted")
    mark(scene, leader, 8, 4, committed=True)
    deletion = scene.delete_before(3)
    scene.until("the deletion", lambda: deletion.answered)
    scene.tell(3)
    scene.until("the join", lambda: 3 in scene.keys[0].isr)
    scene.kill(1)
    scene.elect(3, (3, 2))
    leader = scene.alive[3]
    assert leader.partition().has_open_transaction(7, 0)
    assert leader.partition().last_stable_offset == 3
    assert mark(scene, leader, 8, 4, committed=True) == 2, "it was heard of, and is not appended again"
    write(scene, leader, 7, 1, b"kept")
    mark(scene, leader, 7, 0, committed=True)
    assert committed(leader.partition()) == [b"kept"]


@proves("F11", "T2")
@LAYOUTS
def test_a_replica_that_is_behind_tells_its_own_last_stable_offset(layout: str) -> None:
    scene = Scene(layout=layout, topic={"durability": "disk"})
    scene.elect(1, (1, 2))
    leader = scene.alive[1]
    write(scene, leader, 7, 0, b"aborted")
    write(scene, leader, 8, 0, b"committed")
    scene.settle(1, 2)
    scene.network.cut("b1", "b2")
    mark(scene, leader, 7, 0, committed=False)  # when the follower has left the in-sync set
    mark(scene, leader, 8, 0, committed=True)
    follower = scene.alive[2].partition()
    assert (leader.partition().last_stable_offset, follower.last_stable_offset) == (4, 0)
    assert (committed(leader.partition()), committed(follower)) == ([b"committed"], [])
    scene.network.heal("b1", "b2")
    scene.settle(1, 2)
    assert follower.last_stable_offset == 4
    assert follower.read_committed(0, 1000, warm=True)[1] == [(7, 0)]
    assert committed(follower) == [b"committed"]


def fill(scene: Scene, leader: Broker, sequence: int) -> None:
    """Write until compaction has had time for all that came before."""
    for nth in range(sequence, sequence + 30):
        write(scene, leader, 8, nth, b"filler")
        mark(scene, leader, 8, nth, committed=True)
        scene.run(30)


@proves("T2")
@LAYOUTS
@pytest.mark.parametrize("comes_first", ["the gap", "another record"])
def test_a_replica_that_slept_over_the_marker_of_aborted_records_has_them_no_more(
    layout: str, comes_first: str
) -> None:
    """Its leader has compacted away the records, and after `delete.retention.ms` the marker."""
    scene = Scene(layout=layout, topic=COMPACTED)
    scene.elect(1, (1, 2, 3))
    leader = scene.alive[1]
    write(scene, leader, 8, 0, b"old")
    mark(scene, leader, 8, 0, committed=True)
    write(scene, leader, 7, 0, b"aborted")
    scene.settle(1, 2, 3)
    for other in ("b1", "b2"):
        scene.network.cut("b3", other)
    if comes_first == "another record":
        write(scene, leader, 9, 0, b"of another", key=b"its own")
        mark(scene, leader, 9, 0, committed=True)
    marker = mark(scene, leader, 7, 0, committed=False)
    write(scene, leader, 7, 0, b"committed", epoch=1)
    mark(scene, leader, 7, 1, committed=True, epoch=1)
    fill(scene, leader, 1)
    left = [header.base_offset for header, _ in batches(memoryview(leader.content()))]
    assert marker not in left, "it was there for too short a time"
    for other in ("b1", "b2"):
        scene.network.heal("b3", other)
    scene.until("the join", lambda: 3 in scene.keys[0].isr, 60)
    end = leader.partition().last_stable_offset
    scene.until("what is decided", lambda: scene.alive[3].partition().last_stable_offset == end)
    assert committed(scene.alive[3].partition())[-1:] == committed(leader.partition())[-1:] == [b"filler"]
    assert b"aborted" not in committed(scene.alive[3].partition())


@proves("T2")
@LAYOUTS
def test_a_replica_joins_though_compaction_has_left_gaps_in_a_long_transaction(layout: str) -> None:
    """Each of its batches comes in a frame of its own, with a gap before it."""
    scene = Scene(layout=layout, topic=COMPACTED | {"segment_bytes": 1 << 20, "max_message_bytes": 1 << 20})
    scene.kill(3)
    scene.elect(1, (1, 2))
    leader = scene.alive[1]
    for nth in range(4):
        write(scene, leader, 7, nth, b"x" * (CHUNK_BYTES * 2 // 3), key=b"%d" % nth)
        write(scene, leader, 8, nth, b"goes")
        mark(scene, leader, 8, nth, committed=True)
    mark(scene, leader, 7, 0, committed=True)
    fill(scene, leader, 4)
    scene.start(3)
    scene.tell(3)
    scene.until("the join", lambda: 3 in scene.keys[0].isr, 60)
    end = leader.partition().last_stable_offset
    scene.until("what is decided", lambda: scene.alive[3].partition().last_stable_offset == end)
    assert sum(value[:1] == b"x" for value in committed(scene.alive[3].partition())) == 4


def aborted(partition: Partition) -> list[tuple[int, int]]:
    return partition.read_committed(partition.log.start_offset, 100_000, warm=True)[1]


def elected_uncleanly(layout: str) -> Scene:
    """Broker 2 leads, without what only its last leader had: the marker of producer 7, which was aborted, and all of
    producer 9. Producer 8 was open for both."""
    scene = Scene(layout=layout, topic={"durability": "disk"})
    scene.elect(1, (1, 2))
    leader = scene.alive[1]
    write(scene, leader, 7, 0, b"lost its marker")
    write(scene, leader, 8, 0, b"open")
    scene.settle(1, 2)
    scene.network.cut("b1", "b2")
    mark(scene, leader, 7, 0, committed=False, epoch=1, version=2)
    write(scene, leader, 9, 0, b"lost")
    mark(scene, leader, 9, 0, committed=False)
    scene.kill(1)
    scene.elect(2, (2,))
    scene.network.heal("b1", "b2")
    return scene


@proves("T2")
@LAYOUTS
def test_after_an_unclean_election_what_lost_its_marker_is_open_and_what_was_cut_is_not(layout: str) -> None:
    scene = elected_uncleanly(layout)
    leader = scene.alive[2]
    partition = leader.partition()
    assert (partition.last_stable_offset, aborted(partition)) == (0, [])
    assert [partition.has_open_transaction(each, 0) for each in (7, 8, 9)] == [True, True, False]
    scene.start(1)
    scene.tell(1)
    scene.until("the join", lambda: 1 in scene.keys[0].isr)
    scene.settle(1, 2)
    returned = scene.alive[1].partition()
    assert (returned.last_stable_offset, aborted(returned)) == (0, []), "its own markers were cut"
    mark(scene, leader, 8, 0, committed=True)
    mark(scene, leader, 7, 0, committed=False, epoch=1, version=2)  # by who finds it hanging
    scene.settle(1, 2)
    for each in (partition, returned):
        assert each.last_stable_offset == each.high_watermark
        assert (aborted(each), committed(each)) == ([(7, 0)], [b"open"])


@proves("T2")
@LAYOUTS
def test_records_that_lost_their_marker_do_not_count_with_the_next_transaction_of_their_producer(layout: str) -> None:
    """Its coordinator has ended it, or it would not let the next one write."""
    scene = elected_uncleanly(layout)
    leader = scene.alive[2]
    mark(scene, leader, 8, 0, committed=True)
    write(scene, leader, 7, 0, b"next", epoch=1)
    mark(scene, leader, 7, 1, committed=True, epoch=2, version=2)
    partition = leader.partition()
    assert partition.last_stable_offset == partition.high_watermark
    assert (aborted(partition), committed(partition)) == ([(7, 0)], [b"open", b"next"])
    scene.start(1)
    scene.tell(1)
    scene.until("the join", lambda: 1 in scene.keys[0].isr)
    scene.settle(1, 2)
    assert committed(scene.alive[1].partition()) == [b"open", b"next"]


@proves("T2")
@LAYOUTS
def test_deleted_records_take_their_transactions_along_on_every_replica(layout: str) -> None:
    """But the one that goes on behind the new start: it is open, and its end counts."""
    scene = Scene(layout=layout, topic={"durability": "disk"})
    scene.elect(1, (1, 2, 3))
    leader = scene.alive[1]
    write(scene, leader, 7, 0, b"aborted")
    mark(scene, leader, 7, 0, committed=False)
    write(scene, leader, 8, 0, b"deleted")
    write(scene, leader, 7, 1, b"committed")
    write(scene, leader, 8, 1, b"kept")
    mark(scene, leader, 7, 1, committed=True)
    deletion = scene.delete_before(3)
    scene.until("the deletion", lambda: deletion.answered)
    scene.settle(1, 2, 3)
    for number in (1, 2, 3):
        partition = scene.alive[number].partition()
        assert partition.last_stable_offset == 3, "not below the start"
        assert (aborted(partition), committed(partition)) == ([], [])
    scene.kill(1)
    scene.elect(2, (2, 3))
    leader = scene.alive[2]
    mark(scene, leader, 8, 0, committed=False)
    scene.settle(2, 3)
    for number in (2, 3):
        partition = scene.alive[number].partition()
        assert partition.last_stable_offset == partition.high_watermark
        assert [producer_id for producer_id, _ in aborted(partition)] == [8]
        assert committed(partition) == [b"committed"]


@proves("T2")
@LAYOUTS
def test_retention_waits_for_an_open_transaction_on_every_replica(layout: str) -> None:
    scene = Scene(layout=layout, topic={"retention_ms": 100_000, "segment_ms": 1000})
    scene.elect(1, (1, 2))
    leader = scene.alive[1]
    for nth in range(4):
        write(scene, leader, 7, nth, b"aborted")
        mark(scene, leader, 7, nth, committed=False)
        scene.run(2)
    write(scene, leader, 8, 0, b"open")
    scene.run(2)
    write(scene, leader, 7, 4, b"aborted")
    mark(scene, leader, 7, 4, committed=False)
    scene.run(700)
    start = scene.starts()[1]
    assert 0 < start == scene.starts()[2] <= 8
    for number in (1, 2):
        assert scene.alive[number].partition().last_stable_offset == 8
    mark(scene, leader, 8, 0, committed=True)
    scene.settle(1, 2)
    for number in (1, 2):
        partition = scene.alive[number].partition()
        assert committed(partition) == [b"open"]
        assert all(first >= start for _, first in aborted(partition))
    scene.run(700)
    assert set(scene.starts().values()) == {12}
    assert {aborted(scene.alive[number].partition()) == [] for number in (1, 2)} == {True}


@proves("T2")
@LAYOUTS
def test_a_partition_that_moves_takes_open_and_aborted_transactions_along(layout: str) -> None:
    """As a drain does it: a new replica copies, joins, leads; the old ones are gone."""
    scene = Scene(layout=layout, topic={"durability": "disk"})
    scene.kill(3)
    scene.elect(1, (1, 2))
    leader = scene.alive[1]
    write(scene, leader, 7, 0, b"aborted")
    write(scene, leader, 8, 0, b"open")
    mark(scene, leader, 7, 0, committed=False)
    write(scene, leader, 7, 1, b"committed")
    mark(scene, leader, 7, 1, committed=True)
    scene.settle(1, 2)
    scene.start(3)
    scene.tell(3)
    scene.until("the join", lambda: 3 in scene.keys[0].isr)
    write(scene, leader, 8, 1, b"behind the join")
    scene.settle(1, 2, 3)
    scene.elect(3, (3,))
    for number in (1, 2):
        scene.kill(number)
    leader = scene.alive[3]
    partition = leader.partition()
    assert (partition.last_stable_offset, aborted(partition)) == (1, [(7, 0)])
    end = leader.log().end_offset
    assert mark(scene, leader, 7, 1, committed=True) < end, "it came along, and is not appended again"
    write(scene, leader, 8, 2, b"at the new leader")
    mark(scene, leader, 8, 0, committed=True)
    assert partition.last_stable_offset == partition.high_watermark
    assert committed(partition) == [b"open", b"committed", b"behind the join", b"at the new leader"]
