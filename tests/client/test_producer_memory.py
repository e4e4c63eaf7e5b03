"""What a producer keeps of records that were acknowledged: nothing, whoever else waits, whatever the caller keeps."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from brokers import Broker, wait_for
from client.conftest import MakeTopic
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.errors import QueueFull
from headrace.client.producer.accumulator import ProducerBatch
from headrace.client.producer.producer import Producer
from headrace.records.builder import Delivery
from proving import proves

MakeProducer = Callable[..., Producer]


@pytest.fixture
def producing(broker: Broker) -> Iterator[MakeProducer]:
    made: list[Producer] = []

    def make(**options: object) -> Producer:
        made.append(Producer(broker.bootstrap, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for producer in made:
        producer.close(1.0)


def _batches_kept(producer: Producer) -> int:
    gc.collect()
    return sum(
        isinstance(each, ProducerBatch) and each.buffer.accumulator.sender is producer._sender
        for each in gc.get_objects()
    )


@proves("R6")
@pytest.mark.parametrize("stuck", ["its interval", "its topic"])
def test_a_batch_that_waits_keeps_none_behind_it_in_memory(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic, stuck: str
) -> None:
    name, gone = topic(partitions=2), topic()
    producer = producing(batch_bytes=1_000, interval_ms=3_600_000)
    if stuck == "its topic":
        producer.send(gone, b"v")
        operations.delete_topic(cluster, gone)
        waits = producer.send_async(gone, bytes(2_000))
    else:
        waits = producer.send_async(name, b"v", partition=1)
    for _ in range(200):
        producer.send_async(name, bytes(900), partition=0)
    producer.send(name, b"last", partition=0)
    assert not waits.done
    assert wait_for("the rest", lambda: producer.metrics()["queue_records"] == 1 or None)
    assert _batches_kept(producer) <= 5


@proves("R6")
def test_a_delivery_that_is_kept_keeps_no_bytes(producing: MakeProducer, topic: MakeTopic) -> None:
    name = topic()
    producer = producing(batch_bytes=1_000)
    deliveries = [producer.send_async(name, bytes(900)) for _ in range(100)]
    producer.flush(30.0)
    assert _batches_kept(producer) <= 5
    assert [delivery.result().offset for delivery in deliveries] == list(range(100))


@proves("J8")
def test_records_whose_callbacks_have_not_run_fill_the_queue(producing: MakeProducer, topic: MakeTopic) -> None:
    name = topic()
    producer = producing(batch_bytes=1_000, queue_records=100, when_full=0, interval_ms=1)
    producer.send(name, b"v")
    go_on = threading.Event()
    told: list[Delivery] = []

    def callback(delivery: Delivery) -> None:
        assert go_on.wait(30.0)
        told.append(delivery)

    for _ in range(100):
        producer.send_async(name, bytes(100), callback=callback)
    wait_for("acknowledgements", lambda: producer.metrics()["delivered"] == 101 or None)
    assert producer.metrics()["queue_records"] == 100
    assert isinstance(producer.send_async(name, b"one more").exception(), QueueFull)
    go_on.set()
    wait_for("room", lambda: producer.metrics()["queue_records"] == 0 or None)
    assert len(told) == 100
    assert producer.send(name, b"one more").offset == 101


@proves("J8")
@pytest.mark.parametrize("when_full", [-1, 0])
def test_a_callback_that_sends_into_a_full_queue_does_not_wait_for_itself(
    producing: MakeProducer, topic: MakeTopic, when_full: int
) -> None:
    name = topic()
    producer = producing(batch_bytes=1_000, queue_records=20, when_full=when_full, interval_ms=1)
    producer.send(name, b"v")
    ended = threading.Event()

    def again(delivery: Delivery, left: int) -> None:
        if left:
            producer.send_async(name, bytes(100), callback=partial(again, left=left - 1))
            producer.send_async(name, bytes(100), callback=lambda _: None)
        else:
            ended.set()

    for _ in range(20):
        producer.send_async(name, bytes(100), callback=partial(again, left=20))
    assert ended.wait(30.0)
    producer.flush(30.0)
