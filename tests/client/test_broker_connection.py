"""One connection, driven by callers, by the background thread, by asyncio and uvloop: all of it must look the same."""

from __future__ import annotations

import asyncio
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from brokers import Broker, free_port
from certificates import self_signed
from client.conftest import MakeTopic
from client.connection_drivers import KINDS, Driver
from client.connection_peer import Peer
from headrace.aio.reactor import AsyncioReactor
from headrace.client.connection import broker_connection as connections
from headrace.client.connection.broker_connection import BrokerConnection
from headrace.client.connection.connections import parse_address
from headrace.client.errors import BrokerUnreachable, EngineClosed, NeverSent
from headrace.client.producer.request import Outgoing, encode_parts
from headrace.errors import HeadraceError, ProtocolError, Unsupported
from headrace.ports.disk import Buffer
from headrace.ports.network import Address
from headrace.records import kernel
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

NOTHING = Message(topics=[])
Heard = list[Message | HeadraceError]


@pytest.fixture(params=KINDS)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    made = Driver(request.param)
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[Driver]:
    made = Driver("threads")
    yield made
    made.close()


def open_link(driver: Driver, address: Address, **how: object) -> BrokerConnection:
    return BrokerConnection(driver.reactor, address, client_id="test", **how)  # type: ignore[arg-type]


def ask(connection: BrokerConnection, timeout_s: float = 20.0) -> Heard:
    heard: Heard = []
    connection.ask(apis.METADATA, NOTHING, heard.append, timeout_s=timeout_s)
    assert heard == []
    return heard


def produce_body(name: str, batch: Buffer, acks: int = -1) -> Callable[[int], list[Buffer]]:
    # Later versions name topics by id only; the tests that send this agree on an earlier one with their peer.
    return lambda version: encode_parts(version, [Outgoing(name, 0, batch)], {name: bytes(16)}, acks=acks, timeout_ms=9)


@proves("G4")
def test_requests_wait_for_the_connection_and_are_answered_in_their_order(driver: Driver, broker: Broker) -> None:
    connection = open_link(driver, parse_address(broker.bootstrap))
    with pytest.raises(Unsupported, match="not open"):
        connection.version(apis.METADATA)
    heard: list[tuple[int, str]] = []
    for nth in range(300):
        key = (apis.METADATA, apis.LIST_GROUPS, apis.DESCRIBE_CLUSTER)[nth % 3]
        connection.ask(key, NOTHING, lambda answer, nth=nth: heard.append((nth, type(answer).__name__)), timeout_s=20)  # type: ignore[misc]
    driver.until(lambda: len(heard) == 300)
    kinds = ("MetadataResponse", "ListGroupsResponse", "DescribeClusterResponse")
    assert heard == [(nth, kinds[nth % 3]) for nth in range(300)]
    assert connection.is_open
    assert connection.version(apis.FETCH) >= 4
    connection.close(EngineClosed("enough"))
    assert not connection.is_open


@proves("G4")
def test_a_large_batch_goes_there_and_back(driver: Driver, broker: Broker, topic: MakeTopic) -> None:
    name = topic(max_message_bytes=20 << 20)
    batch = kernel.build([(1, None, bytes(range(256)) * (9 << 12), [])])
    connection = open_link(driver, parse_address(broker.bootstrap))
    known = ask_topic(driver, connection, name)

    def body(version: int) -> list[Buffer]:
        return encode_parts(version, [Outgoing(name, 0, batch)], {name: known}, acks=-1, timeout_ms=9000)

    heard: Heard = []
    connection.ask(apis.PRODUCE, body, heard.append, timeout_s=30)
    driver.until(lambda: heard)
    assert isinstance(heard[0], Message)
    assert heard[0].responses[0].partition_responses[0].error_code == 0
    partition = Message(partition=0, fetch_offset=0, partition_max_bytes=32 << 20, current_leader_epoch=-1)
    asked = Message(topic=name, topic_id=known, partitions=[partition])
    request = Message(
        replica_id=-1, max_wait_ms=9000, min_bytes=1, max_bytes=32 << 20, session_epoch=-1, topics=[asked]
    )
    connection.ask(apis.FETCH, request, heard.append, timeout_s=30)
    driver.until(lambda: len(heard) == 2)
    assert isinstance(heard[1], Message)
    records = heard[1].responses[0].partitions[0].records
    assert bytes(records[61:]) == bytes(batch[61:])
    connection.close(EngineClosed("enough"))


