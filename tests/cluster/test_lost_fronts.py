"""Brokers that come back without the first files of their logs: a start that no deletion has raised deletes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from cluster.participants import Cluster, Machine, run
from headrace.cluster.image import NO_LEADER
from headrace.cluster.incarnation import read_incarnation
from headrace.errors import CorruptBatch
from proving import proves

VALUES = [b"%04d" % n * 1024 for n in range(50)]
FILE_BYTES = 1 << 16
FOLDERS = {"partitioned": "/data/t/t-0", "shared": "/data/@commitlog"}
LAYOUTS = pytest.mark.parametrize("layout", FOLDERS)


async def start(machine: Machine, layout: str) -> None:
    await machine.start(**{"log.layout": layout, "commitlog.file.bytes": FILE_BYTES})


async def filled(cluster: Cluster, layout: str) -> Machine:
    """All replicas in sync with several files, and a checkpoint that speaks of them; answers the leader."""
    for machine in cluster.machines.values():
        await start(machine, layout)
    await cluster.create("t", 1, len(cluster.machines), segment_bytes=FILE_BYTES, durability="disk")
    for value in VALUES:
        await cluster.produce(value)
    await cluster.until(lambda: all(machine.held() == VALUES for machine in cluster.machines.values()))
    await asyncio.sleep(70)
    leader = cluster.leader()
    assert leader is not None
    return leader


async def all_again(cluster: Cluster, layout: str, first: Machine) -> None:
    """All come back at a time when nobody is registered any more, `first` before the others."""
    await asyncio.sleep(10)
    for machine in sorted(cluster.machines.values(), key=lambda machine: machine is not first):
        if machine not in cluster.alive():
            await start(machine, layout)


def read_all(machine: Machine) -> None:
    """As consumers do: what is damaged is noticed."""
    log = machine.replica().log
    for offset in range(len(VALUES)):
        with suppress(CorruptBatch):
            log.read(offset, 1, log.written_offset, warm=True)


async def whole_again(cluster: Cluster, values: list[bytes] = VALUES, start_offset: int = 0) -> None:
    def is_whole() -> bool:
        state = cluster.state()
        return state.leader != NO_LEADER and set(state.isr) == set(state.replicas)

    def all_hold() -> bool:
        return all(machine.held() == values for machine in cluster.machines.values())

    await cluster.until(is_whole)
    await cluster.until(lambda: not any(machine.participant.partitions.damaged for machine in cluster.alive()))
    await cluster.until(all_hold)
    assert {machine.replica().log.start_offset for machine in cluster.machines.values()} == {start_offset}


def first_file(machine: Machine, layout: str) -> str:
    names = sorted(name for name in machine.disk.list(FOLDERS[layout]) if name.endswith(".log"))
    assert len(names) > 1
    return f"{FOLDERS[layout]}/{names[0]}"


def lose(machine: Machine, layout: str) -> None:
    machine.disk.remove(first_file(machine, layout))


def empty(machine: Machine, layout: str) -> None:
    file = machine.disk.open(first_file(machine, layout), writable=True)
    file.truncate(0)
    file.close()


def lose_with_queue(machine: Machine, layout: str) -> None:
    """What else could tell of it in `shared` is gone too."""
    lose(machine, layout)
    for name in machine.disk.list("/data/t/t-0"):
        if name.endswith((".queue", ".index")):
            machine.disk.remove(f"/data/t/t-0/{name}")


@proves("G14", "F7")
@LAYOUTS
@pytest.mark.parametrize("lose", [lose, empty, lose_with_queue])
@pytest.mark.parametrize("clean", [False, True])
def test_a_leader_that_lost_the_front_of_its_log_makes_nobody_delete_theirs(
    layout: str, lose: Callable[[Machine, str], None], clean: bool
) -> None:
    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster, layout)
        for machine in sorted(cluster.machines.values(), key=lambda machine: machine is leader):
            if clean:
                await machine.stop()
            else:
                machine.kill()
        lose(leader, layout)
        await all_again(cluster, layout, leader)
        read_all(leader)
        await whole_again(cluster)

    run(3, body)


@proves("G14")
@LAYOUTS
def test_a_replica_without_its_front_is_not_carried_over_and_does_not_lead(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster, layout)
        for machine in sorted(cluster.machines.values(), key=lambda machine: machine is leader):
            await machine.stop()
        lose(leader, layout)
        await asyncio.sleep(10)
        await start(leader, layout)
        await asyncio.sleep(10)
        assert cluster.state().leader == NO_LEADER
        await all_again(cluster, layout, leader)
        await cluster.until(lambda: cluster.leader() is not None)
        assert cluster.leader() is not leader
        await whole_again(cluster)

    run(3, body)


@proves("G14")
@LAYOUTS
def test_the_last_in_sync_replica_keeps_what_others_hold_of_its_lost_front(layout: str) -> None:
    """It has the newest records alone, they have the oldest: neither makes the other drop any."""

    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster, layout)
        others = [machine for machine in cluster.machines.values() if machine is not leader]
        for machine in others:
            machine.kill()
        await cluster.until(lambda: cluster.state().isr == (leader.number,))
        await cluster.produce(b"newest", acks=1)
        await asyncio.sleep(70)
        leader.kill()
        lose(leader, layout)
        await all_again(cluster, layout, leader)
        await cluster.until(lambda: cluster.leader() not in (None, leader))
        await whole_again(cluster, [*VALUES, b"newest"])

    run(3, body)


@LAYOUTS
def test_a_replica_that_is_alone_serves_what_it_has_and_says_what_it_has_not(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        alone = await filled(cluster, layout)
        for clean in (False, True):
            if clean:
                await alone.stop()
            else:
                alone.kill()
                lose(alone, layout)
            await all_again(cluster, layout, alone)
            await cluster.until(lambda: cluster.leader() is alone)
            await cluster.until(lambda: alone.replica().high_watermark == len(VALUES))
            partition = alone.replica()
            assert alone.participant.partitions.damaged == {partition: 0}
            with pytest.raises(CorruptBatch):
                partition.read(0, 1000)
            assert partition.read(len(VALUES) // 2, 1000).count
        # An operator gives up what is gone.
        alone.process.context.run(alone.participant.partitions.delete_before, partition, len(VALUES) // 2)
        await cluster.until(lambda: partition.start_offset == len(VALUES) // 2)
        await cluster.until(lambda: not alone.participant.partitions.damaged)

    run(1, body)


@LAYOUTS
def test_what_was_deleted_is_not_missed_after_a_kill_before_the_checkpoint(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        alone = await filled(cluster, layout)
        log, half = alone.replica().log, len(VALUES) // 2
        alone.process.context.run(log.delete_before, 2)  # inside the first file, and told by a checkpoint
        await cluster.until(lambda: log.safe_start_offset == 2)
        alone.process.context.run(log.delete_before, half)
        alone.kill()
        await all_again(cluster, layout, alone)
        await cluster.until(lambda: cluster.leader() is alone)
        assert not alone.participant.partitions.damaged
        record = read_incarnation(alone.disk, "/data")
        assert record is not None
        assert not record.lost
        assert 2 <= alone.replica().log.start_offset <= half
        assert alone.held() == VALUES[alone.replica().log.start_offset :]

    run(1, body)


@LAYOUTS
def test_what_was_lost_soon_after_a_deletion_is_missed(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        alone = await filled(cluster, layout)
        partition, deleted = alone.replica(), 20
        alone.process.context.run(alone.participant.partitions.delete_before, partition, deleted)
        await cluster.until(lambda: partition.start_offset == deleted)
        await asyncio.sleep(5)
        alone.kill()
        lose(alone, layout)
        await all_again(cluster, layout, alone)
        await cluster.until(lambda: cluster.leader() is alone)
        assert alone.participant.partitions.damaged == {alone.replica(): deleted}

    run(1, body)


def flip_checkpoint(machine: Machine) -> None:
    machine.disk.flip("/data/@checkpoint", 100)


def lose_checkpoint(machine: Machine) -> None:
    machine.disk.remove("/data/@checkpoint")


@proves("G14", "F6")
@LAYOUTS
@pytest.mark.parametrize("lose", [flip_checkpoint, lose_checkpoint])
def test_a_leader_whose_checkpoint_is_lost_does_not_bring_back_what_was_deleted(
    layout: str, lose: Callable[[Machine], None]
) -> None:
    async def body(cluster: Cluster) -> None:
        leader = await filled(cluster, layout)
        partition, start_offset = leader.replica(), len(VALUES) // 2 + 1  # inside a segment
        leader.process.context.run(leader.participant.partitions.delete_before, partition, start_offset)
        await cluster.until(lambda: partition.start_offset == start_offset)
        for machine in sorted(cluster.machines.values(), key=lambda machine: machine is leader):
            await machine.stop()
        lose(leader)
        await asyncio.sleep(10)
        await start(leader, layout)
        await asyncio.sleep(10)
        assert cluster.state().leader == NO_LEADER
        await all_again(cluster, layout, leader)
        await whole_again(cluster, VALUES[start_offset:], start_offset)

    run(3, body)


@LAYOUTS
def test_a_replica_that_is_alone_leads_without_its_checkpoint(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        alone = await filled(cluster, layout)
        await alone.stop()
        flip_checkpoint(alone)
        await all_again(cluster, layout, alone)
        await cluster.until(lambda: cluster.leader() is alone)
        await whole_again(cluster)

    run(1, body)
