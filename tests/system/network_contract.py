"""What every implementation of the Network port does. A test class of its own binds this to one implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import OperatorError
from headrace.ports.disk import FileSlice
from headrace.ports.network import Address
from headrace.system.disk import SystemDisk
from proving import proves
from system.joined import FrameReader, Joined, Recorder, frame, pattern, written


class NetworkContract:
    """`joined` is a fixture of the class that binds the contract."""

    def test_bytes_arrive_whole_and_in_order_both_ways(self, joined: Joined) -> None:
        server, client = Recorder(), Recorder()
        joined.pair(server, client)
        client.end.send([b"to the ", bytearray(b"server"), memoryview(b"!")])
        server.end.send([b"to the client"])
        joined.wait("both messages", lambda: len(server.data) == 14 and len(client.data) == 13)
        assert bytes(server.data) == b"to the server!"
        assert bytes(client.data) == b"to the client"

    def test_each_end_knows_both_addresses(self, joined: Joined) -> None:
        server, client = Recorder(), Recorder()
        joined.pair(server, client)
        assert server.end.peer == client.end.local
        assert server.end.local == client.end.peer
        assert str(server.end.local) == f"{server.end.local.host}:{server.end.local.port}"

    def test_a_cut_frame_is_offered_again_with_more_behind_it(self, joined: Joined) -> None:
        server, client = FrameReader(), Recorder()
        joined.pair(server, client)
        whole = frame(b"abcdefgh")
        for place in range(len(whole)):
            client.end.send([whole[place : place + 1]])
            joined.settle()
        client.end.send([whole + whole[:5]])
        client.end.send([whole[5:]])
        joined.wait("three frames", lambda: len(server.frames) == 3)
        assert server.frames == [b"abcdefgh"] * 3

    @pytest.mark.parametrize("count", [100_000, 3_000_000, 20_000_000])
    def test_a_large_frame_arrives_whole_among_small_ones(self, joined: Joined, count: int) -> None:
        server, client = FrameReader(), Recorder()
        joined.pair(server, client)
        large = pattern(count)
        client.end.send([frame(b"before"), frame(large), frame(b"after")])
        joined.wait("three frames", lambda: len(server.frames) == 3)
        assert server.frames == [b"before", large, b"after"]

    def test_a_session_that_never_says_what_it_wants_still_gets_all(self, joined: Joined) -> None:
        class Hesitant(Recorder):
            def take(self, data: memoryview) -> int:
                return super().take(data) if len(data) >= 300_000 else 0

        server, client = Hesitant(), Recorder()
        joined.pair(server, client)
        client.end.send([pattern(300_000)])
        joined.wait("all of it", lambda: server.data)
        assert server.data == pattern(300_000)

    def test_a_paused_session_hears_nothing_and_then_what_was_kept(self, joined: Joined) -> None:
        server, client = FrameReader(frames_before_pause=2), Recorder()
        joined.pair(server, client)
        client.end.send([frame(bytes([n])) for n in range(5)])
        joined.wait("the first two", lambda: len(server.frames) == 2)
        client.end.send([frame(b"later")])
        joined.settle()
        assert server.frames == [b"\x00", b"\x01"]
        server.frames_before_pause = 100
        server.end.resume()
        joined.wait("the rest", lambda: len(server.frames) == 6)
        assert server.frames == [b"\x00", b"\x01", b"\x02", b"\x03", b"\x04", b"later"]

    def test_what_a_slow_reader_does_not_take_stays_queued(self, joined: Joined) -> None:
        server, client = Recorder(), Recorder()
        joined.pair(server, client)
        client.end.pause()
        large = pattern(32 << 20)
        server.end.send([large])
        joined.settle()
        assert 0 < server.end.queued_bytes() < len(large)
        assert server.drains == 0
        client.end.resume()
        joined.wait("all of it", lambda: len(client.data) == len(large))
        joined.wait("an empty queue", lambda: server.drains)
        assert client.data == large
        assert server.end.queued_bytes() == 0

    def test_close_first_sends_what_is_queued(self, joined: Joined) -> None:
        server, client = Recorder(), Recorder()
        joined.pair(server, client)
        large = pattern(16 << 20)
        server.end.send([large])
        server.end.close()
        server.end.send([b"too late"])
        joined.wait("the end", lambda: client.is_closed and server.is_closed)
        assert client.data == large
        assert client.reasons == ["closed by the peer"]
        assert server.reasons == ["closed by us"]

    def test_a_closing_session_receives_nothing_more(self, joined: Joined) -> None:
        server, client = Recorder(), Recorder()
        joined.pair(server, client)
        client.end.pause()
        server.end.send([pattern(16 << 20)])
        server.end.close()
        client.end.send([b"unwanted"])
        joined.settle()
        assert server.data == b""
        server.end.abort()
        assert server.reasons == ["closed by us"]

    def test_abort_drops_what_is_queued_and_tells_the_session_once(self, joined: Joined) -> None:
        server, client = Recorder(), Recorder()
        joined.pair(server, client)
        client.end.pause()
        server.end.send([pattern(32 << 20)])
        server.end.abort()
        server.end.abort()
        server.end.close()
        client.end.resume()
        joined.wait("the end", lambda: client.is_closed)
        assert server.reasons == ["closed by us"]
        assert len(client.data) < 32 << 20

    def test_a_dead_channel_takes_calls_and_does_nothing(self, joined: Joined) -> None:
        server, client = Recorder(), Recorder()
        joined.pair(server, client)
        server.end.abort()
        server.end.send([b"lost"])
        server.end.pause()
        server.end.resume()
        assert server.end.queued_bytes() == 0
        joined.wait("the end", lambda: client.is_closed)
        assert client.data == b""

    def test_empty_parts_are_nothing(self, joined: Joined) -> None:
        server, client = Recorder(), Recorder()
        joined.pair(server, client)
        server.end.send([])
        server.end.send([b""])
        server.end.send([b"", b"a", b"", b"b", b""])
        joined.wait("two letters", lambda: len(client.data) == 2)
        assert client.data == b"ab"

    def test_nobody_listens(self, joined: Joined) -> None:
        listener = joined.listen(Recorder)
        address = listener.address
        listener.close()
        listener.close()
        client = Recorder()
        joined.connect(address, client)
        joined.wait("the refusal", lambda: client.is_closed)
        assert client.channel is None
        assert client.reasons == [f"cannot connect to {address}: Connection refused"]

    def test_a_refused_session_closes_the_connection(self, joined: Joined) -> None:
        listener = joined.listen(lambda: None)
        client = Recorder()
        joined.connect(listener.address, client)
        joined.wait("the end", lambda: client.is_closed)
        listener.close()

    def test_a_port_in_use_is_named_with_the_remedy(self, joined: Joined) -> None:
        listener = joined.listen(Recorder)
        taken = listener.address
        with pytest.raises(OperatorError, match=f"cannot listen on {taken}: the port is in use; .* choose another"):
            joined.listen(Recorder, taken)
        listener.close()
        joined.listen(Recorder, taken).close()

    @proves("G9")
    @pytest.mark.parametrize(
        "cut",
        [
            lambda content: [(0, 100)],
            lambda content: [(10, len(content) - 10)],
            lambda content: [(n * 1000, 1000) for n in range(300)],
            lambda content: [(0, 70_000), (500_000, 10), (1_000_000, 2_000_000), (7, 65_536), (7, 65_535)],
        ],
        ids=["small", "large", "many small", "mixed"],
    )
    def test_slices_of_a_file_arrive_as_the_bytes_they_are(
        self, joined: Joined, tmp_path: Path, cut: Callable[[bytes], list[tuple[int, int]]]
    ) -> None:
        content = pattern(12 << 20)
        file = SystemDisk().open(written(tmp_path, content))
        server, client = Recorder(), Recorder()
        joined.pair(server, client)
        expected = bytearray()
        for position, count in cut(content):
            server.end.send([b"<", FileSlice(file, position, count), b">"])
            expected += b"<" + content[position : position + count] + b">"
        joined.wait("all slices", lambda: len(client.data) >= len(expected))
        assert client.data == expected

    def test_many_connections_do_not_disturb_each_other(self, joined: Joined) -> None:
        servers: list[FrameReader] = []

        def accept() -> FrameReader:
            servers.append(FrameReader())
            return servers[-1]

        listener = joined.listen(accept)
        clients = [Recorder() for _ in range(40)]
        for client in clients:
            joined.connect(listener.address, client)
        joined.wait("all open", lambda: all(client.channel for client in clients) and len(servers) == 40)
        for n, client in enumerate(clients):
            client.end.send([frame(bytes([n]) * 50_000)[:30_000]])
        joined.settle()
        for n, client in enumerate(clients):
            client.end.send([frame(bytes([n]) * 50_000)[30_000:]])
        joined.wait("all frames", lambda: all(server.frames for server in servers))
        assert sorted(server.frames[0] for server in servers) == [bytes([n]) * 50_000 for n in range(40)]
        listener.close()

    def test_an_ipv6_address_is_written_in_brackets(self, joined: Joined) -> None:
        assert str(Address("::1", 9092)) == "[::1]:9092"
