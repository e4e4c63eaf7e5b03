"""A leader that cannot read a record of its own: whole brokers and the real controller, on virtual time."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from cluster.participants import DATA, Cluster, Machine, run
from headrace.cluster.controller_state import UNCLEAN
from headrace.cluster.orders import plan_elections
from headrace.cluster.replica_reports import RESIGN_AGAIN_SECONDS
from headrace.errors import HeadraceError
from headrace.ports.disk import read_whole
from proving import proves

RECORDS, BAD = 40, 20
VALUES = [(b"%d." % nth * 1000)[:1000] for nth in range(RECORDS)]


def go_bad(machine: Machine, layout: str, *offsets: int) -> None:
    """A sector in the record with offset 20, or in others, cannot be read any more."""
    folder = f"{DATA}/@commitlog" if layout == "shared" else f"{DATA}/t/t-0"
    for path in [f"{folder}/{name}" for name in machine.disk.list(folder) if name.endswith(".log")]:
        data = read_whole(machine.disk, path)
        for position in [data.find(VALUES[offset]) for offset in offsets or (BAD,)]:
            if position >= 0:
                machine.disk.go_bad(path, position + 500)


def consume(machine: Machine) -> set[int]:
    """Offsets that a consumer gets there."""
    partition, found = machine.replica(), set()

    def read(offset: int) -> None:
        for piece in partition.read(offset, 1, warm=True).slices:
            piece.read()
        found.add(offset)

    for offset in range(partition.log.start_offset, partition.high_watermark):
        with suppress(HeadraceError, OSError):
            machine.process.context.run(read, offset)
    return found


def found_damage(machine: Machine, layout: str) -> None:
    go_bad(machine, layout)
    for _ in range(2):  # the first time it shows when it is sent
        assert consume(machine) == set(range(RECORDS)) - {BAD}
    assert set(machine.participant.partitions.damaged.values()) == {BAD}


async def filled(cluster: Cluster, layout: str, min_in_sync: int = 0) -> list[Machine]:
    for machine in cluster.machines.values():
        await machine.start(**{"log.layout": layout})
    await cluster.create(replicas=len(cluster.machines), durability="disk", min_insync_replicas=min_in_sync)
    for value in VALUES:
        await cluster.produce(value)
    await asyncio.sleep(1)
    leader = cluster.leader()
    assert leader is not None
    return [leader, *(machine for machine in cluster.machines.values() if machine is not leader)]


def in_sync(cluster: Cluster, *machines: Machine) -> bool:
    return set(cluster.state().isr) == {machine.number for machine in machines}


@proves("J1")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_it_resigns_and_is_mended(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        first, *others = await filled(cluster, layout)
        found_damage(first, layout)
        await cluster.until(lambda: cluster.leader() in others)
        await cluster.until(lambda: not first.participant.partitions.damaged and in_sync(cluster, first, *others))
        assert first.held() == VALUES
        assert consume(first) == set(range(RECORDS))

    run(3, body)


async def alone(cluster: Cluster, layout: str, *, lose: bool) -> tuple[Machine, Machine]:
    """A damaged leader whose only follower was away, and has come back with an empty disk or as it was."""
    first, second = await filled(cluster, layout, 1)
    second.kill()
    await cluster.until(lambda: in_sync(cluster, first))
    if lose:
        second.disk.remove_folder(DATA)
        second.disk.make_folder(DATA)
    found_damage(first, layout)
    return first, second


@proves("J1")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_left_alone_it_serves_what_it_can_and_says_what_would_help(
    layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(cluster: Cluster) -> None:
        first, second = await alone(cluster, layout, lose=True)
        await second.start(**{"log.layout": layout})
        await cluster.until(lambda: second.replica().log.end_offset == BAD)
        await asyncio.sleep(5)
        assert cluster.leader() is first
        assert in_sync(cluster, first)
        assert await cluster.produce(b"more") == RECORDS
        assert consume(first) == set(range(RECORDS + 1)) - {BAD}
        said = [each.message for each in caplog.records if "no other replica is in sync to lead" in each.message]
        assert len(said) == 1
        assert "`headrace partition elect --unclean t 0`" in said[0]
        assert len([each for each in caplog.records if "cannot be copied to broker" in each.message]) <= 2

    run(2, body)


@proves("F7")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_replica_that_holds_the_record_comes_back_and_mends_it(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        first, second = await alone(cluster, layout, lose=False)
        await cluster.produce(b"more")
        await second.start(**{"log.layout": layout})
        await cluster.until(lambda: cluster.leader() is second)
        await cluster.until(lambda: not first.participant.partitions.damaged and in_sync(cluster, first, second))
        assert first.held() == second.held() == [*VALUES, b"more"]

    run(2, body)


@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_disk_that_reads_again_mends_it(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        first, second = await alone(cluster, layout, lose=True)
        await second.start(**{"log.layout": layout})
        await cluster.until(lambda: second.replica().log.end_offset == BAD)
        first.disk.recover()
        await cluster.until(lambda: not first.participant.partitions.damaged and in_sync(cluster, first, second))
        assert first.held() == second.held() == VALUES

    run(2, body)


@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_log_that_begins_behind_the_record_is_whole_again(layout: str) -> None:
    """By retention, or because an operator gives up what lies before."""

    async def body(cluster: Cluster) -> None:
        first, second = await alone(cluster, layout, lose=True)
        await second.start(**{"log.layout": layout})
        await cluster.until(lambda: second.replica().log.end_offset == BAD)
        first.process.context.run(first.replica().log.delete_before, BAD + 1)
        await cluster.until(lambda: not first.participant.partitions.damaged and in_sync(cluster, first, second))
        assert first.held()[-RECORDS + BAD + 1 :] == second.held() == VALUES[BAD + 1 :]

    run(2, body)


@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_an_operator_can_give_up_what_lies_behind(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        first, second = await alone(cluster, layout, lose=True)
        await second.start(**{"log.layout": layout})
        await cluster.until(lambda: second.replica().log.end_offset == BAD)
        await first.stop()
        await cluster.until(lambda: cluster.state().leader == -1)
        await asyncio.sleep(5)
        (step,) = plan_elections(cluster.image(), [("t", 0)], UNCLEAN).steps
        coordination = cluster.store.client(second.host, second.process)
        await second.process.run(coordination.transact(step.compares, step.actions))
        await cluster.until(lambda: cluster.leader() is second)
        await first.start(**{"log.layout": layout})
        await cluster.until(lambda: in_sync(cluster, first, second))
        assert first.held() == second.held() == VALUES[:BAD]
        lost = cluster.state().lost
        assert lost is not None
        assert lost.start == BAD

    run(2, body)


def test_it_asks_again_after_a_while_when_it_leads_anew_and_is_still_damaged() -> None:
    """Two that are damaged do not hand it to and fro, but one is not left leading while others could."""

    async def body(cluster: Cluster) -> None:
        first, second, third = await filled(cluster, "partitioned")
        for machine in (first, second, third):
            go_bad(machine, "partitioned")
        for _ in range(2):
            consume(first)
        await cluster.until(lambda: cluster.leader() in (second, third))
        leader = cluster.leader()
        assert leader is not None
        for _ in range(2):
            consume(leader)
        await asyncio.sleep(RESIGN_AGAIN_SECONDS)
        assert cluster.state().leader_epoch < 8, "an election in a minute, not one in a second"
        for machine in (second, third):
            machine.disk.recover()
        await cluster.until(
            lambda: not any(each.participant.partitions.damaged for each in (first, second, third)),
            5 * RESIGN_AGAIN_SECONDS,
        )
        await cluster.until(lambda: in_sync(cluster, first, second, third))
        assert consume(first) == consume(second) == consume(third) == set(range(RECORDS))

    run(3, body)


@proves("J1")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_two_that_are_damaged_in_different_places_mend_each_other(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        first, second = await filled(cluster, layout)
        go_bad(first, layout, 30)
        go_bad(second, layout)
        for _ in range(2):
            consume(first)
            consume(second)
        await cluster.until(
            lambda: not any(each.participant.partitions.damaged for each in (first, second)), 10 * RESIGN_AGAIN_SECONDS
        )
        await cluster.until(lambda: in_sync(cluster, first, second))
        assert first.held() == second.held() == VALUES
        assert consume(first) == consume(second) == set(range(RECORDS))

    run(2, body)


async def assigned(cluster: Cluster, layout: str) -> list[Machine]:
    """Machines with a partition that is filled, in the order of its assignment; the first leads."""
    first, *_ = await filled(cluster, layout)
    machines = [cluster[number] for number in cluster.state().replicas]
    assert machines[0] is first
    return machines


def go_bad_in_turn(first: Machine, second: Machine, layout: str) -> None:
    """Neither can read all that lies behind the other's first damaged place, so neither mends the other."""
    go_bad(first, layout, 5, 25)
    go_bad(second, layout, 10, 30)
    for _ in range(2):
        consume(first)


