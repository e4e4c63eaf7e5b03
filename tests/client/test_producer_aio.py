"""The producer for asyncio, on asyncio's own loop and on uvloop."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from brokers import Broker
from client.conftest import MakeTopic
from client.reading_back import read_partition, read_topic
from headrace.aio import Delivery, NotDelivered, Producer, QueueFull
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.errors import NoBroker, ProducerClosed, UnknownTopic
from headrace.errors import HeadraceError, InvalidRecord, RequestTimedOut
from proving import proves

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run(coroutine: Coroutine[Any, Any, None], loop_factory: LoopFactory | None = None) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(coroutine)


@proves("R6", "J8")
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_sends_are_awaited_told_to_callbacks_and_flushed(
    broker: Broker, cluster: Cluster, topic: MakeTopic, loop_factory: LoopFactory
) -> None:
    name = topic(partitions=2)

    async def go() -> None:
        heard: list[Delivery] = []
        async with Producer(broker.bootstrap) as producer:
            early = [producer.send_async(name, b"%d" % nth, partition=0, callback=heard.append) for nth in range(50)]
            report = await producer.send(name, b"50", partition=0)
            assert report[:3] == (name, 0, 50)
            assert [(await delivery).offset for delivery in early] == list(range(50))
            assert heard == early
            more = [producer.send_async(name, b"%d" % nth, key=b"k") for nth in range(1_000)]
            await producer.flush(20.0)
            assert all(delivery.done for delivery in more)
            ordered = [producer.send_ordered(name, b"o%d" % nth, b"k") for nth in range(10)]
            producer.send_oneway(name, b"x")
            reports = [await delivery for delivery in ordered]
            assert [report.offset for report in reports] == sorted(report.offset for report in reports)
            assert len({report.partition for report in reports}) == 1
            with pytest.raises(RuntimeError, match="await"):
                producer.send_async(name, b"y").result()

    run(go(), loop_factory)
    assert [record.value for record in read_partition(cluster, name, 0)][:51] == [b"%d" % nth for nth in range(51)]
    assert sum(map(len, read_topic(cluster, name).values())) == 51 + 1_000 + 10 + 2


def test_records_for_a_topic_not_known_yet_keep_their_order(broker: Broker, cluster: Cluster) -> None:
    async def go() -> None:
        async with Producer(broker.bootstrap, interval_ms=0) as producer:
            deliveries = [producer.send_async("aio-made-here", b"%d" % nth, key=b"k") for nth in range(20)]
            last = await producer.send("aio-made-here", b"20", key=b"k")
            reports = [await delivery for delivery in deliveries]
            assert [report.offset for report in reports] == list(range(reports[0].offset, last.offset))
            refused = producer.send_async("no name", b"v")
            with pytest.raises(HeadraceError, match="no name"):
                await refused
            with pytest.raises(UnknownTopic, match="no partition 77"):
                await producer.send("aio-made-here", b"v", partition=77)

    run(go())


@proves("J8")
def test_a_full_queue_is_waited_for_or_told(broker: Broker, topic: MakeTopic) -> None:
    name = topic()

    async def go() -> None:
        async with Producer(broker.bootstrap, queue_records=10, interval_ms=3_600_000) as producer:
            await producer.send(name, b"first")
            waiting = [producer.send_async(name, b"v") for _ in range(10)]
            with pytest.raises(QueueFull, match="await"):
                producer.send_async(name, b"one too many")
            more = await asyncio.gather(*(producer.send(name, b"w") for _ in range(50)))
            assert sorted(report.offset for report in more)[-1] == 60
            assert all(delivery.done for delivery in waiting)
        async with Producer(broker.bootstrap, queue_records=1, interval_ms=3_600_000, when_full=0) as producer:
            kept = [producer.send_async(name, b"v") for _ in range(2)]
            await producer.flush(20.0)
            assert kept[0].exception() is None
            dropped = [producer.send_async(name, b"v") for _ in range(2)]
            with pytest.raises(QueueFull):
                await dropped[1]
            assert producer.metrics()["dropped"] >= 1

    run(go())


def test_a_close_that_takes_too_long_gives_up_what_is_left(fresh_broker: Callable[..., Broker]) -> None:
    broker = fresh_broker()

    async def go() -> None:
        producer = Producer(broker.bootstrap)
        await producer.send("closing", b"v")
        broker.kill()
        delivery = producer.send_async("closing", b"v")
        with pytest.raises(RequestTimedOut, match="1 records"):
            await producer.flush(0.1)
        await producer.close(0.1)
        with pytest.raises(NotDelivered, match="closed"):
            await delivery
        with pytest.raises(ProducerClosed):
            await producer.send("closing", b"v")
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    run(go())


@proves("G17")
def test_a_topic_that_grows_is_used_whole_by_coroutines(broker: Broker, cluster: Cluster, topic: MakeTopic) -> None:
    name = topic(partitions=1)

    async def go() -> None:
        async with Producer(broker.bootstrap) as producer:
            await producer.send(name, b"v")
            await asyncio.to_thread(operations.create_partitions, cluster, name, 3)
            assert (await producer.send(name, b"v", partition=2)).partition == 2

    run(go())


@proves("J8")
@pytest.mark.parametrize("interval_ms", [0, 5])
def test_an_encoder_runs_once_for_a_record_of_a_topic_not_known_yet(
    broker: Broker, cluster: Cluster, interval_ms: int
) -> None:
    """And at once: what is done to a value after the call is not sent."""
    names = [f"encoded-{uuid.uuid4().hex}" for _ in range(3)]
    encoded: list[int] = []

    def encode(value: list[int]) -> bytes:
        encoded.append(value[0])
        return b"%d" % value[0]

    async def go() -> None:
        async with Producer(broker.bootstrap, encoder=encode, interval_ms=interval_ms) as producer:
            values = [[nth] for nth in range(6)]
            deliveries = [producer.send_async(names[0], value) for value in values[:3]]
            deliveries += [producer.send_ordered(names[1], value, b"k") for value in values[3:5]]
            sending = asyncio.create_task(producer.send(names[2], values[5]))
            await asyncio.sleep(0)
            for value in values:
                value[0] = 99
            for delivery in deliveries:
                await delivery
            await sending

    run(go())
    assert encoded == list(range(6))
    found = [record.value for name in names for records in read_topic(cluster, name).values() for record in records]
    assert found == [b"%d" % nth for nth in range(6)]


@proves("G17")
def test_a_record_that_cannot_be_sent_fails_alone_among_those_set_aside(broker: Broker) -> None:
    async def go() -> None:
        async with Producer(broker.bootstrap) as producer:
            name = f"aside-{uuid.uuid4().hex}"
            first, wrong, last = (producer.send_async(name, value) for value in (b"0", 123, b"2"))
            assert (await first).offset == 0
            with pytest.raises(InvalidRecord, match="not int"):
                await wrong
            assert (await last).offset == 1

    run(go())


@proves("G17")
def test_records_set_aside_for_a_topic_nobody_tells_of_fail_together() -> None:
    """Each after its own time: one after the other they would take ten times as long as is waited for them here."""

    async def go(port: int) -> None:
        producer = Producer(f"127.0.0.1:{port}", delivery_timeout_ms=500, client_id="nobody answers")
        waiting = [asyncio.create_task(producer.send("x", b"v")) for _ in range(50)]
        aside = [producer.send_async("x", b"v") for _ in range(50)]
        async with asyncio.timeout(5.0):
            told = await asyncio.gather(*waiting, *aside, return_exceptions=True)
        assert [type(error) for error in told] == [NoBroker] * 100
        await producer.close(0.0)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        run(go(silent.getsockname()[1]))
