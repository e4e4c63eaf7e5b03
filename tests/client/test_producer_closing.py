"""A producer that is closed, in time or not: every record is told its fate, and what was told stays true."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

import pytest

import headrace.aio
from brokers import Broker, wait_for
from client.reading_back import read_partition
from headrace.client.admin.cluster import Cluster
from headrace.client.errors import DeliveryUnknown, ForkedEngine, NotDelivered, ProducerClosed
from headrace.client.producer.producer import Producer
from headrace.errors import HeadraceError
from proving import proves

StartBroker = Callable[..., Broker]


def _lanes_of(producer: Producer) -> list[object]:
    """What is left in the lanes of a producer, to leave or to be answered."""
    return [
        batch
        for accumulator in producer._sender.accumulators()
        for topic in accumulator.own_router.topics
        for buffer in accumulator.buffers(topic)
        for batch in (*buffer.lane.waiting, *buffer.lane.in_flight)
    ]


@proves("R6")
def test_what_was_told_as_not_written_is_not_written_later(fresh_broker: StartBroker) -> None:
    broker = fresh_broker()
    with Producer(broker.bootstrap) as other:
        other.send("t", b"of the other", partition=0)
        producer, numbered = Producer(broker.bootstrap), Producer(broker.bootstrap, batch_bytes=200)
        numbered.send("t", b"first", partition=0)
        leader = other._pool.metadata.leader("t", 0)
        assert leader is not None
        connections = [each._pool.broker(leader) for each in (other, numbered)]
        broker.kill()
        # Of what is written to one that is not known to be lost, nobody knows the fate.
        wait_for("the connections to be lost", lambda: not any(each.is_open for each in connections))
        deliveries = [producer.send_async("t", b"%d" % number, partition=0) for number in range(3)]
        deliveries += [numbered.send_async("t", b"%d" % number + bytes(100), partition=0) for number in range(6)]
        for each in (producer, numbered):
            each.close(0.3)
            assert not _lanes_of(each)
            assert each.metrics()["queue_records"] == each.metrics()["queue_bytes"] == 0
        for delivery in deliveries:
            assert isinstance(delivery.exception(), NotDelivered)
            assert not isinstance(delivery.exception(), DeliveryUnknown)
        broker.restart()
        other.send("t", b"after", partition=0)
    with Cluster(broker.bootstrap) as cluster:
        assert [record.value for record in read_partition(cluster, "t", 0)] == [b"of the other", b"first", b"after"]


@proves("R6")
def test_ordered_records_left_at_a_close_fail_once_each(fresh_broker: StartBroker) -> None:
    broker = fresh_broker()
    producer = Producer(broker.bootstrap, batch_bytes=200)
    producer.send_ordered("t", b"first", b"k").result()
    broker.kill()
    deliveries = [producer.send_ordered("t", bytes(100), b"k") for _ in range(3)]
    wait_for("an attempt", lambda: producer.metrics()["retries"] or None)
    deliveries += [producer.send_ordered("t", bytes(100), b"k") for _ in range(3)]
    producer.close(0.1)
    assert all(isinstance(delivery.exception(), NotDelivered) for delivery in deliveries)
    metrics = producer.metrics()
    assert metrics["failed"] + metrics["unknown"] == 6
    assert metrics["queue_records"] == metrics["queue_bytes"] == 0


@proves("R6")
@pytest.mark.parametrize("acks", [-1, 0, 1])
def test_a_closed_producer_takes_no_record_under_any_acks(broker: Broker, acks: int) -> None:
    with Producer(broker.bootstrap):
        producer = Producer(broker.bootstrap)
        producer.send("closed", b"v")
        producer.close()
        with pytest.raises(ProducerClosed):
            producer.send_async("closed", b"late", acks=acks)
        with pytest.raises(ProducerClosed):
            producer.send_oneway("closed", b"late")
        with pytest.raises(ProducerClosed):
            producer.send_ordered("closed", b"late", b"k", acks=acks)


@proves("R6")
def test_a_record_that_is_encoded_while_its_producer_is_closed_is_refused(broker: Broker) -> None:
    encoding, closed = threading.Event(), threading.Event()

    def encode(value: bytes) -> bytes:
        if value == b"slow":
            encoding.set()
            assert closed.wait(30.0)
        return value

    heard: list[BaseException | None] = []

    def send() -> None:
        try:
            producer.send_async("closed", b"slow")
        except ProducerClosed as error:
            heard.append(error)

    with Producer(broker.bootstrap):
        producer = Producer(broker.bootstrap, encoder=encode)
        producer.send("closed", b"v")
        sending = threading.Thread(target=send)
        sending.start()
        assert encoding.wait(30.0)
        producer.close()
        closed.set()
        sending.join(30.0)
    assert len(heard) == 1
    assert producer.metrics()["queue_records"] == 0


@proves("R6")
def test_an_interrupted_close_tells_what_is_left_over(fresh_broker: StartBroker) -> None:
    broker = fresh_broker()
    with Producer(broker.bootstrap) as other:
        other.send("t", b"of the other")
        producer = Producer(broker.bootstrap)
        producer.send("t", b"first")
        broker.kill()
        told = threading.Event()
        delivery = producer.send_async("t", b"left", callback=lambda _: told.set())
        threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            producer.close()
        assert isinstance(delivery.exception(5.0), NotDelivered)
        assert told.wait(5.0)
        producer.close()
        other.close(0.0)


@proves("R6")
def test_a_cancelled_close_tells_what_is_left_over(fresh_broker: StartBroker) -> None:
    broker = fresh_broker()

    async def go() -> None:
        producer = headrace.aio.Producer(broker.bootstrap)
        await producer.send("t", b"first")
        broker.kill()
        known, unknown = producer.send_async("t", b"left"), producer.send_async("not known", b"left")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(producer.close(), 0.2)
        for delivery in (known, unknown):
            with pytest.raises(HeadraceError, match="closed"):
                await asyncio.wait_for(delivery, 5.0)
        await producer.close()

    asyncio.run(go())


@proves("R6")
def test_a_send_in_a_forked_child_is_refused(broker: Broker) -> None:
    with Producer(broker.bootstrap, interval_ms=3_600_000) as producer:
        producer.send("forked", b"v")
        producer.send_async("forked", b"of the parent")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                producer.send_async("forked", b"of the child")
            except ForkedEngine:
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
