"""Batches that their topic refuses for their size: divided, in order, each record told where it is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from brokers import Broker
from client.conftest import MakeTopic
from client.producer_account import NumberedLoad, check, told
from client.reading_back import read_partition, read_topic
from client.wire_tap import Seen, WireTap
from headrace import aio
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Position, fetch
from headrace.client.errors import DeliveryUnknown, NotDelivered
from headrace.client.fetch_requests import FetchLimits
from headrace.client.producer.producer import Producer
from headrace.records.builder import Delivery
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

MakeProducer = Callable[..., Producer]
TIMED_OUT = 7
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


@pytest.fixture
def producing(broker: Broker) -> Iterator[MakeProducer]:
    made: list[Producer] = []

    def make(**options: object) -> Producer:
        given = {"bootstrap": broker.bootstrap, "delivery_timeout_ms": 30_000, **options}
        made.append(Producer(**given))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for producer in made:
        producer.close(10.0)


def limit(cluster: Cluster, topic: str, size_bytes: int) -> None:
    operations.alter_configs(cluster, "topic", topic, values={"max.message.bytes": str(size_bytes)})


def batch_sizes(cluster: Cluster, topic: str, from_offset: int) -> list[int]:
    (fetched,) = fetch(cluster, [Position(topic, 0, from_offset)], FetchLimits(max_wait_ms=100))
    return [header.size_bytes for header, _ in fetched.whole_batches()]


@proves("R6", "J10")
@pytest.mark.parametrize("codec", CODECS)
def test_a_batch_above_the_topics_limit_is_divided_and_each_record_is_where_its_report_says(
    codec: str, producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(max_message_bytes=2_000)
    producer = producing(codec=codec, interval_ms=3_600_000)
    heard: list[Delivery] = []
    values = [b"%d " % nth * (1 + nth % 60) for nth in range(400)]
    deliveries = [
        producer.send_async(
            name, value, headers=[("nth", value[:3])], timestamp_ms=5_000 + 7 * nth, callback=heard.append
        )
        for nth, value in enumerate(values)
    ]
    producer.flush(20.0)
    log = read_partition(cluster, name, 0)
    assert [record.value for record in log] == values
    assert [(delivery.result().offset, delivery.result().timestamp_ms) for delivery in deliveries] == [
        (nth, 5_000 + 7 * nth) for nth in range(400)
    ]
    assert [(record.timestamp_ms, record.headers) for record in log] == [
        (5_000 + 7 * nth, [("nth", value[:3])]) for nth, value in enumerate(values)
    ]
    assert heard == deliveries
    counted = producer.metrics()
    assert counted["splits"] > 0
    assert (counted["renewals"], counted["failed"], counted["delivered"]) == (0, 0, 400)
    assert (counted["queue_records"], counted["queue_bytes"]) == (0, 0)


@proves("R6", "J10")
def test_a_limit_lowered_while_records_are_sent_costs_no_record_and_no_order(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(partitions=2)
    producer = producing(batch_bytes=16_000, interval_ms=50)
    load = NumberedLoad(producer, name, seed=7, pause_s=0.00005)
    sizes = (4_000, 300, 1_000_000, 150, 1_000)
    for nth, size_bytes in enumerate(sizes):
        _at_least(load, 400 * (nth + 1))
        limit(cluster, name, size_bytes)
    _at_least(load, 400 * (len(sizes) + 1))
    load.finish(30.0)
    assert all(delivery.exception() is None for _, _, delivery in load.deliveries)
    log = read_topic(cluster, name)
    check(told(load.deliveries), log)
    assert sum(map(len, log.values())) == len(load.deliveries)
    counted = producer.metrics()
    assert counted["splits"] > 0
    assert (counted["renewals"], counted["queue_records"], counted["queue_bytes"]) == (0, 0, 0)


def _at_least(load: NumberedLoad, count: int) -> None:
    pause = threading.Event()
    for _ in range(3_000):
        if load.acknowledged >= count:
            return
        pause.wait(0.01)
    raise AssertionError(f"{load.acknowledged} of {count} records acknowledged")


def test_batches_become_as_small_as_the_topic_takes_them(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(max_message_bytes=1_000)
    producer = producing(interval_ms=3_600_000)
    for _ in range(400):
        producer.send_async(name, b"x" * 100)
    producer.flush(20.0)
    before = producer.metrics()["splits"]
    for _ in range(400):
        producer.send_async(name, b"x" * 100)
    producer.flush(20.0)
    assert producer.metrics()["splits"] == before
    assert max(batch_sizes(cluster, name, 400)) <= 1_000


def test_a_record_too_large_for_its_topic_fails_alone_and_says_what_to_do(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(max_message_bytes=2_000)
    producer = producing(interval_ms=3_600_000)
    deliveries = [producer.send_async(name, b"x" * (5_000 if nth in (10, 29) else 300)) for nth in range(30)]
    producer.flush(20.0)
    errors = {nth: delivery.exception() for nth, delivery in enumerate(deliveries) if delivery.exception()}
    assert list(errors) == [10, 29]
    for error in errors.values():
        assert isinstance(error, NotDelivered)
        assert not isinstance(error, DeliveryUnknown)
        assert error.kafka_code == 10
        assert "1 records" in str(error)
        assert "raise max.message.bytes" in str(error)
    assert [len(record.value or b"") for record in read_partition(cluster, name, 0)] == [300] * 28
    assert [delivery.result().offset for nth, delivery in enumerate(deliveries) if nth not in errors] == list(range(28))
    assert producer.metrics()["queue_bytes"] == 0


@pytest.mark.parametrize("acks", [-1, 1])
def test_ordered_records_keep_their_order_when_divided_and_none_overtakes_one_too_large(
    acks: int, producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(max_message_bytes=2_000)
    producer = producing(interval_ms=3_600_000, acks=acks)
    deliveries = {
        (key, nth): producer.send_ordered(
            name, b"%d-%d " % (key, nth) + b"x" * (3_000 if (key, nth) == (1, 5) else 100), b"key-%d" % key
        )
        for nth in range(40)
        for key in range(4)
    }
    producer.flush(20.0)
    log = read_partition(cluster, name, 0)
    placed = {bytes(record.value or b"").split()[0]: record.offset for record in log}
    for (key, nth), delivery in deliveries.items():
        if key == 1 and nth >= 5:
            error = delivery.exception()
            assert isinstance(error, NotDelivered)
            assert ("max.message.bytes" if nth == 5 else "earlier one of the same order key") in str(error)
            assert b"%d-%d" % (key, nth) not in placed
        else:
            assert placed[b"%d-%d" % (key, nth)] == delivery.result().offset
    for key in range(4):
        offsets = [placed[b"%d-%d" % (key, nth)] for nth in range(5 if key == 1 else 40)]
        assert offsets == sorted(offsets)
    assert producer.metrics()["queue_bytes"] == 0


def test_divided_batches_on_asyncio(broker: Broker, cluster: Cluster, topic: MakeTopic) -> None:
    name = topic(max_message_bytes=1_000)

    async def main() -> list[int]:
        async with aio.Producer(broker.bootstrap, interval_ms=50) as producer:
            deliveries = [producer.send_async(name, b"%d" % nth * 40) for nth in range(100)]
            reports = await asyncio.gather(*deliveries)
            assert producer.metrics()["splits"] > 0
            return [report.offset for report in reports]

    assert asyncio.run(main()) == list(range(100))
    assert [record.value for record in read_partition(cluster, name, 0)] == [b"%d" % nth * 40 for nth in range(100)]


@proves("R6", "J10")
@pytest.mark.parametrize("ordered", [False, True])
def test_a_batch_that_may_be_written_and_is_then_too_large_is_not_written_twice(ordered: bool, tap: WireTap) -> None:
    name = f"unsure-{ordered}"
    with Cluster(tap.address) as cluster:
        operations.create_topic(cluster, name, partitions=1)
    lowered: list[Seen] = []

    def change(seen: Seen, answer: Message) -> None:
        if seen.api_key == apis.PRODUCE and seen.body.acks == -1 and not lowered:
            lowered.append(seen)
            answer.responses[0].partition_responses[0].error_code = TIMED_OUT
            with Cluster("{}:{}".format(*tap.upstream)) as cluster:
                limit(cluster, name, 1_000)

    def send(value: bytes) -> Delivery:
        key = b"key-%d" % (len(value) % 3)
        return producer.send_ordered(name, value, key) if ordered else producer.send_async(name, value)

    with Producer(
        tap.address, client_id=f"unsure {ordered}", interval_ms=3_600_000, delivery_timeout_ms=30_000
    ) as producer:
        send(b"first")
        producer.flush(20.0)
        tap.change = change
        deliveries = [send(b"%d" % nth * 60) for nth in range(40)]
        producer.flush(20.0)
        assert all(isinstance(delivery.exception(), DeliveryUnknown) for delivery in deliveries)
        tap.change = lambda seen, answer: None
        after = send(b"after")
        producer.flush(20.0)
        assert producer.metrics()["queue_bytes"] == 0
    with Cluster(tap.address) as cluster:
        log = read_partition(cluster, name, 0)
    assert [record.value for record in log] == [b"first", *(b"%d" % nth * 60 for nth in range(40)), b"after"]
    assert after.result().offset == 41
