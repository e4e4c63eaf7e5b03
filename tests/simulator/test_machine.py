"""Which bytes flip on a machine on which no broker runs: none that a start could take for a torn write."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace.simulator.cluster import Cluster
from headrace.simulator.history import Trace
from headrace.simulator.machine import A_BATCH, DATA, Machine
from headrace.simulator.scenario import draw
from headrace.storage import folder
from headrace.storage.folder import stem
from headrace.storage.segments.segment import LOG
from proving import proves


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(replace(draw(1), layouts=(folder.PARTITIONED,) * 3), Trace())
    for machine in cluster.machines:
        machine.start()
    wait(cluster, 1)
    cluster.loop.run_until_complete(cluster.create_topics())
    yield cluster
    cluster.close()


def wait(cluster: Cluster, seconds: float) -> None:
    cluster.loop.run_until_complete(asyncio.sleep(seconds))


def write_synced(machine: Machine) -> None:
    """One batch, in each log."""
    for _, path in folder.partitions(machine.disk, DATA):
        file = machine.disk.open(stem(path, 0) + LOG, create=True, writable=True)
        file.pwritev([A_BATCH], 0)
        file.sync()
        machine.disk.sync_folder(path)


def start(cluster: Cluster, machine: Machine) -> None:
    machine.start()
    wait(cluster, 3)
    assert machine.participant is not None


def kill(machine: Machine) -> None:
    machine.wanted = False
    machine.kill()


@proves("G14")
def test_a_last_byte_flips_where_power_was_not_lost_since_the_logs_were_opened(cluster: Cluster) -> None:
    machine = cluster.machines[0]
    kill(machine)
    write_synced(machine)
    assert machine.flip_byte({}, power_may_go=False)
    machine.cut_power()
    start(cluster, machine)
    kill(machine)
    write_synced(machine)
    assert machine.flip_byte({}, power_may_go=False)


@proves("G14")
def test_no_last_byte_flips_where_power_may_go_before_the_next_start(cluster: Cluster) -> None:
    machine = cluster.machines[0]
    kill(machine)
    write_synced(machine)
    assert machine.flip_byte({}, power_may_go=True) is None


@proves("G14")
def test_no_last_byte_flips_when_a_start_after_a_loss_of_power_has_opened_nothing(cluster: Cluster) -> None:
    machine = cluster.machines[0]
    kill(machine)
    write_synced(machine)
    machine.cut_power()
    machine.start()
    kill(machine)
    assert machine.safe_bytes(0)
    assert machine.flip_byte({}, power_may_go=False) is None
