"""The contract of the network port, on real sockets, on real sockets under TLS, and in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from certificates import self_signed
from system.joined import JoinedMemory, JoinedSockets, Recorder, sockets
from system.network_contract import NetworkContract


class TestSockets(NetworkContract):
    @pytest.fixture
    def joined(self) -> Iterator[JoinedSockets]:
        with sockets() as joined:
            yield joined


class TestSocketsUnderTls(NetworkContract):
    @pytest.fixture
    def joined(self, tmp_path: Path) -> Iterator[JoinedSockets]:
        with sockets(certificate=self_signed(tmp_path)) as joined:
            yield joined


class TestMemory(NetworkContract):
    @pytest.fixture
    def joined(self, seed: int) -> JoinedMemory:
        return JoinedMemory(seed)

    def test_what_is_sent_into_a_cut_arrives_in_order_after_it(self, joined: JoinedMemory) -> None:
        server, client = Recorder(), Recorder()
        joined.pair(server, client)
        joined.network.cut("north", "south")
        for n in range(10):
            server.end.send([bytes([n])])
            joined.settle()
        assert client.data == b""
        joined.network.heal("north", "south")
        server.end.send([b"\x0a"])
        joined.wait("eleven bytes", lambda: len(client.data) == 11)
        assert client.data == bytes(range(11))

    def test_a_connection_into_a_cut_opens_after_it(self, joined: JoinedMemory) -> None:
        server, client = Recorder(), Recorder()
        listener = joined.listen(lambda: server)
        joined.network.cut("north", "south")
        joined.connect(listener.address, client)
        joined.settle()
        assert (client.channel, client.reasons) == (None, [])
        joined.network.heal("north", "south")
        joined.wait("both ends", lambda: client.channel and server.channel)

    def test_a_reset_ends_both_sides_and_loses_what_was_under_way(self, joined: JoinedMemory) -> None:
        server, client = Recorder(), Recorder()
        joined.pair(server, client)
        server.end.send([b"lost"])
        joined.network.reset("north", "south")
        joined.settle()
        assert client.data == b""
        assert client.reasons == server.reasons == ["connection reset by peer"]

    def test_one_seed_gives_one_course(self) -> None:
        def course(seed: int) -> list[int]:
            joined = JoinedMemory(seed)
            server, client = Recorder(), Recorder()
            joined.pair(server, client)
            server.end.send([bytes(1_000_000)])
            joined.wait("all of it", lambda: len(client.data) == 1_000_000)
            return client.offers

        assert course(1) == course(1)
        assert course(1) != course(2)
