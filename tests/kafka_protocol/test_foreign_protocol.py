"""A client at the wrong port: TLS where it is not spoken and the other way round, HTTP and Kafka exchanged."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from brokers import Broker, Brokers, wait_for
from certificates import Certificate, self_signed
from headrace.client.admin.cluster import Cluster, Retry
from headrace.errors import HeadraceError
from headrace.wire.foreign_protocol import foreign_protocol
from proving import proves

WAIT_S = 60


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def ports(brokers: Brokers, certificate: Certificate) -> Iterator[Broker]:
    """A broker with a listener of each kind, and an HTTP port."""
    settings = {"tls.certificate": certificate.certificate_path, "tls.key": certificate.key_path}
    broker = brokers.start(settings=settings, listen=("plain=127.0.0.1:0", "sealed=tls://127.0.0.1:0"))
    yield broker
    broker.discard()


@pytest.mark.parametrize(
    ("port", "with_tls", "heard", "logged"),
    [
        (
            "kafka.sealed",
            False,
            "this port speaks TLS; pass --tls or --tls-ca FILE",
            "it does not speak TLS, and {} does",
        ),
        (
            "kafka.plain",
            True,
            "this port does not speak TLS; leave out --tls and --tls-ca",
            "it speaks TLS, and the listener",
        ),
        ("http", False, "this port speaks HTTP", "it speaks the protocol of Kafka, and this port HTTP"),
        ("http", True, "this port does not speak TLS", "it speaks TLS, and this port HTTP"),
    ],
)
@proves("U1")
def test_a_client_at_the_wrong_port_is_told_which_one_it_is_and_so_is_the_log(
    ports: Broker, certificate: Certificate, port: str, with_tls: bool, heard: str, logged: str
) -> None:
    address = ports.addresses[port]
    tls = certificate.client_context() if with_tls else None
    with (
        Cluster(address, tls=tls, timeout_ms=WAIT_S * 1000, retry=Retry(within_ms=0)) as cluster,
        pytest.raises(HeadraceError, match=heard),
    ):
        cluster.topology([])
    wait_for("a line in the log", lambda: logged.format(address) in ports.stderr())
    assert "a frame of" not in ports.stderr()


@proves("U1")
def test_an_http_client_at_the_kafka_port_is_told_so(ports: Broker) -> None:
    with socket.create_connection(ports.host_port, WAIT_S) as sock, sock.makefile("rb") as answers:
        sock.sendall(b"GET /topics HTTP/1.1\r\nHost: broker\r\n\r\n")
        answer = answers.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"this port speaks the protocol of Kafka" in answer
    wait_for("a line in the log", lambda: "it speaks HTTP, and the listener 'plain' does not" in ports.stderr())


@proves("U1")
def test_a_client_that_does_not_trust_the_certificate_is_in_the_log(ports: Broker) -> None:

    host, _, port = ports.addresses["kafka.sealed"].rpartition(":")
    with (
        socket.create_connection((host, int(port)), WAIT_S) as sock,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        ssl.create_default_context().wrap_socket(sock, server_hostname="localhost")
    wait_for("a line in the log", lambda: "alert unknown ca" in ports.stderr())


@proves("U1")
def test_a_peer_that_closes_instead_of_answering_may_speak_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def turn_away() -> None:
            accepted, _ = server.accept()
            with accepted, contextlib.suppress(OSError):
                accepted.recv(1000)

        thread = threading.Thread(target=turn_away)
        thread.start()
        with (
            Cluster(f"127.0.0.1:{server.getsockname()[1]}", retry=Retry(within_ms=0)) as cluster,
            pytest.raises(
                HeadraceError, match="closed the connection; if this port speaks TLS, pass --tls or --tls-ca"
            ),
        ):
            cluster.topology([])
        thread.join()


@pytest.mark.parametrize(
    ("head", "protocol"),
    [
        (bytes.fromhex("1603010200010001"), "TLS"),
        (bytes.fromhex("15030300020246"), "TLS"),
        (b"GET /top", "HTTP"),
        (b"PRI * HT", "HTTP"),
        (b"HTTP/1.1", "HTTP"),
        (bytes.fromhex("0000002300120004"), None),
        (b"GETAWAY!", None),
        (b"", None),
    ],
)
def test_the_first_bytes_tell_the_protocol(head: bytes, protocol: str | None) -> None:
    assert foreign_protocol(head) == protocol
