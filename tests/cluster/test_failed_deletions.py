"""A log that is to be deleted, and whose disk fails at that moment, is deleted when the disk is well again; so is what
was made of one that could not be created."""

from __future__ import annotations

import asyncio
import errno

import pytest

from cluster.participants import DATA, Cluster, Machine, run
from headrace.cluster import keys
from headrace.cluster.lineage import plan_accept
from headrace.ports.coordination import Delete, Put
from headrace.storage.log import TopicPartition
from proving import proves

VALUES = [b"%d" % n for n in range(10)]
LONGER_THAN_FILES_ARE_KEPT = 120.0
WHERE = TopicPartition("t", 0)
LAYOUTS = pytest.mark.parametrize("layout", ["partitioned", "shared"])


def refuse_deletions(machine: Machine) -> None:
    def trouble(call: str, path: str) -> int:
        return errno.ENOSPC if (call, path) == ("rename", f"{DATA}/t/t-0") else 0

    machine.disk.trouble = trouble


def mend(machine: Machine) -> None:
    machine.disk.trouble = None


def folders(machine: Machine) -> list[str]:
    path = f"{DATA}/t"
    return machine.disk.list(path) if machine.disk.exists(path) else []


async def begun(cluster: Cluster, layout: str) -> None:
    for machine in cluster.machines.values():
        await machine.start(**{"log.layout": layout})
    await cluster.create(replicas=3)
    await cluster.produce(*VALUES)


async def moved_away(cluster: Cluster, layout: str) -> Machine:
    """The broker that a partition was taken from, and whose disk does not let it delete the log."""
    await begun(cluster, layout)
    replicas = cluster.state().replicas
    away = cluster[replicas[-1]]
    refuse_deletions(away)
    added = next(number for number in cluster.machines if number not in replicas)
    cluster.order_move((*replicas[:-1], added))
    await cluster.until(lambda: away.number not in cluster.state().replicas)
    await cluster.until(lambda: away.participant.partitions.find_replica("t", 0) is None)
    await asyncio.sleep(5)
    assert folders(away) == ["t-0"]
    return away


@LAYOUTS
@proves("L6")
def test_a_replica_that_moved_away_is_deleted_when_the_disk_lets_it(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        away = await moved_away(cluster, layout)
        mend(away)
        await cluster.until(lambda: "t-0" not in folders(away))
        assert away.participant.store.get(WHERE) is None
        await asyncio.sleep(LONGER_THAN_FILES_ARE_KEPT)
        assert folders(away) == []

    run(4, body)


@LAYOUTS
@proves("G8", "J6")
def test_a_deleted_topic_goes_when_the_disk_lets_it_and_then_its_deletion(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        await begun(cluster, layout)
        last = cluster[cluster.state().replicas[-1]]
        refuse_deletions(last)
        await last.process.run(last.participant.topics.delete("t"))
        await asyncio.sleep(LONGER_THAN_FILES_ARE_KEPT)
        assert folders(last) == ["t-0"]
        assert [found.brokers for found in cluster.image().deleted.values()] == [(last.number,)]
        mend(last)
        await cluster.until(lambda: not cluster.image().deleted)
        await asyncio.sleep(LONGER_THAN_FILES_ARE_KEPT)
        assert folders(last) == []

    run(3, body)


@LAYOUTS
@proves("L6")
def test_a_replica_that_comes_back_before_it_could_be_deleted_stays(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        away = await moved_away(cluster, layout)
        cluster.order_move((*cluster.state().replicas[:-1], away.number))
        await cluster.until(lambda: away.number in cluster.state().isr)
        mend(away)
        await asyncio.sleep(LONGER_THAN_FILES_ARE_KEPT)
        await cluster.produce(b"more")
        assert away.number in cluster.state().isr
        assert away.held() == [*VALUES, b"more"]
        assert folders(away) == ["t-0"]

    run(4, body)


@LAYOUTS
@proves("J6")
def test_a_log_that_could_not_be_deleted_stays_while_its_key_is_missing(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        away = await moved_away(cluster, layout)
        key = keys.partition_key(cluster.image().prefix, "t", 0)
        (taken,) = cluster.store.list(key).entries
        cluster.store.transact([], [Delete(key)])
        await cluster.until(lambda: away.participant.view.image.topics["t"].missing == (0,))
        mend(away)
        await asyncio.sleep(LONGER_THAN_FILES_ARE_KEPT)
        assert folders(away) == ["t-0"]
        cluster.store.transact([], [Put(key, taken.value)])
        await cluster.until(lambda: "t-0" not in folders(away))

    run(4, body)


@LAYOUTS
@proves("J6")
def test_a_log_that_could_not_be_deleted_stays_when_the_metadata_goes_back(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        away = await moved_away(cluster, layout)
        copy = cluster.store.snapshot()
        await cluster.create("other", replicas=1)
        await asyncio.sleep(2)
        cluster.store.restore(copy)
        await cluster.until(lambda: bool(cluster.image().controls.doubts))
        mend(away)
        await asyncio.sleep(LONGER_THAN_FILES_ARE_KEPT)
        assert folders(away) == ["t-0"]
        changes = away.participant.changes
        await away.process.run(changes.run(lambda image: plan_accept(image, "ab", 5000), even_in_doubt=True))
        await cluster.until(lambda: not cluster.image().controls.doubts and cluster.leader() is not None)
        await asyncio.sleep(LONGER_THAN_FILES_ARE_KEPT)
        assert folders(away) == ["t-0"]
        assert WHERE in [log.topic_partition for log in away.participant.assignment.set_aside]

    run(4, body)


@LAYOUTS
@proves("L6")
@pytest.mark.parametrize("removable", [True, False])
def test_a_log_that_could_not_be_created_leaves_nothing_when_its_partition_goes_elsewhere(
    layout: str, removable: bool
) -> None:
    async def body(cluster: Cluster) -> None:
        await begun(cluster, layout)
        replicas = cluster.state().replicas
        added = next(cluster[number] for number in cluster.machines if number not in replicas)
        refused: set[str] = set()

        def trouble(call: str, path: str) -> int:
            if path == f"{DATA}/t/t-0/partition" or (
                path == f"{DATA}/t/t-0" and call == "remove folder" and not removable
            ):
                refused.add(call)
                return errno.ENOSPC
            return 0

        added.disk.trouble = trouble
        cluster.order_move((*replicas[:-1], added.number))
        await cluster.until(lambda: bool(refused))
        cluster.order_move(None)
        await cluster.until(lambda: added.number not in added.participant.view.image.topics["t"].partitions[0].replicas)
        await asyncio.sleep(5)
        assert folders(added) == ([] if removable else ["t-0"])
        mend(added)
        await cluster.until(lambda: folders(added) == [])
        await cluster.produce(b"more")
        assert cluster.state().replicas == replicas

    run(4, body)
