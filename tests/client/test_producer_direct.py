"""A record that is waited for, alone on its way: what it saves, and what becomes of it when it is not left alone."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from brokers import Broker, Brokers, wait_for
from client.conftest import MakeTopic
from client.reading_back import read_partition
from client.wire_tap import Seen, WireTap
from headrace.client.admin.cluster import Cluster
from headrace.client.connection import thread_reactor
from headrace.client.connection.broker_connection import BrokerConnection
from headrace.client.connection.stream import FrameReader
from headrace.client.errors import CalledWithin, DeliveryUnknown, ForkedEngine, NotDelivered
from headrace.client.producer.producer import Producer
from headrace.client.producer.request import ProduceTemplate
from headrace.errors import ErrorCode, HeadraceError
from headrace.ports.network import Address
from headrace.records.buffers import BufferPool
from headrace.records.builder import Delivery
from headrace.wire import api as apis
from headrace.wire.codec import encode_response, write_response
from headrace.wire.message import Message
from proving import proves

TOO_LARGE = 10


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits alone does so until something happens."""
    monkeypatch.setattr(thread_reactor, "DOZE_S", 30.0)


@pytest.fixture
def held(tap: WireTap) -> Iterator[threading.Event]:
    """Answers to Produce that are held back until it is set; it is to begin with."""
    go = threading.Event()
    go.set()

    def hold(seen: Seen, answer: Message) -> None:
        if seen.api_key == apis.PRODUCE:
            go.wait(30)

    tap.change = hold
    yield go
    go.set()


@pytest.fixture
def producer(tap: WireTap) -> Iterator[Producer]:
    with Producer(tap.address, client_id="direct", delivery_timeout_ms=20_000) as made:
        yield made


def values(tap: WireTap, topic: str) -> list[bytes]:
    with Cluster(tap.address) as cluster:
        return [record.value or b"" for record in read_partition(cluster, topic, 0)]


def on_the_wire(tap: WireTap, count: int) -> None:
    wait_for(f"{count} requests", lambda: len(tap.of(apis.PRODUCE)) >= count or None, pause_s=0.001)


@proves("R6")
@pytest.mark.parametrize("options", [{}, {"acks": 1}, {"codec": "zstd"}, {"idempotent": False}], ids=str)
def test_a_record_alone_takes_the_direct_way(
    options: dict[str, object], broker: Broker, cluster: Cluster, topic: MakeTopic, patient: None
) -> None:
    name = topic()
    with Producer(broker.bootstrap, **options) as producer:  # type: ignore[arg-type]
        reports = [
            producer.send(name, b"%d" % nth, key=b"k", headers=[("h", b"%d" % nth)], timestamp_ms=1_000 + nth)
            for nth in range(50)
        ]
        metrics = producer.metrics()
    assert [report.offset for report in reports] == list(range(50))
    assert [report.timestamp_ms for report in reports] == list(range(1_000, 1_050))
    # The first has to find its partition, and a timer or two may be due meanwhile.
    assert metrics["direct"] >= 40
    assert metrics["delivered"] == metrics["requests"] == metrics["batches"] == 50
    assert metrics["queue_records"] == metrics["queue_bytes"] == 0
    for nth, record in enumerate(read_partition(cluster, name, 0)):
        assert (record.value, record.timestamp_ms) == (b"%d" % nth, 1_000 + nth)
        assert list(record.headers) == [("h", b"%d" % nth)]


def test_a_producer_that_asks_for_no_answer_does_not_wait_for_one(
    broker: Broker, cluster: Cluster, topic: MakeTopic, patient: None
) -> None:
    name = topic()
    with Producer(broker.bootstrap, acks=0, request_timeout_ms=60_000) as producer:
        assert [producer.send(name, b"%d" % nth, partition=0).offset for nth in range(20)] == [-1] * 20
        assert producer.metrics()["direct"] == 0
    wait_for("all of them", lambda: len(read_partition(cluster, name, 0)) == 20)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("waiting", [True, False])