def ask_topic(driver: Driver, connection: BrokerConnection, name: str) -> bytes:
    heard: Heard = []
    connection.ask(apis.METADATA, Message(topics=[Message(name=name)]), heard.append, timeout_s=20)
    driver.until(lambda: heard)
    assert isinstance(heard[0], Message)
    topic_id: bytes = heard[0].topics[0].topic_id
    return topic_id


def test_a_refused_connection_says_so_and_that_nothing_was_sent(driver: Driver) -> None:
    connection = open_link(driver, Address("127.0.0.1", free_port()))
    heard = ask(connection)
    driver.until(lambda: heard)
    assert isinstance(heard[0], NeverSent)
    assert "no broker answers at 127.0.0.1:" in str(heard[0])


def test_a_name_is_looked_up_and_one_that_has_no_address_is_told(driver: Driver, broker: Broker) -> None:
    by_name = open_link(driver, Address("localhost", broker.host_port[1]))
    heard = ask(by_name)
    driver.until(lambda: heard)
    assert isinstance(heard[0], Message)
    by_name.close(EngineClosed("enough"))
    nowhere = ask(open_link(driver, Address("no-such-host.invalid", 9092)))
    driver.until(lambda: nowhere)
    assert isinstance(nowhere[0], NeverSent)
    assert "no-such-host.invalid:9092: the name cannot be looked up" in str(nowhere[0])


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack(">i", -1),
        struct.pack(">i", 2),
        struct.pack(">i", 0x7FFFFFFF),
        struct.pack(">iihi", 10, 77, 0, 0),
        struct.pack(">ii", 1 << 20, 1) + bytes(1 << 20),
    ],
)
def test_a_peer_that_is_no_broker_is_told_as_such(threads: Driver, answer: bytes) -> None:
    with Peer(greeting=answer) as peer:
        heard = ask(open_link(threads, peer.address))
        threads.until(lambda: heard)
    assert isinstance(heard[0], ProtocolError)
    assert str(heard[0]).startswith(f"{peer.address} does not answer as a Kafka broker")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (struct.pack(">i", 0x7FFFFFFF), "announced an answer of 2147483647 bytes: is it a Kafka port"),
        (struct.pack(">iib", 5, 999, 0), "answered request 999, not 1"),
        (struct.pack(">iib", 5, 1, 0), "sent an answer that is broken: metadata v13 response"),
        (struct.pack(">iib", 1 << 20, 1, 0) + bytes(1 << 20), "sent an answer that is broken: metadata v13"),
    ],
)
def test_a_broken_answer_is_told_with_its_place_and_ends_the_connection(
    driver: Driver, answer: bytes, expected: str
) -> None:
    with Peer(lambda key, request: answer) as peer:
        connection = open_link(driver, peer.address)
        first, second = ask(connection), ask(connection)
        driver.until(lambda: first and second)
        assert isinstance(first[0], ProtocolError)
        assert f"{peer.address} {expected}" in str(first[0])
        assert isinstance(second[0], ProtocolError)
        assert not connection.is_open


def test_a_connection_that_is_cut_fails_what_is_in_flight_and_opens_again_for_the_next(driver: Driver) -> None:
    answers: list[Message | bytes | None] = [b"", Message(brokers=[], topics=[])]
    with Peer(lambda key, request: answers.pop(0)) as peer:
        connection = open_link(driver, peer.address)
        lost = ask(connection)
        driver.until(lambda: lost)
        assert type(lost[0]) is BrokerUnreachable
        assert "closed the connection" in str(lost[0])
        heard = ask(connection)
        driver.until(lambda: heard)
        assert isinstance(heard[0], Message)
        assert connection.opened_count == 2
        connection.close(EngineClosed("enough"))


def test_a_connection_that_is_cut_while_idle_is_no_error_to_anyone(driver: Driver) -> None:
    with Peer(lambda key, request: Message(brokers=[], topics=[])) as peer:
        failures: list[HeadraceError] = []
        connection = open_link(driver, peer.address, on_failed=lambda connection, error: failures.append(error))
        first = ask(connection)
        driver.until(lambda: first)
        peer.drop()
        driver.until(lambda: not connection.is_open)
        again = ask(connection)
        driver.until(lambda: again)
        assert isinstance(again[0], Message)
        assert failures == []
        connection.close(EngineClosed("enough"))


