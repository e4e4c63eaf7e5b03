"""A consumer over what happens to a broker and its topics: killed, made anew, enlarged, damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from brokers import Broker, wait_for
from client.test_consumer_pull import collect, send, values
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.consumer.consumer import Consumer
from headrace.client.consumer.fetcher import Reset
from headrace.errors import CorruptBatch
from headrace.records.batch import CRC_AT, batches
from headrace.records.consumer_records import ReceivedRecord
from proving import proves

StartBroker = Callable[..., Broker]
MakeTopic = Callable[..., str]


def poll_until(consumer: Consumer, done: Callable[[], bool]) -> list[ReceivedRecord]:
    found: list[ReceivedRecord] = []
    while not done():
        found += consumer.poll(timeout_ms=100)
    return found


@proves("R8", "G6")
def test_a_broker_killed_and_restarted_in_mid_read_is_waited_for(fresh_broker: StartBroker) -> None:
    broker = fresh_broker()
    with Cluster(broker.bootstrap) as cluster:
        operations.create_topic(cluster, "steady", partitions=2)
        for partition in (0, 1):
            send(cluster, "steady", range(15_000), partition, per_batch=500)
    found: list[ReceivedRecord] = []
    up = threading.Event()
    limits = {"partition_fetch_bytes": 20_000, "buffer_bytes": 40_000, "max_wait_ms": 100}
    with Consumer("steady", bootstrap=broker.bootstrap, **limits) as consumer:  # type: ignore[arg-type]
        for kills in (1, 2):
            while len(found) < 5000 * kills:
                found += consumer.poll(timeout_ms=5000)
            broker.kill()
            with ThreadPoolExecutor(1) as pool:
                reading = pool.submit(poll_until, consumer, up.is_set)
                broker.start()
                up.set()
                found += reading.result(60)
            up.clear()
        found += collect(consumer, 30_000 - len(found))
        with Cluster(broker.bootstrap) as cluster:
            send(cluster, "steady", range(15_000, 15_010), 1)
        found += collect(consumer, 10)
    for partition, count in ((0, 15_000), (1, 15_010)):
        assert values(record for record in found if record.partition == partition) == list(range(count))


@proves("R8")
@pytest.mark.parametrize("group", [None, "early-birds"])
def test_a_consumer_started_before_its_broker_finds_it_later(fresh_broker: StartBroker, group: str | None) -> None:
    broker = fresh_broker()
    with Cluster(broker.bootstrap) as cluster:
        operations.create_topic(cluster, "early", partitions=1)
        send(cluster, "early", range(10))
    broker.kill()
    found: list[ReceivedRecord] = []

    def more() -> bool:
        found.extend(consumer.poll(timeout_ms=100))
        return len(found) >= 10

    with Consumer("early", bootstrap=broker.bootstrap, group=group) as consumer:
        assert consumer.poll(timeout_ms=100) == []
        broker.start()
        wait_for("records of a broker that came later", more)
        if group is not None:
            consumer.commit()
    assert values(found) == list(range(10))


@proves("R8")
@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_partitions_that_a_topic_gains_are_read_from_their_first_record(
    broker: Broker, cluster: Cluster, topic: MakeTopic, start: str
) -> None:
    name = topic(partitions=1)
    with Consumer(name, bootstrap=broker.bootstrap, start=start, max_wait_ms=50) as consumer:  # type: ignore[arg-type]
        assert consumer.position(name, 0) == 0
        operations.create_partitions(cluster, name, 3)
        cluster.forget()
        for partition in range(3):
            wait_for("the partition", lambda partition=partition: len(cluster.topic(name).partitions) > partition)  # type: ignore[misc]
            send(cluster, name, range(100 * partition, 100 * partition + 20), partition)
        # What a refresh brings every half minute, now.
        with consumer._driver.reactor.lock:
            consumer._pool.metadata.stale(name)
        found = collect(consumer, 60)
        assert consumer.assignment == [(name, 0), (name, 1), (name, 2)]
    assert sorted(values(found)) == [*range(20), *range(100, 120), *range(200, 220)]


@proves("R8")
def test_a_topic_made_anew_is_read_from_its_first_record_and_told(
    broker: Broker, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(partitions=2)
    send(cluster, name, range(100), 0)
    told: list[Reset] = []
    with Consumer(name, bootstrap=broker.bootstrap, start="latest", max_wait_ms=50, on_reset=told.append) as consumer:
        consumer.seek_to_start()
        assert values(collect(consumer, 100)) == list(range(100))
        operations.delete_topic(cluster, name)
        cluster.forget()
        assert consumer.poll(timeout_ms=100) == []
        operations.create_topic(cluster, name, partitions=1)
        send(cluster, name, range(500, 700))
        assert values(collect(consumer, 200)) == list(range(500, 700))
        assert consumer.assignment == [(name, 0)]
    assert told == [Reset(name, 0, 100, 0, f"topic {name!r} was deleted and created again")]


@proves("R8")
@pytest.mark.parametrize("way", ["poll", "batches"])
def test_of_a_topic_made_anew_nothing_old_is_handed_out_and_no_old_offset_counts(
    broker: Broker, cluster: Cluster, topic: MakeTopic, way: str
) -> None:
    name = topic()
    send(cluster, name, range(100), per_batch=100)
    told: list[Reset] = []

    def take(consumer: Consumer) -> list[int]:
        if way == "poll":
            return values(consumer.poll(10_000, max_records=10))
        rows = next(consumer.batches(("value",), batch_rows=10, timeout_ms=10_000))
        return [int(value.as_py()) for value in rows["value"]]

    with Consumer(name, bootstrap=broker.bootstrap, max_wait_ms=50, on_reset=told.append) as consumer:
        assert take(consumer) == list(range(10))
        operations.delete_topic(cluster, name)
        cluster.forget()
        operations.create_topic(cluster, name, partitions=1)
        send(cluster, name, range(500, 520))
        wait_for("the new topic to be noticed", lambda: told)
        assert take(consumer) == list(range(500, 510))
        assert told[0].offset == 10
        assert consumer.position(name, 0) == 10


@proves("R8")
def test_a_damaged_batch_is_told_with_its_place_and_others_are_read_on(fresh_broker: StartBroker) -> None:
    broker = fresh_broker()
    with Cluster(broker.bootstrap) as cluster:
        operations.create_topic(cluster, "spoilt", partitions=2)
        send(cluster, "spoilt", range(1000), 0)
        send(cluster, "spoilt", range(2000, 2100), 1)
    damage(broker, "spoilt-0", 7)
    for way in ("records", "batches", "priority"):
        header = "priority" if way == "priority" else None
        with Consumer("spoilt", bootstrap=broker.bootstrap, max_wait_ms=50, priority_header=header) as consumer:
            found, told = read_to_the_damage(consumer, arrow=way == "batches", whole=450)
            assert "spoilt-0 at offset 350" in told
            assert "CRC" in told
            assert sorted(found) == [*((0, n) for n in range(350)), *((1, n) for n in range(100))]
            assert consumer.position("spoilt", 0) == 350
            consumer.seek("spoilt", 0, 400)
            assert [record.offset for record in collect(consumer, 600)] == list(range(400, 1000))
    with Consumer("spoilt", bootstrap=broker.bootstrap, check_crc=False) as unchecked:
        assert len(collect(unchecked, 1100)) == 1100


def read_to_the_damage(consumer: Consumer, *, arrow: bool, whole: int) -> tuple[list[tuple[int, int]], str]:
    """Partitions and offsets of what could be read, and what was raised after so many."""
    found: list[tuple[int, int]] = []

    def more() -> str:
        try:
            if arrow:
                rows = next(consumer.batches(("partition", "offset"), timeout_ms=200), None)
                found.extend([(row["partition"], row["offset"]) for row in rows.to_pylist()] if rows else [])
            else:
                found.extend((record.partition, record.offset) for record in consumer.poll(timeout_ms=200))
        except CorruptBatch as error:
            return str(error) if len(found) == whole else ""
        return ""

    told = wait_for("what is whole, and then the error", more)
    return found, told


@pytest.mark.parametrize("priority_header", [None, "priority"])
def test_what_stands_before_a_damage_is_decoded(fresh_broker: StartBroker, priority_header: str | None) -> None:
    broker = fresh_broker()
    with Cluster(broker.bootstrap) as cluster:
        operations.create_topic(cluster, "decoded", partitions=1)
        send(cluster, "decoded", range(200))
    damage(broker, "decoded-0", 2)
    with Consumer(
        "decoded", bootstrap=broker.bootstrap, decoder=lambda value: int(value or b""), priority_header=priority_header
    ) as consumer:
        assert [record.value for record in consumer.poll(5000, max_records=1)] == [0]
        order = consumer._core.collector._order
        assert order is None or order._bytes >= sum(len(b"%d" % n) for n in range(100)), "counted, damage or not"
        assert [record.value for record in collect(consumer, 99)] == list(range(1, 100))
        with pytest.raises(CorruptBatch):
            consumer.poll(timeout_ms=5000)


def damage(broker: Broker, partition: str, nth: int) -> None:
    """Make the checksum of a batch wrong."""
    (log,) = broker.data.rglob(f"{partition}/*.log")
    content = log.read_bytes()
    at = sum(header.size_bytes for header, _ in list(batches(memoryview(content)))[:nth]) + CRC_AT
    with log.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
