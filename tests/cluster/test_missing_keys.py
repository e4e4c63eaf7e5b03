"""Keys that are missing in coordination take no log with them; only a deletion does."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable

import pytest

from cluster.participants import DATA, Cluster, Machine, run
from headrace.cluster import keys
from headrace.cluster.deletions import KEPT_MS
from headrace.cluster.image import Deletion, encode_deletion
from headrace.ports.coordination import Delete, KeyValue, Put
from proving import proves

LONGER_THAN_FILES_ARE_KEPT = 120.0
VALUES = [b"%d" % number for number in range(5)]

layouts = pytest.mark.parametrize("layout", ["partitioned", "shared"])


async def begin(cluster: Cluster, layout: str, *machines: int, partitions: int = 3) -> None:
    for number in machines:
        await cluster[number].start(**{"log.layout": layout})
    await cluster.create(partitions=partitions, replicas=len(machines))
    for value in VALUES:
        await cluster.produce(value)


def take_keys(cluster: Cluster, *names: str) -> list[KeyValue]:
    """Somebody, or something, removes keys of the cluster; answers what they held."""
    prefix = cluster.image().prefix
    taken = [found for name in names for found in cluster.store.list(prefix + name).entries]
    cluster.store.transact([], [Delete(found.key) for found in taken])
    return taken


def put_back(cluster: Cluster, taken: Iterable[KeyValue]) -> None:
    cluster.store.transact([], [Put(found.key, found.value) for found in taken])


def folders(machine: Machine, topic: str = "t") -> list[str]:
    path = f"{DATA}/{topic}"
    return sorted(machine.disk.list(path)) if machine.disk.exists(path) else []


def aside(machine: Machine) -> list[str]:
    return [str(log.topic_partition) for log in machine.participant.assignment.set_aside]


def has_all(machine: Machine) -> bool:
    found = machine.participant.partitions.find_replica("t", 0)
    return found is not None and found.log.end_offset >= len(VALUES)


@layouts
@proves("J6", "J7")
def test_a_missing_partition_key_sets_that_log_aside_and_leaves_the_others_served(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        await begin(cluster, layout, 1, 2, 3)
        led = [cluster.state("t", index) for index in (1, 2)]
        taken = take_keys(cluster, "partitions/t/0")
        await asyncio.sleep(LONGER_THAN_FILES_ARE_KEPT)
        assert [cluster.state("t", index) for index in (1, 2)] == led
        assert cluster.image().topics["t"].missing == (0,)
        for machine in cluster.machines.values():
            assert folders(machine) == ["t-0", "t-1", "t-2"]
            assert aside(machine) == ["t-0"]
            assert machine.participant.partitions.find_replica("t", 0) is None
            assert machine.participant.partitions.find_replica("t", 1) is not None
        put_back(cluster, taken)
        await cluster.until(lambda: cluster.leader() is not None and all(map(has_all, cluster.alive())))
        await cluster.produce(b"more")
        for machine in cluster.machines.values():
            assert aside(machine) == []
            assert machine.held()[:5] == VALUES

    run(3, body)


@layouts
@proves("J6")
def test_a_log_without_its_key_outlives_a_restart_and_is_served_when_the_key_is_back(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        await begin(cluster, layout, 1)
        taken = take_keys(cluster, "partitions/t/", "topics/t")
        await asyncio.sleep(1)
        await cluster[1].stop()
        await cluster[1].start()
        await asyncio.sleep(LONGER_THAN_FILES_ARE_KEPT)
        assert aside(cluster[1]) == ["t-0", "t-1", "t-2"]
        put_back(cluster, taken)
        await cluster.until(lambda: cluster.leader() is not None)
        assert cluster[1].held() == VALUES
        assert await cluster.produce(b"more") == len(VALUES)

    run(1, body)


@proves("J6")
def test_a_topic_without_its_key_is_served_by_who_has_seen_it(caplog: pytest.LogCaptureFixture) -> None:
    async def body(cluster: Cluster) -> None:
        await begin(cluster, "partitioned", 1, 2, 3)
        taken = take_keys(cluster, "topics/t")
        await asyncio.sleep(LONGER_THAN_FILES_ARE_KEPT)
        assert await cluster.produce(b"more") == len(VALUES)
        await cluster[3].stop()
        await cluster[3].start()
        assert aside(cluster[3]) == ["t-0", "t-1", "t-2"]
        assert "t-0 is set aside with offsets 0 to 6" in caplog.text
        put_back(cluster, taken)
        await cluster.until(lambda: all(map(has_all, cluster.alive())))
        await cluster.until(lambda: set(cluster.state().isr) == {1, 2, 3})

    run(3, body)


@layouts
@proves("J6", "G8")
def test_a_deleted_topic_goes_everywhere_and_then_its_deletion(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        await begin(cluster, layout, 1, 2, 3)
        topic_id = cluster.image().topics["t"].id
        cluster[3].kill()
        await cluster[1].process.run(cluster[1].participant.topics.delete("t"))
        await asyncio.sleep(LONGER_THAN_FILES_ARE_KEPT)
        assert [folders(cluster[number]) for number in (1, 2)] == [[], []]
        assert cluster.image().deleted[topic_id].brokers == (3,)
        assert folders(cluster[3]) == ["t-0", "t-1", "t-2"]
        await cluster.create(partitions=1, replicas=2)
        await cluster[3].start(**{"log.layout": layout})
        await cluster.until(lambda: not cluster.image().deleted)
        assert folders(cluster[3]) == []
        assert await cluster.produce(b"new") == 0

    run(3, body)


@layouts
@proves("G8")
def test_a_topic_made_anew_after_its_keys_were_lost_leaves_the_old_logs_to_a_person(layout: str) -> None:
    async def body(cluster: Cluster) -> None:
        await begin(cluster, layout, 1, partitions=1)
        take_keys(cluster, "partitions/t/", "topics/t")
        await cluster.until(lambda: aside(cluster[1]) == ["t-0"])
        await cluster.create(partitions=1, replicas=1)
        assert await cluster.produce(b"new") == 0
        await asyncio.sleep(LONGER_THAN_FILES_ARE_KEPT)
        assert folders(cluster[1]) == ["t-0", "t-0.stray-0"]

    run(1, body)


def tell_deleted(cluster: Cluster, topic_id: bytes, *brokers: int) -> None:
    prefix = cluster[1].participant.view.image.prefix
    told = encode_deletion(Deletion("t", brokers, cluster[1].process.wall_ms()))
    cluster.store.transact([], [Put(keys.deleted_key(prefix, topic_id), told)])


@layouts
@pytest.mark.parametrize("named", [1, 2])
@pytest.mark.parametrize("restarts", [False, True])
@proves("J6", "G8")
def test_a_folder_that_was_set_aside_goes_when_its_topic_is_deleted(layout: str, named: int, restarts: bool) -> None:
    """Whether the deletion names this broker or not: one that a replica was moved from while it was away is not named.
    That of another topic stays."""

    async def body(cluster: Cluster) -> None:
        await begin(cluster, layout, 1, partitions=1)
        ids = [cluster.image().topics["t"].id]
        for _ in range(2):
            take_keys(cluster, "partitions/t/", "topics/t")
            await cluster.until(lambda: aside(cluster[1]) == ["t-0"])
            await cluster.create(partitions=1, replicas=1)
            assert await cluster.produce(b"new") == 0
            ids.append(cluster.image().topics["t"].id)
        assert folders(cluster[1]) == ["t-0", "t-0.stray-0", "t-0.stray-1"]
        if restarts:
            cluster[1].kill()
        tell_deleted(cluster, ids[1], named)
        if restarts:
            await cluster[1].start(**{"log.layout": layout})
        await cluster.until(lambda: folders(cluster[1]) == ["t-0", "t-0.stray-0"])
        tell_deleted(cluster, ids[0], named)
        await cluster.until(lambda: folders(cluster[1]) == ["t-0"])
        await cluster.until(lambda: not cluster.image().deleted or named != 1)
        await cluster.until(lambda: cluster.leader() is not None)
        assert await cluster.produce(b"more") == 1

    run(1, body)


@layouts
@pytest.mark.parametrize("renewed", [False, True])
@proves("J6", "G8")
def test_a_folder_whose_deletion_failed_goes_later(layout: str, renewed: bool) -> None:
    """Its log is gone by then; if the topic is made anew, its folder is in the way."""

    async def body(cluster: Cluster) -> None:
        await begin(cluster, layout, 1, partitions=1)
        topic_id = cluster.image().topics["t"].id
        cluster[1].disk.trouble = lambda call, _: errno.EACCES if call == "rename" else 0
        await cluster[1].process.run(cluster[1].participant.topics.delete("t"))
        await asyncio.sleep(LONGER_THAN_FILES_ARE_KEPT)
        assert folders(cluster[1]) == ["t-0"]
        assert list(cluster.image().deleted) == [topic_id]
        cluster[1].disk.trouble = None
        if renewed:
            await cluster.create(partitions=1, replicas=1)
            assert await cluster.produce(b"new") == 0
        await cluster.until(lambda: not cluster.image().deleted)
        await cluster.until(lambda: folders(cluster[1]) == (["t-0"] if renewed else []))

    run(1, body)


@proves("J6")
def test_a_deletion_waits_a_bounded_time_for_a_broker_that_does_not_come() -> None:
    async def body(cluster: Cluster) -> None:
        await cluster[1].start()
        prefix, now_ms = cluster.image().prefix, cluster[1].process.wall_ms()
        for topic_id, at_ms in ((b"o" * 16, now_ms - KEPT_MS), (b"n" * 16, now_ms)):
            told = encode_deletion(Deletion("t", (2,), at_ms))
            cluster.store.transact([], [Put(keys.deleted_key(prefix, topic_id), told)])
        await cluster.until(lambda: list(cluster.image().deleted) == [b"n" * 16])

    run(1, body)
