"""Which bytes may flip on two machines, so that no record is lost on both."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.simulator.cluster import Cluster
from headrace.simulator.decay import alone_in, batch_at, loss_of
from headrace.simulator.history import Trace
from headrace.simulator.machine import DATA, Machine
from headrace.simulator.scenario import draw_plain
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import TopicPartition
from headrace.storage.offline import verify
from headrace.storage.offline.report import DumpedBatch
from proving import proves

HERE = TopicPartition("kept", 0)
ELSEWHERE = TopicPartition("kept", 1)
LAYOUTS = pytest.mark.parametrize("layout", [PARTITIONED, SHARED])


@proves("G14")
@LAYOUTS
def test_below_the_checkpoint_a_flip_costs_its_batch(layout: str) -> None:
    loss = loss_of(HERE, 4, 6, 6, layout)
    for first, meets in ((3, False), (4, True), (5, True), (6, False)):
        other = loss_of(HERE, first, first + 1, 10, layout)
        assert loss.meets(other) == other.meets(loss) == meets, first
    assert not loss.meets(loss_of(ELSEWHERE, 4, 6, 6, layout))


@proves("G14")
@LAYOUTS
def test_above_the_checkpoint_a_flip_costs_all_that_follows(layout: str) -> None:
    """Two machines that are hit so, each in another record, have both lost what comes after."""
    loss = loss_of(HERE, 4, 6, 5, layout)
    for first, meets in ((3, False), (4, True), (6, True), (100, True)):
        other = loss_of(HERE, first, first + 1, 1000, layout)
        assert loss.meets(other) == other.meets(loss) == meets, first
    before = loss_of(HERE, 1, 2, 0, layout)
    assert loss.meets(before)
    assert before.meets(loss)


@proves("G14")
@LAYOUTS
def test_a_commit_log_that_is_cut_costs_other_partitions_too(layout: str) -> None:
    loss, other = loss_of(HERE, 4, 6, 0, layout), loss_of(ELSEWHERE, 1, 2, 10, PARTITIONED)
    assert loss.meets(other) == other.meets(loss) == (layout == SHARED)


@proves("G14")
@LAYOUTS
def test_what_one_machine_alone_has_is_spared(layout: str) -> None:
    """Its leader wrote it when the others had died: nobody could mend it there."""
    cluster = Cluster(replace(draw_plain(17), layouts=(layout,) * 3), Trace())
    for machine in cluster.machines:
        machine.start()
    wait(cluster, 1)
    cluster.loop.run_until_complete(cluster.create_topics())
    cluster.load.start()
    wait(cluster, 1)
    state = cluster.state_of(HERE)
    assert state is not None
    leader = cluster.machines[state.leader - 1]
    others = [machine for machine in cluster.machines if machine is not leader]
    for machine in others:
        kill(machine)
    wait(cluster, 0.5)
    kill(leader)
    end = max(batch.header.next_offset for machine in others for batch in synced(machine))
    spared = alone_in(leader, others)
    seen = set()
    for batch in synced(leader):
        is_alone = batch.header.base_offset >= end
        seen.add(is_alone)
        for position in (batch.position, batch.position + batch.header.size_bytes - 1):
            assert any(position in each for each in spared.get(batch.path, ())) == is_alone, batch
    assert seen == {False, True}
    assert alone_in(leader, [leader]) == {}
    cluster.close()


@proves("G14")
@LAYOUTS
def test_a_byte_that_flips_where_nothing_runs_is_told_to_the_judge(layout: str) -> None:
    """Once the batch is deleted elsewhere nobody mends it, whichever way it was damaged."""
    cluster = Cluster(replace(draw_plain(17), layouts=(layout,) * 3), Trace())
    for machine in cluster.machines:
        machine.start()
    wait(cluster, 1)
    cluster.loop.run_until_complete(cluster.create_topics())
    cluster.load.start()
    wait(cluster, 3)
    history = cluster.history
    machine = cluster.faults._worn
    kill(machine)
    batches = synced(machine)
    history.asks_to_delete(HERE, batches[-1].header.next_offset)
    assert not history.may_repeat(HERE)
    for batch in batches:
        for position in (batch.position, batch.position + batch.header.size_bytes - 1):
            assert batch_at(batches, batch.path, position) is batch
    for _ in range(20):
        cluster.faults._flip_byte(machine, 0)
    assert history.may_repeat(HERE)
    cluster.close()


def wait(cluster: Cluster, seconds: float) -> None:
    cluster.loop.run_until_complete(asyncio.sleep(seconds))


def kill(machine: Machine) -> None:
    machine.wanted = False
    machine.kill()


def synced(machine: Machine) -> list[DumpedBatch]:
    sizes = machine.safe_bytes(0)
    dumped = (each for each in verify.dump(machine.disk, DATA, HERE) if isinstance(each, DumpedBatch))
    return [each for each in dumped if each.position + each.header.size_bytes <= sizes[each.path]]
