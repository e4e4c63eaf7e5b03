"""One connection: versions, order, bounds, and what a person is told when the peer is no broker."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from brokers import Broker, free_port
from certificates import self_signed
from client.conftest import MakeTopic
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster, Request, Retry
from headrace.client.admin.fetch import Position, fetch, read_batches
from headrace.client.admin.produce import produce
from headrace.client.connection.connections import parse_address, parse_bootstrap
from headrace.client.errors import BrokerUnreachable, NoBroker, Refusal, describe_code, is_retriable
from headrace.client.fetch_requests import FetchLimits
from headrace.client.producer.request import Outgoing
from headrace.errors import SettingError
from headrace.ports.network import Address
from headrace.records import kernel
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves


@contextmanager
def peer(answer: bytes | None, *, closes: bool = True) -> Iterator[Address]:
    """A server that takes one connection, reads a request and answers with these bytes; None: never."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stopped = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                if answer is not None:
                    connection.sendall(answer)
                if not closes:
                    stopped.wait(30)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Address(*server.getsockname())
        finally:
            stopped.set()
            thread.join()


def test_a_refused_connection_says_where_and_how_to_start_a_broker() -> None:
    port = free_port()
    told = rf"no broker answers at 127\.0\.0\.1:{port} \(tried for \d+\.\d s\); start a broker with `headrace serve`"
    with pytest.raises(NoBroker, match=told), Cluster(f"127.0.0.1:{port}", retry=Retry(0)) as cluster:
        cluster.topology()


def first_contact(address: Address, timeout_ms: int = 30_000, within_ms: int = 0) -> None:
    with Cluster(str(address), timeout_ms=timeout_ms, retry=Retry(within_ms)) as cluster:
        cluster.topology([])


def test_a_peer_that_closes_is_told_as_such() -> None:
    with peer(b"") as address, pytest.raises(NoBroker, match="closed the connection"):
        first_contact(address)


def test_a_peer_that_is_silent_runs_into_the_timeout() -> None:
    silent = r"waiting for an answer from 127\.0\.0\.1:\d+: no answer within the timeout"
    with peer(None, closes=False) as address, pytest.raises(NoBroker, match=silent):
        first_contact(address, timeout_ms=50)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", struct.pack(">i", -1), struct.pack(">i", 2)])
def test_a_peer_that_is_no_broker_is_refused_before_anything_is_allocated(answer: bytes) -> None:
    with peer(answer, closes=False) as address, pytest.raises(NoBroker, match="does not answer as a Kafka broker"):
        first_contact(address, within_ms=60_000)


def test_an_answer_to_another_request_is_none() -> None:
    with peer(struct.pack(">iihi", 10, 77, 0, 0)) as address, pytest.raises(NoBroker, match="as a Kafka broker"):
        first_contact(address)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost", Address("localhost", 9092)),
        ("10.0.0.1:99", Address("10.0.0.1", 99)),
        ("[::1]:99", Address("::1", 99)),
        ("[::1]", Address("::1", 9092)),
    ],
)
def test_addresses_as_people_write_them(text: str, expected: Address) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", [":9092", "host:", "host:0", "host:70000", "host:x", "[::1", "[::1]9092"])
def test_what_is_not_an_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingError, match=r"127\.0\.0\.1:9092"):
        parse_address(text)


def test_bootstrap_is_a_list_and_never_empty() -> None:
    assert parse_bootstrap("a:1, b:2,") == (Address("a", 1), Address("b", 2))
    with pytest.raises(SettingError):
        parse_bootstrap(" , ")


def test_error_codes_have_words_a_remedy_and_say_whether_to_try_again() -> None:
    assert "not leader or follower" in describe_code(6)
    assert is_retriable(6)
    assert "headrace topic list" in describe_code(3)
    assert not is_retriable(10)
    assert not is_retriable(31_000)
    refusal = Refusal(19, "produce to t-0")
    assert refusal.mapping.retriable
    assert str(refusal).startswith("produce to t-0: not enough replicas (code 19): fewer replicas")


@proves("G4")
def test_the_highest_common_version_is_agreed(cluster: Cluster) -> None:
    connection = cluster.controller()
    cluster.call(connection, apis.METADATA, Message(topics=[]))
    for api_key in (apis.PRODUCE, apis.FETCH, apis.METADATA, apis.JOIN_GROUP):
        assert apis.KAFKA_APIS[api_key].serves(connection.version(api_key))


@proves("G4")
def test_pipelined_requests_are_answered_in_their_order(cluster: Cluster) -> None:
    kinds = [apis.METADATA, apis.LIST_GROUPS, apis.DESCRIBE_CLUSTER, apis.METADATA] * 10
    connection = cluster.controller()
    answers = cluster.exchange([(connection, Request(kind, Message(topics=[]))) for kind in kinds])
    assert [type(answer).__name__ for answer in answers] == [
        {apis.METADATA: "MetadataResponse", apis.LIST_GROUPS: "ListGroupsResponse"}.get(kind, "DescribeClusterResponse")
        for kind in kinds
    ]


def test_a_broken_connection_fails_its_own_requests_and_no_others(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    whole, broken = cluster.controller(), cluster.leader(name, 0, "another")
    request = Request(apis.METADATA, Message(topics=[]))
    with peer(b"") as elsewhere:
        broken.address = elsewhere
        first, second, third = cluster.exchange([(broken, request), (whole, request), (broken, request)])
    assert isinstance(first, BrokerUnreachable)
    assert isinstance(second, Message)
    assert isinstance(third, BrokerUnreachable)
    assert whole.is_open
    assert not broken.is_open


def test_ctrl_c_while_waiting_leaves_no_answer_behind(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    ctrl_c = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))

    def fetch_until_interrupted() -> None:
        ctrl_c.start()
        fetch(cluster, [Position(name, 0, 0)], FetchLimits(max_wait_ms=30_000))

    try:
        with pytest.raises(KeyboardInterrupt):
            fetch_until_interrupted()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert cluster.leader(name, 0).in_flight == 0
    assert name in cluster.topology([name]).topics


def test_any_bootstrap_address_that_answers_will_do(broker: Broker) -> None:
    with Cluster([f"127.0.0.1:{free_port()}", broker.bootstrap]) as cluster:
        assert cluster.topology([]).brokers


def test_a_tls_listener_is_spoken_to_over_tls(fresh_broker: Callable[..., Broker], tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    broker = fresh_broker(
        listen=("tls://127.0.0.1:0",),
        settings={"tls.certificate": certificate.certificate_path, "tls.key": certificate.key_path},
    )
    trusting = ssl.create_default_context(cafile=str(certificate.certificate_path))
    with Cluster(broker.bootstrap, tls=trusting) as cluster:
        operations.create_topic(cluster, "sealed")
        batch = kernel.build([(1, None, b"x" * 100_000, [])])
        produce(cluster, [Outgoing("sealed", 0, batch)] * 3)
        assert read_batches(cluster, "sealed", 0, 0, 10).next_offset == 3
    with pytest.raises(NoBroker, match="no TLS with"):
        Cluster(broker.bootstrap, tls=ssl.create_default_context()).topology()
    with pytest.raises(NoBroker):
        Cluster(broker.bootstrap, timeout_ms=2000, retry=Retry(0)).topology()


def test_what_a_client_raises_of_itself_does_not_make_a_code_final() -> None:
    import headrace.client.errors  # noqa: F401
    from headrace.client.errors import is_retriable

    assert [is_retriable(code) for code in (3, 5, 6, 7, 19, 56)] == [True] * 6
    assert [is_retriable(code) for code in (1, 10, 17, 45)] == [False] * 4
