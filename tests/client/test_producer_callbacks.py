"""Callbacks of a producer: on a thread of their own, so that they may take what a sender holds, be slow, close."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from brokers import Broker, wait_for
from client.conftest import MakeTopic
from headrace.client.producer.producer import Producer
from headrace.records.builder import Delivery
from proving import proves

WAIT_S = 30.0


@pytest.fixture
def producer(broker: Broker) -> Iterator[Producer]:
    with Producer(broker.bootstrap, client_id="telling", interval_ms=1, delivery_timeout_ms=30_000) as made:
        yield made


@proves("R6")
def test_a_callback_may_take_a_lock_that_is_held_while_sending(producer: Producer, topic: MakeTopic) -> None:
    name, held, told = topic(), threading.Lock(), list[Delivery]()

    def callback(delivery: Delivery) -> None:
        with held:
            told.append(delivery)

    def work() -> None:
        for _ in range(100):
            producer.send_async(name, b"x", callback=callback)
            with held:
                producer.send(name, b"y")

    sending = threading.Thread(target=work, daemon=True)
    sending.start()
    sending.join(WAIT_S)
    assert not sending.is_alive()
    wait_for("the callbacks", lambda: len(told) == 100)


@proves("R6")
def test_a_callback_that_does_not_end_holds_up_no_sender(producer: Producer, topic: MakeTopic) -> None:
    name, release, callers = topic(), threading.Event(), set[threading.Thread]()

    def callback(_: Delivery) -> None:
        callers.add(threading.current_thread())
        release.wait(WAIT_S)

    deliveries = [producer.send_async(name, b"x", callback=callback) for _ in range(20)]
    reports = [producer.send(name, b"y") for _ in range(20)]
    assert [delivery.result().offset for delivery in deliveries] + [report.offset for report in reports] == list(
        range(40)
    )
    assert not release.is_set()
    release.set()
    assert producer._driver.reactor.wait_callbacks(producer._driver.reactor.now() + WAIT_S)
    assert len(callers) == 1
    assert threading.current_thread() not in callers


def test_closing_waits_for_callbacks_unless_one_closes(broker: Broker, topic: MakeTopic) -> None:
    name, told = topic(), list[str]()
    with Producer(broker.bootstrap, client_id="kept"), Producer(broker.bootstrap, client_id="kept") as shares:
        shares.send_async(name, b"x", callback=lambda _: told.append("shared"))
        shares.close()
        assert told == ["shared"]
    alone = Producer(broker.bootstrap, client_id="alone")

    def close(_: Delivery) -> None:
        told.append("alone")
        alone.close()

    alone.send_async(name, b"x", callback=close)
    alone.send_async(name, b"x", callback=lambda _: told.append("last"))
    wait_for("the callbacks", lambda: len(told) == 3)
    assert told == ["shared", "alone", "last"]
    alone.close()