def all_whole(*machines: Machine) -> bool:
    return not any(each.participant.partitions.damaged for each in machines)


@proves("J1")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_two_that_are_damaged_do_not_keep_it_from_one_that_is_whole(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        first, second, third = await assigned(cluster, layout)
        go_bad_in_turn(first, second, layout)
        await cluster.until(lambda: cluster.leader() is third, RESIGN_AGAIN_SECONDS / 2)
        await cluster.until(lambda: all_whole(first, second) and in_sync(cluster, first, second, third))
        assert first.held() == second.held() == third.held() == VALUES
        assert consume(first) == consume(second) == set(range(RECORDS))

    run(3, body)


@proves("F7")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_one_that_is_whole_and_comes_back_leads_though_two_have_just_resigned(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        first, second, third = await assigned(cluster, layout)
        third.kill()
        await cluster.until(lambda: in_sync(cluster, first, second))
        epoch = cluster.state().leader_epoch
        go_bad_in_turn(first, second, layout)
        await cluster.until(lambda: cluster.state().leader_epoch == epoch + 2 and in_sync(cluster, first, second))
        assert cluster.leader() is first
        await third.start(**{"log.layout": layout})
        await cluster.until(lambda: cluster.leader() is third, RESIGN_AGAIN_SECONDS / 2)
        await cluster.until(lambda: all_whole(first, second) and in_sync(cluster, first, second, third))
        assert first.held() == second.held() == third.held() == VALUES

    run(3, body)
