"""What a producer keeps of records that were acknowledged: nothing, whoever else waits, whatever the caller keeps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from brokers import Broker, wait_for
from client.conftest import MakeTopic
from headrace.client import admin
from headrace.client.cluster import Cluster
from headrace.client.sending.producer import Producer
from headrace.client.sending.track import Load
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
    return sum(isinstance(each, Load) and each.track.desk.sender is producer._sender for each in gc.get_objects())


@proves("R6")
@pytest.mark.parametrize("stuck", ["its interval", "its topic"])
def test_a_batch_that_waits_keeps_none_behind_it_in_memory(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic, stuck: str
) -> None:
    name, gone = topic(partitions=2), topic()
    producer = producing(batch_bytes=1_000, interval_ms=3_600_000)
    if stuck == "its topic":
        producer.send(gone, b"v")
        admin.delete_topic(cluster, gone)
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
