"""One HTTP connection after another: keep-alive, pipelining, limits, malformed bytes, slow and vanishing clients."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from brokers import wait_for
from headrace.http import session
from http_port import DEADLINE_SECONDS, HttpPort


def read_until_closed(sock: socket.socket) -> bytes:
    got = bytearray()
    while piece := sock.recv(1 << 16):
        got += piece
    return bytes(got)


def answers(raw: bytes) -> list[tuple[int, bytes]]:
    """The statuses and bodies of responses that all have a length."""
    found = []
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status == 100:
            found.append((status, b""))
            raw = rest
            continue
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(headers[b"content-length"])
        found.append((status, rest[:length]))
        raw = rest[length:]
    return found


def exchange(port: HttpPort, sent: bytes) -> list[tuple[int, bytes]]:
    """Send raw bytes and read answers until the broker closes."""
    with port.dial() as sock:
        sock.sendall(sent)
        return answers(read_until_closed(sock))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close soon after a refusal: these clients have nothing more to send."""
    monkeypatch.setattr(session, "DISCARD_SECONDS", 0.02)


CLOSE = b"Connection: close\r\n\r\n"


def test_one_connection_serves_many_requests(port: HttpPort) -> None:
    connection = port.connection()
    assert [port.ask("GET", "/health", connection=connection).status for _ in range(50)] == [200] * 50
    local = connection.sock.getsockname()
    assert port.ask("GET", "/nowhere", connection=connection).status == 404
    assert connection.sock.getsockname() == local
    connection.close()


def test_pipelined_requests_are_answered_in_their_order(port: HttpPort) -> None:
    port.create("orders")
    sent = b"".join(
        b"POST /topics/orders/records HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 3\r\n\r\n%03d"
        % n
        for n in range(200)
    )
    last = b"GET /topics/orders/partitions/0/records?count=200 HTTP/1.1\r\nHost: x\r\n" + CLOSE
    found = exchange(port, sent + last)
    assert [json.loads(body)["offsets"][0]["offset"] for _, body in found[:200]] == list(range(200))
    assert [record["value"] for record in json.loads(found[200][1])["records"]] == [f"{n:03d}" for n in range(200)]


def test_a_request_behind_one_that_waits_is_answered_after_it(port: HttpPort) -> None:
    port.create("orders")
    with port.dial() as sock:
        sock.sendall(b"GET /topics/orders/partitions/0/records?wait_ms=60000 HTTP/1.1\r\nHost: x\r\n\r\n")
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + CLOSE)
        wait_for("the fetch to wait", lambda: port.on_loop(lambda: len(port.partitions.deadlines)))
        port.produce("/topics/orders/records", b"now", "text/plain")
        first, second = answers(read_until_closed(sock))
    assert json.loads(first[1])["records"][0]["value"] == "now"
    assert json.loads(second[1]) == {"status": "alive"}


def test_a_request_may_come_byte_by_byte(port: HttpPort) -> None:
    with port.dial() as sock:
        for byte in b"GET /health HTTP/1.1\r\nHost: x\r\n" + CLOSE:
            sock.sendall(bytes([byte]))
        assert answers(read_until_closed(sock)) == [(200, b'{"status":"alive"}\n')]


