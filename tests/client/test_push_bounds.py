"""How much of what was fetched listeners and priorities hold: within the buffer setting of their consumer."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
import uuid

import pytest

from brokers import Broker, wait_for
from client.conftest import MakeTopic
from headrace import Consumer, Producer, aio
from headrace.client.admin.cluster import Cluster
from headrace.client.consumer.priority import PriorityOrder
from headrace.records.consumer_records import ReceivedRecord
from proving import proves

RECORD_BYTES = 100_000
COUNT = 60
BUFFER_BYTES = 500_000


@pytest.fixture
def group() -> str:
    return f"bounds-{uuid.uuid4().hex[:8]}"


def write(broker: Broker, topic: str, partitions: int, codec: str = "none") -> None:
    """Records that take little room on the wire where they are compressed."""
    with Producer(broker.bootstrap, codec=codec, batch_bytes=1 << 20) as producer:
        for nth in range(COUNT):
            value = b"%d " % nth + bytes(RECORD_BYTES)
            producer.send_async(topic, value, partition=nth % partitions, headers=[("priority", b"%d" % (nth % 3))])


def bytes_in(order: PriorityOrder) -> int:
    """Of the records that wait there, to be taken or until their partition goes on."""
    lines = [record for line in order._by_priority.values() for record, _ in line]
    return sum(record.size_bytes for record in [*lines, *(record for _, record, _ in order._aside)])


@proves("R8")
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("partitions", [1, 4])
def test_records_that_wait_for_a_listener_are_bounded_in_bytes(
    partitions: int, ordered: bool, broker: Broker, cluster: Cluster, topic: MakeTopic, group: str
) -> None:
    name = topic(partitions=partitions)
    write(broker, name, partitions)
    go_on = threading.Event()
    seen: list[int] = []

    def listener(record: ReceivedRecord) -> None:
        go_on.wait(60)
        seen.append(int(record.value.split()[0]))

    consumer = Consumer(name, bootstrap=broker.bootstrap, group=group, buffer_bytes=BUFFER_BYTES)
    with consumer.listen(listener, threads=2, ordered=ordered) as listening:
        (source, *_) = listening._sources
        wait_for("all partitions to be held", lambda: len(source.held) == partitions)
        waiting = [progress.pending_bytes for progress in listening._load._progress.values()]
        assert 0 < sum(waiting) <= 2 * (BUFFER_BYTES + partitions * RECORD_BYTES)
        assert listening._load.pending < COUNT
        go_on.set()
        wait_for("all records", lambda: len(seen) == COUNT)
    assert sorted(seen) == list(range(COUNT))


@proves("R8")
def test_records_that_wait_for_a_coroutine_are_bounded_in_bytes(
    broker: Broker, cluster: Cluster, topic: MakeTopic, group: str
) -> None:
    name = topic()
    write(broker, name, 1)

    async def main() -> list[int]:
        go_on, seen = asyncio.Event(), []

        async def listener(record: ReceivedRecord) -> None:
            await go_on.wait()
            seen.append(int(record.value.split()[0]))

        consumer = aio.Consumer(name, bootstrap=broker.bootstrap, group=group, buffer_bytes=BUFFER_BYTES)
        async with consumer.listen(listener, tasks=2) as listening:
            core = listening._sources[0].core
            held = lambda: core.assigned and all(core.cursor(place).paused for place in core.assigned)  # noqa: E731
            await asyncio.to_thread(wait_for, "the partition to be held", held)
            assert listening._load.pending < COUNT
            assert 0 < listening._load.progress_of((name, 0)).pending_bytes <= 2 * (BUFFER_BYTES + RECORD_BYTES)
            go_on.set()
            await asyncio.to_thread(wait_for, "all records", lambda: len(seen) == COUNT)
        return seen

    assert sorted(asyncio.run(main())) == list(range(COUNT))


@proves("R8")
@pytest.mark.parametrize("priority_header", [None, "priority"])
def test_a_small_record_says_nothing_of_the_size_of_those_behind_it(
    priority_header: str | None, broker: Broker, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic()
    with Producer(broker.bootstrap) as producer:
        producer.send(name, b"-1 ")
    write(broker, name, 1, codec="zstd")
    go_on = threading.Event()
    seen: list[int] = []

    def listener(record: ReceivedRecord) -> None:
        go_on.wait(60)
        seen.append(int(record.value.split()[0]))

    consumer = Consumer(name, bootstrap=broker.bootstrap, buffer_bytes=BUFFER_BYTES, priority_header=priority_header)
    with consumer.listen(listener, threads=2) as listening:
        (source, *_) = listening._sources
        wait_for("the partition to be held", lambda: len(source.held) == 1)
        # The bound may be nearly reached, and then one more chunk is taken; each may pass it by a record.
        assert 0 < listening._load.progress_of((name, 0)).pending_bytes <= 2 * (BUFFER_BYTES + RECORD_BYTES)
        order = consumer._core.collector._order
        with consumer._driver.reactor.lock:
            assert order is None or bytes_in(order) <= BUFFER_BYTES + 2 * RECORD_BYTES
        go_on.set()
        wait_for("all records", lambda: len(seen) == COUNT + 1)
    assert sorted(seen) == list(range(-1, COUNT))


@proves("J10")
def test_records_that_wait_for_their_priority_are_bounded_in_bytes_as_they_are_unpacked(
    broker: Broker, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(partitions=2)
    write(broker, name, 2, codec="zstd")
    found: list[int] = []
    with Consumer(name, bootstrap=broker.bootstrap, priority_header="priority", buffer_bytes=BUFFER_BYTES) as consumer:
        tracemalloc.start()
        try:
            while len(found) < COUNT:
                records = consumer.poll(20_000, max_records=1)
                found += [int(record.value.split()[0]) for record in records]
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert sorted(found) == list(range(COUNT))
    assert most_bytes < COUNT * RECORD_BYTES / 2