def test_code_that_interrupts_a_send_does_not_take_its_place(
    waiting: bool, written: bool, broker: Broker, cluster: Cluster, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler of a signal that is not held off, just before or after the record is written."""
    name, said = topic(), list[object]()
    send_alone = BrokerConnection.send_alone
    with Producer(broker.bootstrap, interval_ms=0) as producer:

        def handle(*_: object) -> None:
            try:
                send = producer.send if waiting else producer.send_async
                said.append(send(name, b"inner", partition=0))
            except HeadraceError as error:
                said.append(error)

        def interrupted(connection: BrokerConnection, *arguments: Any) -> Any:
            found = send_alone(connection, *arguments) if written else None
            if not said:
                signal.raise_signal(signal.SIGUSR1)
            return found if written else send_alone(connection, *arguments)

        before, sent = signal.signal(signal.SIGUSR1, handle), list[bytes]()
        monkeypatch.setattr(BrokerConnection, "send_alone", interrupted)
        try:
            while not said:  # one that finds a timer due takes the other way
                assert producer.send(name, b"%d" % len(sent), partition=0).offset == len(sent)
                sent.append(b"%d" % len(sent))
        finally:
            signal.signal(signal.SIGUSR1, before)
    if waiting:
        assert isinstance(said[0], CalledWithin)
    else:
        assert isinstance(said[0], Delivery)
        assert said[0].result().offset == len(sent)
    found = [record.value for record in read_partition(cluster, name, 0)]
    assert found == [*sent, *([] if waiting else [b"inner"])]


def test_what_interrupted_a_send_leaves_after_it_when_the_background_thread_lets_it_leave(
    tap: WireTap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the answer is awaited. With the stamp of the record before it, it would be taken for a repeat, and lost."""
    topic, inner, before = "direct-left-behind", list[Delivery](), list[int]()
    send_alone, give_up = BrokerConnection.send_alone, thread_reactor.ReactorLock.give_up

    def interrupted(connection: BrokerConnection, *arguments: Any) -> Any:
        before.append(len(tap.of(apis.PRODUCE)))
        if not inner:
            inner.append(made.send_async(topic, b"inner"))
        return send_alone(connection, *arguments)

    def sleep_long(lock: thread_reactor.ReactorLock, rouse: Callable[[], object], word: Any = None) -> None:
        give_up(lock, rouse, word)
        if word is not None:
            on_the_wire(tap, before[-1] + 2)

    with Producer(tap.address, interval_ms=0) as made:
        made.send(topic, b"first")
        monkeypatch.setattr(BrokerConnection, "send_alone", interrupted)
        monkeypatch.setattr(thread_reactor.ReactorLock, "give_up", sleep_long)
        while not inner:  # one that finds a timer due takes the other way
            outer = made.send(topic, b"outer")
        monkeypatch.undo()
    assert inner[0].result(20).offset == outer.offset + 1
    assert values(tap, topic)[-2:] == [b"outer", b"inner"]


@proves("J10")
def test_threads_that_wait_and_threads_that_do_not_keep_their_order(
    broker: Broker, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic()
    each = 150
    with Producer(broker.bootstrap, interval_ms=1) as producer:
        producer.send(name, b"first")

        def wait(who: int) -> None:
            for nth in range(each):
                producer.send(name, b"%d %d" % (who, nth))

        def run_ahead(who: int) -> None:
            for nth in range(each):
                producer.send_async(name, b"%d %d" % (who, nth))
                if nth % 10 == 9:
                    producer.send(name, b"%d %d" % (who + 100, nth // 10))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda who: wait(who) if who % 2 else run_ahead(who), range(8)))
        producer.flush(30)
        metrics = producer.metrics()
    found: dict[int, list[int]] = {}
    for record in read_partition(cluster, name, 0)[1:]:
        who, _, nth = (record.value or b"").partition(b" ")
        found.setdefault(int(who), []).append(int(nth))
    expected = {who: list(range(each)) for who in range(8)}
    expected |= {who + 100: list(range(each // 10)) for who in range(0, 8, 2)}
    assert found == expected
    assert metrics["delivered"] == 1 + 8 * each + 4 * (each // 10)
    assert metrics["failed"] == metrics["unknown"] == metrics["queue_records"] == metrics["queue_bytes"] == 0


def test_who_comes_while_a_record_is_in_flight_finds_it_there(
    tap: WireTap, held: threading.Event, producer: Producer, patient: None
) -> None:
    topic = "direct-shown"
    for _ in range(3):
        producer.send(topic, b"before")
    before, asked = producer.metrics(), len(tap.of(apis.PRODUCE))
    held.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(producer.send, topic, b"alone")
        on_the_wire(tap, asked + 1)
        metrics = producer.metrics()
        assert metrics["queue_records"] == 1
        assert metrics["requests"] == before["requests"] + 1
        assert metrics["direct"] == before["direct"]
        behind = producer.send_async(topic, b"behind")
        held.set()
        producer.flush(20)
        assert behind.result().offset == waiting.result().offset + 1 == 4
    assert producer.metrics()["queue_records"] == producer.metrics()["queue_bytes"] == 0
    assert values(tap, topic) == [b"before"] * 3 + [b"alone", b"behind"]


def test_a_close_waits_for_a_record_in_flight(
    tap: WireTap, held: threading.Event, producer: Producer, patient: None
) -> None:
    producer.send("direct-closed", b"before")
    asked = len(tap.of(apis.PRODUCE))
    held.clear()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(producer.send, "direct-closed", b"alone")
        on_the_wire(tap, asked + 1)
        closing = pool.submit(producer.close)
        wait_for("the close", lambda: producer._sender.refusal)
        assert not waiting.done()
        held.set()
        assert waiting.result(20).offset == 1
        closing.result(20)


@pytest.mark.parametrize("code", [ErrorCode.NOT_LEADER_OR_FOLLOWER, TOO_LARGE])
def test_a_refusal_is_tried_again_or_told_as_of_any_batch(code: int, tap: WireTap, patient: None) -> None:
    """The broker has written the record in truth: when it is sent again, it knows it."""
    topic = f"direct-refused-{int(code)}"
    refused: list[Seen] = []

    def refuse(seen: Seen, answer: Message) -> None:
        if seen.api_key == apis.PRODUCE and not refused and len(tap.of(apis.PRODUCE)) > 5:
            refused.append(seen)
            row = answer.responses[0].partition_responses[0]
            row.error_code, row.base_offset = int(code), -1

    tap.change = refuse
    outcomes: list[object] = []
    with Producer(tap.address, client_id=f"refused {int(code)}") as producer:
        for nth in range(10):
            try:
                outcomes.append(producer.send(topic, b"%d" % nth).topic)
            except NotDelivered as error:
                outcomes.append(type(error))
        metrics = producer.metrics()
    assert refused
    assert metrics["direct"] >= 3
    retried = code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert metrics["retries"] == (1 if retried else 0)
    assert metrics["failed"] == (0 if retried else 1)
    assert outcomes == [topic] * 5 + [topic if retried else NotDelivered] + [topic] * 4
    assert values(tap, topic) == [b"%d" % nth for nth in range(10)]


@proves("R6")
def test_ctrl_c_leaves_a_record_in_flight_to_its_lane(
    tap: WireTap, held: threading.Event, producer: Producer, patient: None
) -> None:
    topic = "direct-interrupted"
    producer.send(topic, b"before")
    asked = len(tap.of(apis.PRODUCE))
    held.clear()

    def interrupt() -> None:
        on_the_wire(tap, asked + 1)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        producer.send(topic, b"alone")
    interrupting.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert producer.metrics()["queue_records"] == 1
    held.set()
    producer.flush(20)
    assert producer.send(topic, b"after").offset == 2
    assert values(tap, topic) == [b"before", b"alone", b"after"]
    assert producer.metrics()["retries"] == 0


def test_a_child_forked_while_a_record_is_in_flight_is_refused_and_its_parent_goes_on(
    tap: WireTap, held: threading.Event, producer: Producer, patient: None
) -> None:
    producer.send("direct-forked", b"before")
    asked = len(tap.of(apis.PRODUCE))
    kept = producer._driver.reactor.lock
    held.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(producer.send, "direct-forked", b"alone")
        on_the_wire(tap, asked + 1)
        child = os.fork()
        if child == 0:
            refused = 1
            try:
                with kept:
                    producer.send("direct-forked", b"in the child")
            except ForkedEngine:
                refused = 0
            finally:
                os._exit(refused)
        assert os.waitpid(child, 0)[1] == 0
        held.set()
        assert waiting.result(20).offset == 1
    assert producer.send("direct-forked", b"after").offset == 2


def test_a_record_that_is_not_answered_in_time_fails(tap: WireTap, held: threading.Event) -> None:
    topic = "direct-late"
    with Producer(tap.address, client_id="late", delivery_timeout_ms=300) as producer:
        wait_for("the first", lambda: _sends(producer, topic))
        held.clear()
        with pytest.raises(DeliveryUnknown, match=topic):
            producer.send(topic, b"late")
        assert producer.metrics()["unknown"] == 1
        held.set()
        wait_for("the next", lambda: _sends(producer, topic))
        assert producer.metrics()["queue_records"] == 0


def _sends(producer: Producer, topic: str) -> object:
    try:
        return producer.send(topic, b"v")
    except NotDelivered:
        return None


@proves("J10")
def test_a_broker_that_is_killed_while_records_are_sent_one_by_one(brokers: Brokers) -> None:
    broker = brokers.start()
    ended = threading.Event()
    with Producer(broker.bootstrap, delivery_timeout_ms=60_000) as producer, ThreadPoolExecutor(1) as pool:
        producer.send("direct-killed", b"0")
        sent = [0]

        def send() -> None:
            while not ended.is_set():
                producer.send("direct-killed", b"%d" % (sent[-1] + 1))
                sent.append(sent[-1] + 1)

        sending = pool.submit(send)
        wait_for("records", lambda: len(sent) > 100 or sending.done() or None)
        broker.kill()
        broker.restart(clean=False)
        wait_for("more records", lambda: len(sent) > 200 or sending.done() or None)
        ended.set()
        sending.result(60)
        assert producer.metrics()["direct"] > 0
    with Cluster(broker.bootstrap) as cluster:
        found = [int(record.value or b"") for record in read_partition(cluster, "direct-killed", 0)]
    assert found == sent


# -- parts


@pytest.mark.parametrize("version", range(3, 14))
def test_an_answer_is_read_without_its_codec_only_if_it_says_written(version: int) -> None:
    template = ProduceTemplate(version, "orders", bytes(range(16)), 7, -1, 1_000)

    def frame(throttle_ms: int = 0, **changed: object) -> bytes:
        row = {"index": 7, "error_code": 0, "base_offset": 42, "log_append_time_ms": -1, "log_start_offset": 3}
        topic = Message(name="orders", topic_id=bytes(range(16)), partition_responses=[Message(**{**row, **changed})])
        body = encode_response(apis.PRODUCE, version, Message(responses=[topic], throttle_time_ms=throttle_ms))
        return write_response(apis.PRODUCE, version, 99, body)

    assert template.read(frame(), 99) == ((42, -1) if version >= 5 else None)
    assert template.read(frame(log_append_time_ms=123), 99) == ((42, 123) if version >= 5 else None)
    assert template.read(frame(), 98) is None
    for other in (frame(5), frame(index=8), frame(error_code=6), frame(error_code=6, base_offset=-1), frame()[:-1]):
        assert template.read(other, 99) is None
    for place in (3, len(frame()) - 1):
        assert template.read(frame()[:place] + b"\x7f" + frame()[place + 1 :], 99) is None


def test_what_somebody_else_has_received_is_left_to_the_reader() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        reader = FrameReader(near, Address("test", 1), BufferPool(1 << 20))
        first, second = b"\0\0\0\5first", b"\0\0\0\6second"

        def read() -> list[bytes]:
            frames: list[memoryview] = []
            reader.read(frames)
            return [bytes(frame) for frame in frames]

        reader.put_back(first + second)
        assert not reader.is_idle
        assert read() == [b"first", b"second"]
        assert reader.is_idle
        reader.put_back(first[:6])
        far.sendall(first[6:] + second[:2])
        assert read() == [b"first"]
        far.sendall(second[2:])
        assert read() == [b"second"]
        reader.put_back(b"")
        assert reader.is_idle
        far.close()
        with pytest.raises(ConnectionResetError):
            read()
