"""Transactions on a leader and its followers: each replica tells by its own log and watermark what is decided."""

from __future__ import annotations

import pytest

from headrace.partitions.partition import Partition
from headrace.records import kernel
from headrace.records.batch import TRANSACTIONAL
from partitions.committed_reader import read
from partitions.led import Outcome
from proving import proves
from replication.scene import Broker, Scene

LAYOUTS = pytest.mark.parametrize("layout", ["partitioned", "shared"])


def write(scene: Scene, leader: Broker, producer_id: int, sequence: int, value: bytes) -> None:
    partition = leader.partition()
    if not partition.has_open_transaction(producer_id, 0):
        assert partition.verified(partition.verification(producer_id, 0))
    batch = kernel.build(
        [(1, b"k", value, [])],
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
        attributes=TRANSACTIONAL,
    )
    outcome = Outcome()
    leader.partitions.submit(partition, batch, -1, 30_000, outcome)
    leader.partitions.end_turn()
    scene.until("the write", lambda: not outcome.waiting)
    assert outcome.offset >= 0


def mark(scene: Scene, leader: Broker, producer_id: int, number: int, *, committed: bool) -> int:
    partition, outcome = leader.partition(), Outcome()
    leader.partitions.submit_marker(
        partition,
        lambda: partition.append_marker(producer_id, 0, 0, committed=committed, number=number),
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