def test_a_chunked_body_is_put_together(port: HttpPort) -> None:
    head = b"POST /topics/orders/records HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + CLOSE
    found = exchange(port, head + b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n")
    assert found[0][0] == 200
    assert port.get("/topics/orders/partitions/0/records").json["records"][0]["value"] == "abcdefg"


def test_http_1_0_is_answered_and_closed(port: HttpPort) -> None:
    assert exchange(port, b"GET /health HTTP/1.0\r\n\r\n") == [(200, b'{"status":"alive"}\n')]


def test_a_head_request_gets_the_length_and_no_body(port: HttpPort) -> None:
    connection = port.connection()
    answer = port.ask("HEAD", "/health", connection=connection)
    assert (answer.status, answer.body, answer.headers["Content-Length"]) == (200, b"", "19")
    assert port.ask("GET", "/health", connection=connection).status == 200
    connection.close()


# Limits


@pytest.mark.usefixtures("hasty")
def test_a_body_announced_too_large_is_refused_before_it_is_sent(port: HttpPort) -> None:
    head = b"POST /topics/orders/records HTTP/1.1\r\nHost: x\r\nContent-Length: 200001\r\nExpect: 100-continue\r\n\r\n"
    found = exchange(port, head)
    assert [status for status, _ in found] == [413]
    assert "a body of 200001 bytes; http.body.max.bytes is 200000" in found[0][1].decode()


def test_a_body_of_the_right_size_is_asked_for(port: HttpPort) -> None:
    with port.dial() as sock:
        head = b"POST /topics/orders/records HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n"
        sock.sendall(head + CLOSE)
        assert sock.recv(1000).startswith(b"HTTP/1.1 100 ")
        sock.sendall(b"hello")
        assert answers(read_until_closed(sock))[0][0] == 200


def test_a_client_that_sends_a_huge_body_regardless_still_reads_the_refusal(port: HttpPort) -> None:
    answer = port.produce("/topics/orders/records", bytes(10 << 20), "application/octet-stream")
    assert answer.status == 413
    assert port.get("/topics").json == {"topics": []}


def test_a_chunked_body_without_end_is_refused_at_the_limit(port: HttpPort) -> None:
    head = b"POST /topics/orders/records HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    found = exchange(port, head + 5 * (b"10000\r\n" + bytes(0x10000) + b"\r\n"))
    assert [status for status, _ in found] == [413]


def test_what_is_discarded_after_a_refusal_is_bounded(port: HttpPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "DISCARD_MAX_BYTES", 1 << 20)
    monkeypatch.setattr(session, "DISCARD_SECONDS", 600.0)
    with port.dial() as sock:
        sock.sendall(b"POST /topics/orders/records HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
        with pytest.raises(OSError):
            sock.sendall(bytes(64 << 20))


@pytest.mark.usefixtures("hasty")
def test_headers_without_end_are_refused(port: HttpPort) -> None:
    found = exchange(port, b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * (2 * session.HEADERS_MAX_BYTES))
    assert [status for status, _ in found] == [431]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello \r\n\r\n",
        b"\x00\x00\x00\x14\x00\x12\x00\x03\x00\x00\x00\x01\x00\x06kafka\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET  /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /topics/a/records HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    ],
)
@pytest.mark.usefixtures("hasty")
def test_bytes_that_are_not_http_are_answered_and_the_connection_closed(port: HttpPort, sent: bytes) -> None:
    found = exchange(port, sent)
    assert len(found) == 1
    assert found[0][0] in (400, 413, 501, 505)
    assert json.loads(found[0][1])["error"]["message"]
    assert port.get("/health").status == 200


@pytest.mark.usefixtures("hasty")
def test_malformed_requests_are_counted(port: HttpPort) -> None:
    exchange(port, b"nonsense\r\n\r\n")
    assert port.metrics.protocol_errors == 1
    assert port.metrics.request_errors["http.unknown", 400] == 1


def test_upgrades_and_tunnels_are_not_entered(port: HttpPort) -> None:
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert [status for status, _ in exchange(port, upgrade)] == [200]
    tunnel = b"CONNECT example.test:443 HTTP/1.1\r\nHost: x\r\n" + CLOSE
    assert [status for status, _ in exchange(port, tunnel)] == [404]


def test_connections_beyond_the_limit_are_closed_at_once(port: HttpPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port.server, "_connections_max", 2)
    first, second = port.connection(), port.connection()
    for connection in (first, second):
        assert port.ask("GET", "/health", connection=connection).status == 200
    with port.dial() as third:
        assert third.recv(100) == b""
    assert port.metrics.connections_refused == 1
    first.close()
    wait_for("room", lambda: port.on_loop(lambda: len(port.server._sessions) == 1))
    assert port.get("/health").status == 200
    second.close()


def test_a_client_that_does_not_read_is_held_back(tmp_path: Path) -> None:
    port = HttpPort(tmp_path / "data", connection_queued_bytes=100_000)
    port.create("orders", max_message_bytes=8 << 20)
    port.produce("/topics/orders/records", bytes(4 << 20), "application/octet-stream")
    fetch = b"GET /topics/orders/partitions/0/records?max_bytes=8000000&format=binary HTTP/1.1\r\nHost: x\r\n\r\n"
    with port.dial() as sock:
        for _ in range(100):
            sock.sendall(fetch)
        wait_for("the first answers", lambda: port.metrics.requests.get("http.fetch"))
        (served,) = port.on_loop(lambda: list(port.server._sessions))
        wait_for("a held connection", lambda: port.on_loop(served._busy))
        count = port.on_loop(lambda: port.metrics.requests["http.fetch"].count)
        assert count < 100
        assert port.get("/health").status == 200
        sock.settimeout(DEADLINE_SECONDS)
        total = 0
        while total < 100 * (4 << 20):
            total += len(sock.recv(1 << 20))
        wait_for("all answers", lambda: port.on_loop(lambda: port.metrics.requests["http.fetch"].count) == 100)
    port.close()
    assert port.failures == []


def test_a_client_that_goes_away_while_its_request_waits_harms_nobody(port: HttpPort) -> None:
    port.create("orders")
    sock = port.dial()
    sock.sendall(b"GET /topics/orders/partitions/0/records?wait_ms=60000 HTTP/1.1\r\nHost: x\r\n\r\n")
    wait_for("the fetch to wait", lambda: port.on_loop(lambda: len(port.partitions.deadlines)))
    sock.close()
    wait_for("its end", lambda: port.on_loop(lambda: not port.server._sessions))
    assert port.produce("/topics/orders/records", b"later", "text/plain").status == 200
    assert port.get("/health").status == 200


def test_idle_connections_are_closed_and_busy_ones_are_not(tmp_path: Path) -> None:
    port = HttpPort(tmp_path / "data", connection_idle_ms=1000)
    port.create("orders")
    with port.dial() as quiet, port.dial() as waiting:
        waiting.sendall(b"GET /topics/orders/partitions/0/records?wait_ms=60000 HTTP/1.1\r\nHost: x\r\n" + CLOSE)
        wait_for("the fetch to wait", lambda: port.on_loop(lambda: len(port.partitions.deadlines)))
        quiet.sendall(b"GET /hea")
        wait_for("both connections", lambda: port.on_loop(lambda: len(port.server._sessions) == 2))
        port.on_loop(port.server.close_idle)
        assert port.on_loop(lambda: len(port.server._sessions)) == 2

        def age() -> None:
            for served in port.server._sessions:
                served.quiet_since -= 2.0
            port.server.close_idle()

        port.on_loop(age)
        assert quiet.recv(100) == b""
        port.produce("/topics/orders/records", b"now", "text/plain")
        assert answers(read_until_closed(waiting))[0][0] == 200
    port.close()


def test_a_handler_that_fails_unexpectedly_is_answered_and_logged(
    port: HttpPort, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> str | None:
        raise RuntimeError("a defect")

    connection = port.connection()
    object.__setattr__(port.server._services, "ready", broken)
    answer = port.ask("GET", "/ready", connection=connection)
    assert (answer.status, answer.error["kind"]) == (500, "InternalError")
    assert "a defect" in caplog.text
    assert port.ask("GET", "/health", connection=connection).status == 200
    connection.close()


def test_closing_the_server_ends_its_connections(port: HttpPort) -> None:
    connection = port.connection()
    assert port.ask("GET", "/health", connection=connection).status == 200
    port.on_loop(port.server.close)
    assert connection.sock.recv(10) == b""
    with pytest.raises(ConnectionRefusedError):
        port.dial()