def test_a_request_that_is_not_answered_in_time_takes_the_connection_with_it(driver: Driver) -> None:
    with Peer() as peer:
        connection = open_link(driver, peer.address)
        first, second = ask(connection, timeout_s=0.1), ask(connection, timeout_s=30)
        driver.until(lambda: first and second)
        assert f"no answer to Metadata from {peer.address} within 0.1 s" in str(first[0])
        assert type(second[0]) is BrokerUnreachable
        assert not connection.is_open


def test_a_peer_that_accepts_and_says_nothing_is_given_up(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SETUP_TIMEOUT_S", 0.2)
    with Peer(greeting=None) as peer:
        heard = ask(open_link(driver, peer.address))
        driver.until(lambda: heard)
        assert isinstance(heard[0], NeverSent)
        assert f"no answer as a Kafka broker from {peer.address} within 0.2 s" in str(heard[0])


def test_one_that_waits_too_long_for_the_connection_hears_so_alone(driver: Driver) -> None:
    with Peer(greeting=None) as peer:
        connection = open_link(driver, peer.address)
        short, long = ask(connection, timeout_s=0.05), ask(connection, timeout_s=30)
        driver.until(lambda: short)
        assert isinstance(short[0], NeverSent)
        assert "Metadata could not be sent to" in str(short[0])
        assert long == []
        connection.close(EngineClosed("that is enough"))
        assert isinstance(long[0], EngineClosed)


def test_a_peer_that_stops_reading_holds_back_what_has_not_begun(driver: Driver) -> None:
    """What the kernel has begun to send may have arrived; what waits behind it certainly has not."""
    with Peer(reads=False) as peer:
        connection = open_link(driver, peer.address)
        batch = kernel.build([(1, None, bytes(24 << 20), [])])
        begun: Heard = []
        oneway: Heard = []
        connection.ask(apis.PRODUCE, produce_body("t", batch), begun.append, timeout_s=0.5)
        driver.until(lambda: connection.is_open)
        driver.reached(lambda: connection._writes_blocked, 10)
        connection.ask(apis.PRODUCE, produce_body("t", batch, acks=0), oneway.append, timeout_s=30, answered=False)
        waits = ask(connection, timeout_s=30)
        driver.until(lambda: begun and oneway and waits)
        assert type(begun[0]) is BrokerUnreachable
        assert isinstance(oneway[0], NeverSent)
        assert isinstance(waits[0], NeverSent)


def test_a_request_without_an_answer_is_done_when_the_kernel_has_it(driver: Driver) -> None:
    with Peer() as peer:
        connection = open_link(driver, peer.address)
        heard: Heard = []
        batch = kernel.build([(1, None, b"x", [])])
        connection.ask(apis.PRODUCE, produce_body("t", batch, acks=0), heard.append, timeout_s=20, answered=False)
        driver.until(lambda: heard)
        assert heard == [Message()]
        assert connection.in_flight == 0
        connection.close(EngineClosed("enough"))


def test_what_cannot_be_encoded_fails_alone(driver: Driver, broker: Broker) -> None:
    connection = open_link(driver, parse_address(broker.bootstrap))
    wrong: Heard = []
    connection.ask(apis.METADATA, Message(topics=[Message(name=3)]), wrong.append, timeout_s=20)
    right = ask(connection)
    driver.until(lambda: wrong and right)
    assert isinstance(wrong[0], ProtocolError)
    assert isinstance(right[0], Message)
    connection.close(EngineClosed("enough"))


def test_a_callback_that_raises_stops_nobody_else(
    driver: Driver, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    connection = open_link(driver, parse_address(broker.bootstrap))

    def faulty(answer: object) -> None:
        raise RuntimeError("by mistake")

    connection.ask(apis.METADATA, NOTHING, faulty, timeout_s=20)
    heard = ask(connection)
    driver.until(lambda: heard)
    assert isinstance(heard[0], Message)
    assert "by mistake" in caplog.text
    connection.close(EngineClosed("enough"))


def test_a_link_that_has_ended_takes_nothing_more(driver: Driver) -> None:
    connection = open_link(driver, Address("127.0.0.1", free_port()))
    connection.end(EngineClosed("it is over"))
    heard = ask(connection)
    driver.until(lambda: heard)
    assert str(heard[0]) == "it is over"


def test_a_loop_that_is_closed_is_told_as_such() -> None:
    driver = Driver("asyncio")
    connection = open_link(driver, Address("127.0.0.1", free_port()))
    driver.close()
    with pytest.raises(EngineClosed, match="the event loop of this client is closed"):
        ask(connection)


def test_clients_of_one_loop_share_what_drives_them_and_those_of_another_do_not() -> None:
    async def two() -> tuple[AsyncioReactor, AsyncioReactor]:
        return AsyncioReactor.of_running_loop(), AsyncioReactor.of_running_loop()

    first, again = asyncio.run(two())
    other, _ = asyncio.run(two())
    assert first is again
    assert first is not other


def test_requests_without_a_connection_are_bounded(threads: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WAITING_MAX", 10)
    with Peer(greeting=None) as peer:
        connection = open_link(threads, peer.address)
        heard = [ask(connection) for _ in range(11)]
        threads.until(lambda: heard[10])
        assert "10 requests wait for" in str(heard[10][0])
        assert not any(heard[:10])
        connection.end(EngineClosed("enough"))


@proves("R16")
def test_a_failing_connection_is_tried_after_growing_pauses(driver: Driver) -> None:
    """However eagerly it is asked: after 20, 40, 80 ms and so on."""
    with Peer(greeting=b"") as peer:
        connection = open_link(driver, peer.address)
        outcomes: Heard = []

        def again(answer: Message | HeadraceError) -> None:
            outcomes.append(answer)
            if len(outcomes) < 6:
                connection.ask(apis.METADATA, NOTHING, again, timeout_s=20)

        began_at = time.monotonic()
        connection.ask(apis.METADATA, NOTHING, again, timeout_s=20)
        driver.until(lambda: len(outcomes) == 6)
        assert all(isinstance(outcome, BrokerUnreachable) for outcome in outcomes)
        # The peer may accept late, on a busy machine, and never early; loops count whole milliseconds.
        pauses = list(accumulate((0.019, 0.039, 0.079, 0.159, 0.319)))
        assert len(peer.accepted_at) == 6
        assert all(at - began_at >= pause for at, pause in zip(peer.accepted_at[1:], pauses, strict=True))


@proves("R16")
def test_a_tls_listener_is_spoken_to_over_tls(fresh_broker: Callable[..., Broker], tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    broker = fresh_broker(
        listen=("tls://127.0.0.1:0",),
        settings={"tls.certificate": certificate.certificate_path, "tls.key": certificate.key_path},
    )
    address = parse_address(broker.bootstrap)
    trusting = ssl.create_default_context(cafile=str(certificate.certificate_path))
    for kind in KINDS:
        driver = Driver(kind)
        connection = open_link(driver, address, tls=trusting)
        assert send_many(driver, connection, f"sealed-{kind}", 20) == list(range(20))
        connection.close(EngineClosed("enough"))
        strange = ask(open_link(driver, address, tls=ssl.create_default_context()))
        driver.until(lambda: strange)  # noqa: B023
        assert isinstance(strange[0], NeverSent)
        assert f"no TLS with {address}" in str(strange[0])
        driver.close()


def send_many(driver: Driver, connection: BrokerConnection, name: str, count: int) -> list[int]:
    """Batches of half a megabyte, all at once; the offsets that they got."""
    heard: Heard = []
    request = Message(topics=[Message(name=name)], allow_auto_topic_creation=True)
    connection.ask(apis.METADATA, request, heard.append, timeout_s=20)
    driver.until(lambda: heard)
    assert isinstance(heard[0], Message)
    ids = {name: heard[0].topics[0].topic_id}
    batch = kernel.build([(1, None, bytes(500_000), [])])
    produced: Heard = []

    def body(version: int) -> list[Buffer]:
        return encode_parts(version, [Outgoing(name, 0, batch)], ids, acks=-1, timeout_ms=9000)

    for _ in range(count):
        connection.ask(apis.PRODUCE, body, produced.append, timeout_s=30)
    driver.until(lambda: len(produced) == count)
    answers = [answer for answer in produced if isinstance(answer, Message)]
    return [answer.responses[0].partition_responses[0].base_offset for answer in answers]
