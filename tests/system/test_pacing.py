"""Connections within one machine are not paced, others are left to its rule."""

from __future__ import annotations

import contextlib
import socket

import pytest

from headrace.system.pacing import unpace_loopback


def rule(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.fixture
def paced() -> None:
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            pytest.skip("this kernel has no BBR, or not for everybody")


@pytest.mark.usefixtures("paced")
@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", b"reno"), ("127.0.0.2", b"bbr")])
def test_only_a_connection_with_the_same_host_at_both_ends_is_freed(host: str, expected: bytes) -> None:
    with socket.create_server((host, 0)) as server, socket.socket() as near:
        near.bind(("127.0.0.1", 0))
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        near.connect(server.getsockname())
        unpace_loopback(near)
        assert rule(near) == expected


@pytest.mark.usefixtures("paced")
def test_another_rule_of_the_machine_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as near:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        near.connect(server.getsockname())
        before = rule(near)
        unpace_loopback(near)
        assert rule(near) == before


def test_a_connection_that_is_gone_or_no_tcp_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        near.close()
        unpace_loopback(near)
    with contextlib.closing(socket.socket()) as never:
        unpace_loopback(never)
