"""Brokers whose starts, or stops, fail at one disk call: they never count for more than they hold."""

from __future__ import annotations

import asyncio
import errno

import pytest

from cluster.participants import DATA, Cluster, Machine, run
from headrace.cluster.incarnation import read_incarnation
from headrace.ports.disk import read_whole
from proving import proves

VALUES = [b"%d" % n for n in range(40)]
LAYOUTS = pytest.mark.parametrize("layout", ["partitioned", "shared"])


async def filled(cluster: Cluster, layout: str) -> Machine:
    for machine in cluster.machines.values():
        await machine.start(**{"log.layout": layout})
    await cluster.create(replicas=len(cluster.machines), durability="disk")
    for value in VALUES:
        await cluster.produce(value)
    await asyncio.sleep(70)  # checkpoint and watermarks are written
    return cluster[cluster.state().replicas[0]]


async def fail_to_start(machine: Machine) -> None:
    """As the process does it: what was opened is closed, and the process ends."""
    with pytest.raises(OSError, match="Input/output error"):
        await machine.start()
    await asyncio.sleep(5)
    await machine.process.run(machine.participant.close())
    machine.kill()


@proves("G14", "F7")
@LAYOUTS
def test_three_brokers_lose_nothing_when_the_first_start_of_the_leader_fails(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        first = await filled(cluster, layout)
        for machine in cluster.machines.values():
            machine.lose_power()
        first.disk.fail_open(f"{DATA}/t/t-0/partition", errno.EIO)
        await fail_to_start(first)
        await asyncio.gather(*(machine.start() for machine in cluster.machines.values()))
        await cluster.until(lambda: cluster.leader() is not None and set(cluster.state().isr) == {1, 2, 3}, 120)
        assert [machine.held() for machine in cluster.machines.values()] == [VALUES] * 3

    run(3, body)


@proves("G11")
@LAYOUTS
def test_a_start_that_fails_leaves_the_watermarks_as_they_were(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        broker = await filled(cluster, layout)
        broker.kill()
        before = read_whole(broker.disk, f"{DATA}/@watermarks")
        broker.disk.fail_open(f"{DATA}/t/t-0/partition", errno.EIO)
        await fail_to_start(broker)
        assert read_whole(broker.disk, f"{DATA}/@watermarks") == before
        await broker.start()
        assert broker.replica().high_watermark == len(VALUES)

    run(1, body)


@proves("J6")
@LAYOUTS
def test_a_stop_without_a_clean_checkpoint_is_no_clean_stop(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        broker = await filled(cluster, layout)
        broker.disk.fail_write(f"{DATA}/@checkpoint.tmp", errno.ENOSPC)
        await broker.stop()
        found = read_incarnation(broker.disk, DATA)
        assert found is not None
        assert not found.clean
        await broker.start()
        await cluster.until(lambda: cluster.leader() is broker)
        assert broker.held() == VALUES
        await broker.stop()
        found = read_incarnation(broker.disk, DATA)
        assert found is not None
        assert found.clean

    run(1, body)


@proves("J6")
@LAYOUTS
def test_a_stop_that_has_not_heard_of_a_failed_sync_is_no_clean_stop(layout: str) -> None:
    """The kernel tells of it once, and told a sync that nobody listens to any more."""

    async def body(cluster: Cluster) -> None:
        broker = await filled(cluster, layout)
        place = f"{DATA}/@commitlog" if layout == "shared" else f"{DATA}/t/t-0"
        broker.disk.fail_sync(f"{place}/{0:020d}.log")
        broker.disk.answer_no_sync()
        with pytest.raises(AssertionError, match="not acknowledged"):
            await cluster.produce(b"not synced", tries=1)
        await broker.stop()
        found = read_incarnation(broker.disk, DATA)
        assert found is not None
        assert not found.clean
        assert found.lost
        await broker.start()
        await cluster.until(lambda: cluster.leader() is broker)
        assert broker.held()[: len(VALUES)] == VALUES

    run(1, body)
