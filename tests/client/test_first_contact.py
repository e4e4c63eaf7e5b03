"""Before any broker has answered: it is waited for as long as the timeouts say, then told where and for how long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import headrace
from brokers import Broker, free_port, wait_for
from headrace import aio
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.errors import NoBroker
from proving import proves

LONG_MS = 600_000
"""Longer than a test may take: what ends before it did not wait."""
TOLD = r"no broker answers at {} \(tried for \d+\.\d s\); start a broker with `headrace serve`"


@pytest.fixture
def nowhere() -> str:
    return f"127.0.0.1:{free_port()}"


@proves("U2")
def test_what_was_asked_before_the_broker_came_up_is_done_when_it_does(
    fresh_broker: Callable[..., Broker], caplog: pytest.LogCaptureFixture
) -> None:
    broker = fresh_broker()
    at = broker.bootstrap
    broker.kill()

    def sent() -> int:
        with headrace.Producer(at, client_id="one") as producer:
            return producer.send("early", b"one").partition

    def sent_async() -> int:
        with headrace.Producer(at, client_id="two") as producer:
            return producer.send_async("early", b"two").result(60).partition

    async def sent_on_asyncio() -> int:
        async with aio.Producer(at, client_id="three") as producer:
            delivery = producer.send_async("early", b"three")
            assert not delivery.done
            return (await delivery).partition

    def read(group: str | None) -> set[bytes]:
        found: set[bytes] = set()
        with headrace.Consumer("early", bootstrap=at, group=group, client_id=f"reader {group}") as consumer:
            deadline = time.monotonic() + 60
            while len(found) < 3 and time.monotonic() < deadline:
                try:
                    found.update(record.value for record in consumer.poll(timeout_ms=200))
                except headrace.UnknownTopic:
                    continue
        return found

    def listed() -> int:
        with Cluster(at) as cluster:
            return len(cluster.topology([]).brokers)

    waiting = [sent, sent_async, lambda: asyncio.run(sent_on_asyncio()), lambda: read(None), lambda: read("g"), listed]
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(len(waiting)) as threads:
        begun = [threads.submit(each) for each in waiting]
        said = f"still waiting for a first answer: no broker answers at {at}"
        wait_for("all to wait", lambda: sum(said in line for line in caplog.messages) >= len(waiting))
        broker.start()
        values = {b"one", b"two", b"three"}
        assert [each.result() for each in begun] == [0, 0, 0, values, values, 1]
    assert sum(said in line for line in caplog.messages) == len(waiting), "once for each"


@proves("U2")
def test_a_send_gives_up_when_its_delivery_timeout_is_over(nowhere: str) -> None:
    async def on_asyncio() -> None:
        async with aio.Producer(nowhere, delivery_timeout_ms=200) as producer:
            with pytest.raises(NoBroker, match=TOLD.format(nowhere)):
                await producer.send("t", b"v")
            with pytest.raises(NoBroker, match=f"no broker answers at {nowhere}"):
                await producer.send_async("t", b"v")

    with headrace.Producer(nowhere, delivery_timeout_ms=200) as producer:
        begun = time.monotonic()
        with pytest.raises(NoBroker, match=TOLD.format(nowhere)):
            producer.send("t", b"v")
        assert time.monotonic() - begun >= 0.2
        with pytest.raises(NoBroker, match=f"no broker answers at {nowhere}"):
            producer.send_async("t", b"v")
    asyncio.run(on_asyncio())


@proves("U2")
@pytest.mark.parametrize("group", [None, "g"])
def test_a_consumer_has_nothing_until_its_timeout_is_over_then_it_says_why(nowhere: str, group: str | None) -> None:
    with headrace.Consumer("t", bootstrap=nowhere, group=group, timeout_ms=LONG_MS) as consumer:
        assert consumer.poll(timeout_ms=100) == []
    with headrace.Consumer("t", bootstrap=nowhere, group=group, timeout_ms=200) as consumer:
        for _ in range(2):
            with pytest.raises(NoBroker, match=f"no broker answers at {nowhere} .*tried for"):
                consumer.poll(timeout_ms=LONG_MS)
        with pytest.raises(NoBroker, match=f"no broker answers at {nowhere}"):
            consumer.position("t", 0)

    async def on_asyncio() -> None:
        async with aio.Consumer("t", bootstrap=nowhere, group=group, timeout_ms=200) as consumer:
            with pytest.raises(NoBroker, match=TOLD.format(nowhere)):
                await consumer.poll(timeout_ms=LONG_MS)

    asyncio.run(on_asyncio())


@proves("U2")
def test_blocking_calls_give_up_when_their_timeout_is_over(nowhere: str) -> None:
    both = f"127.0.0.1:1,{nowhere}"
    told = rf"no broker answers at 127\.0\.0\.1:1; {TOLD.format(nowhere)}"
    with Cluster(both, retry=Retry(within_ms=200)) as cluster, pytest.raises(NoBroker, match=told):
        cluster.topology()
    with pytest.raises(NoBroker, match=TOLD.format(nowhere)):
        headrace.read(nowhere, "t", 0, 0, 1, timeout_ms=200)


@proves("U2")
def test_what_waiting_does_not_mend_is_told_at_once() -> None:
    wrong = "nowhere.invalid:9092"
    told = r"cannot connect to nowhere\.invalid:9092: the name cannot be looked up"
    with headrace.Producer(wrong, delivery_timeout_ms=LONG_MS) as producer, pytest.raises(NoBroker, match=told):
        producer.send("t", b"v")
    with headrace.Consumer("t", bootstrap=wrong, timeout_ms=LONG_MS) as consumer, pytest.raises(NoBroker, match=told):
        consumer.poll(timeout_ms=LONG_MS)
    with Cluster(wrong, retry=Retry(within_ms=LONG_MS)) as cluster, pytest.raises(NoBroker, match=told) as raised:
        cluster.topology()
    assert "headrace serve" not in str(raised.value)
