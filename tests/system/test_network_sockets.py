"""What only real sockets have: sendfile, TLS, resets, the shared budget of receive buffers."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from certificates import Certificate, self_signed
from headrace.errors import OperatorError
from headrace.ports.disk import FileSlice
from headrace.ports.network import Address
from headrace.system import channel as channel_module
from headrace.system.disk import SystemDisk
from headrace.system.network import SocketNetwork
from headrace.system.receive_buffers import LEAN_READ_BYTES
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from proving import proves
from system.joined import DEADLINE_SECONDS, FrameReader, JoinedSockets, Recorder, frame, pattern, sockets, written

TESTS = Path(__file__).resolve().parent.parent
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
SENDFILE = re.compile(r"sendfile(?:64)?\(.*\) = (\d+)")


@pytest.fixture
def joined() -> Iterator[JoinedSockets]:
    with sockets() as joined:
        yield joined


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("certificate"))


def dial(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), DEADLINE_SECONDS)


# sendfile


def received_from(process: subprocess.Popen[str], tls: ssl.SSLContext | None) -> bytes:
    assert process.stdout is not None
    got = bytearray()
    with dial(Address("127.0.0.1", int(process.stdout.readline()))) as plain:
        sock = plain if tls is None else tls.wrap_socket(plain)
        while piece := sock.recv(1 << 20):
            got += piece
        sock.close()
    return bytes(got)


def sent_by_sendfile(folder: Path, content: bytes, certificate: Certificate | None) -> int:
    """Send the content from a process under strace; how many bytes of it went by sendfile."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    trace = folder / "trace"
    command = ["strace", "-f", "-e", "trace=sendfile", "-o", str(trace), sys.executable]
    command += [str(TESTS / "system" / "serving_slices.py"), written(folder, content)]
    if certificate is not None:
        command.append(str(certificate.certificate_path.parent))
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert received_from(process, certificate.client_context() if certificate else None) == content
        assert process.wait(DEADLINE_SECONDS) == 0
    return sum(int(count) for count in SENDFILE.findall(trace.read_text()))


@proves("G9")
def test_a_large_slice_goes_out_by_sendfile_to_the_last_byte(tmp_path: Path) -> None:
    content = pattern(5 << 20)
    assert sent_by_sendfile(tmp_path, content, None) == len(content)


@proves("G9")
def test_under_tls_a_slice_is_read_instead(tmp_path: Path, certificate: Certificate) -> None:
    assert sent_by_sendfile(tmp_path, pattern(5 << 20), certificate) == 0


@proves("G9")
def test_a_small_slice_is_read_instead(tmp_path: Path) -> None:
    assert sent_by_sendfile(tmp_path, pattern(20_000), None) == 0


def test_a_file_without_a_descriptor_is_read_instead(joined: JoinedSockets) -> None:
    content = pattern(300_000)
    disk = VirtualDisk(VirtualClock())
    disk.make_folder("/data")
    file = disk.open("/data/log", create=True, writable=True)
    file.pwritev([content], 0)
    server, client = Recorder(), Recorder()
    joined.pair(server, client)
    server.end.send([FileSlice(file, 0, len(content))])
    joined.wait("all of it", lambda: len(client.data) == len(content))
    assert client.data == content


@pytest.mark.parametrize("count", [1000, 1_000_000])
def test_a_file_that_ends_too_early_ends_the_connection(joined: JoinedSockets, tmp_path: Path, count: int) -> None:
    file = SystemDisk().open(written(tmp_path, b"short"))
    server, client, source = Recorder(), Recorder(), Doubted()
    joined.pair(server, client)
    server.end.send([FileSlice(file, 0, count, source)])
    joined.wait("the end", lambda: server.is_closed and client.is_closed)
    assert server.reasons == [f"sending failed: {file.path} ends before position {count}"]
    assert source.doubts == 1, "whoever gave it out hears of it"


@pytest.mark.parametrize("count", [1000, 1_000_000])
def test_a_sector_that_cannot_be_read_ends_the_connection_and_is_told(
    joined: JoinedSockets, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = SystemDisk().open(written(tmp_path, pattern(count)))
    monkeypatch.setattr(os, "sendfile", fails)
    monkeypatch.setattr(os, "pread", fails)
    server, client, source = Recorder(), Recorder(), Doubted()
    joined.pair(server, client)
    server.end.send([b"head", FileSlice(file, 0, count, source)])
    joined.wait("the end", lambda: server.is_closed and client.is_closed)
    assert server.reasons == ["sending failed: Input/output error"]
    assert source.doubts == 1


def test_a_peer_that_is_gone_says_nothing_about_the_file(
    joined: JoinedSockets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    file = SystemDisk().open(written(tmp_path, pattern(1_000_000)))
    monkeypatch.setattr(os, "sendfile", fails)
    server, client, source = Recorder(), Recorder(), Doubted()
    joined.pair(server, client)
    server.end.send([FileSlice(file, 0, 1_000_000, source)])
    joined.wait("the end", lambda: server.is_closed and client.is_closed)
    assert source.doubts == 0


class Doubted:
    def __init__(self) -> None:
        self.doubts = 0

    def doubt(self) -> None:
        self.doubts += 1


# Peers that go away or misbehave


def test_a_reset_by_the_peer_is_told_as_such(joined: JoinedSockets) -> None:
    server = Recorder()
    listener = joined.listen(lambda: server)
    peer = dial(listener.address)
    joined.wait("the connection", lambda: server.channel)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    peer.close()
    joined.wait("the end", lambda: server.is_closed)
    assert server.reasons == ["receiving failed: Connection reset by peer"]


def test_sending_to_a_peer_that_has_gone_closes_once(joined: JoinedSockets) -> None:
    server = Recorder()
    listener = joined.listen(lambda: server)
    peer = dial(listener.address)
    joined.wait("the connection", lambda: server.channel)
    server.end.pause()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    peer.close()
    while not server.is_closed:
        server.end.send([b"x"])
    assert len(server.reasons) == 1
    assert server.reasons[0].startswith("sending failed: ")


def test_a_peer_that_is_gone_before_it_is_accepted_harms_nobody(joined: JoinedSockets) -> None:
    sessions: list[Recorder] = []

    def accept() -> Recorder:
        sessions.append(Recorder())
        return sessions[-1]

    listener = joined.listen(accept)
    for _ in range(20):
        peer = dial(listener.address)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        peer.close()
    last = dial(listener.address)
    last.sendall(b"still here")
    joined.wait("the last one", lambda: sessions and sessions[-1].data == b"still here")
    joined.wait("the others to end", lambda: all(session.is_closed for session in sessions[:-1]))
    last.close()


def test_a_host_name_that_does_not_resolve_is_told(joined: JoinedSockets) -> None:
    client = Recorder()
    joined.connect(Address("no such host", 1), client)
    joined.wait("the refusal", lambda: client.is_closed)
    assert client.reasons[0].startswith("cannot connect to no such host:1: ")


@pytest.mark.parametrize("address", [Address("127.0.0.1", 70_000), Address("192.0.2.1", 0), Address("no such host", 0)])
def test_an_address_that_cannot_be_had_is_named(joined: JoinedSockets, address: Address) -> None:
    with pytest.raises(OperatorError, match=f"cannot listen on {re.escape(str(address))}: "):
        joined.listen(Recorder, address)


def test_running_out_of_descriptors_pauses_accepting_and_goes_on(
    joined: JoinedSockets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.system.network.ACCEPT_PAUSE_SECONDS", 0.01)
    server = Recorder()
    listener = joined.listen(lambda: server)
    plain = listener._sock  # type: ignore[attr-defined]

    class FullTable:
        """The listening socket of a process whose descriptors are used up for a while."""

        def accept(self) -> None:
            listener._sock = plain  # type: ignore[attr-defined]
            raise OSError(errno.EMFILE, "Too many open files")

        def fileno(self) -> int:
            return int(plain.fileno())

    listener._sock = FullTable()  # type: ignore[attr-defined]
    with dial(listener.address):
        joined.wait("the connection in the end", lambda: server.channel)
    assert "cannot accept a connection" in caplog.text
    listener.close()


# TLS


def test_plain_bytes_to_a_tls_port_end_the_connection_before_it_opens(certificate: Certificate) -> None:
    with sockets(certificate=certificate) as joined:
        server = Recorder()
        listener = joined.listen(lambda: server)
        with dial(listener.address) as peer:
            peer.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            joined.wait("the end", lambda: server.is_closed)
        assert server.channel is None
        assert server.reasons[0].startswith("TLS handshake failed: ")


def test_a_peer_that_never_shakes_hands_is_let_go(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "HANDSHAKE_SECONDS", 0.01)
    with sockets(certificate=certificate) as joined:
        server = Recorder()
        listener = joined.listen(lambda: server)
        with dial(listener.address):
            joined.wait("the end", lambda: server.is_closed)
        assert server.reasons == ["no TLS handshake within 0.01 s"]


def test_what_tls_has_decrypted_already_is_offered_after_a_pause(certificate: Certificate) -> None:
    class OneBite(Recorder):
        """Pauses after each offer, so that the rest of a TLS record waits inside the TLS layer."""

        def take(self, data: memoryview) -> int:
            self.end.pause()
            return super().take(data)

    with sockets(certificate=certificate) as joined:
        joined.network.buffers.shared = joined.network.buffers.shared[:100]
        server, client = OneBite(), Recorder()
        joined.pair(server, client)
        client.end.send([pattern(1000)])
        for bite in range(1, 11):
            joined.wait(f"bite {bite}", lambda bite=bite: len(server.data) == 100 * bite)  # type: ignore[misc]
            joined.settle()
            assert len(server.data) == 100 * bite
            server.end.resume()
        assert server.data == pattern(1000)


def test_a_tls_peer_hears_the_end_of_the_stream(certificate: Certificate) -> None:
    with sockets(certificate=certificate) as joined:
        server = Recorder()
        listener = joined.listen(lambda: server)
        plain = dial(listener.address)
        peer = certificate.client_context().wrap_socket(
            plain, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
        peer.settimeout(0)
        got = bytearray()

        def all_read() -> bool:
            try:
                piece = peer.recv(100)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            got.extend(piece)
            return not piece

        def hands_shaken() -> bool:
            try:
                peer.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            return server.channel is not None

        joined.wait("the handshake", hands_shaken)
        server.end.send([b"all of it"])
        server.end.close()
        joined.wait("the end of the stream", all_read)
        assert got == b"all of it"
        peer.close()


# The budget of receive buffers


def start_frames(
    joined: JoinedSockets, count: int, sent_bytes: int, frame_bytes: int
) -> list[tuple[FrameReader, Recorder]]:
    """Connections that have each sent the first part of a frame."""
    pairs = []
    for _ in range(count):
        server, client = FrameReader(), Recorder()
        joined.pair(server, client)
        client.end.send([frame(bytes(frame_bytes))[:sent_bytes]])
        pairs.append((server, client))
    joined.settle()
    return pairs


def finish(client: Recorder, sent_bytes: int, frame_bytes: int) -> None:
    client.end.send([frame(bytes(frame_bytes))[sent_bytes:]])


def test_frames_beyond_the_budget_wait_until_others_are_done() -> None:
    with sockets(limit_bytes=3 << 20) as joined:
        buffers = joined.network.buffers
        pairs = start_frames(joined, 6, 100_000, 1 << 20)
        assert buffers.lean
        assert buffers.held_bytes <= (3 << 20) + 6 * 100_000
        for _, client in pairs[3:]:
            finish(client, 100_000, 1 << 20)
        joined.settle()
        assert [len(server.frames) for server, _ in pairs] == [0] * 6
        for _, client in pairs[:3]:
            finish(client, 100_000, 1 << 20)
        joined.wait("all frames", lambda: all(server.frames for server, _ in pairs))
        assert not buffers.lean
        assert buffers.held_bytes == 0


def test_whoever_reads_while_others_starve_keeps_little() -> None:
    with sockets(limit_bytes=1 << 20) as joined:
        start_frames(joined, 2, 100_000, 4 << 20)
        assert joined.network.buffers.lean
        before = joined.network.buffers.held_bytes
        late = start_frames(joined, 5, 400_000, 4 << 20)
        assert joined.network.buffers.held_bytes <= before + 5 * LEAN_READ_BYTES
        small, client = FrameReader(), Recorder()
        joined.pair(small, client)
        client.end.send([frame(b"small ones pass")])
        joined.wait("the small one", lambda: small.frames)
        assert not any(server.frames for server, _ in late)


def test_growing_frames_that_all_starve_do_not_wait_for_each_other_for_ever() -> None:
    with sockets(limit_bytes=4 << 20) as joined:
        pairs = start_frames(joined, 4, 900_000, 6 << 20)
        for _, client in pairs:
            finish(client, 900_000, 6 << 20)
        joined.wait("all frames", lambda: all(server.frames for server, _ in pairs))
        assert joined.network.buffers.held_bytes == 0


def test_starving_channels_that_close_do_not_hold_up_the_line() -> None:
    with sockets(limit_bytes=2 << 20) as joined:
        pairs = start_frames(joined, 6, 100_000, 1_000_000)
        for server, _ in pairs[2:5]:
            server.end.abort()
        finish(pairs[5][1], 100_000, 1_000_000)
        finish(pairs[0][1], 100_000, 1_000_000)
        joined.wait("the last in line", lambda: pairs[5][0].frames)
        pairs[1][0].end.abort()
        assert joined.network.buffers.held_bytes == 0


def test_a_starving_session_that_was_paused_still_gets_its_whole_frames() -> None:
    with sockets(limit_bytes=1 << 20) as joined:
        start_frames(joined, 1, 100_000, 4 << 20)
        server, client = FrameReader(frames_before_pause=1), Recorder()
        joined.pair(server, client)
        client.end.send([frame(b"one"), frame(b"two"), frame(b"three")])
        joined.wait("the first", lambda: server.frames)
        joined.settle()
        server.frames_before_pause = 10
        server.end.resume()
        joined.wait("the others", lambda: len(server.frames) == 3)
        client.end.send([frame(b"four")])
        joined.wait("one more", lambda: len(server.frames) == 4)


def test_a_claim_of_length_alone_costs_no_such_memory() -> None:
    with sockets() as joined:
        start_frames(joined, 3, 10, 100 << 20)
        assert joined.network.buffers.held_bytes <= 3 << 20


def test_an_idle_connection_holds_no_buffer(joined: JoinedSockets) -> None:
    server, client = FrameReader(), Recorder()
    joined.pair(server, client)
    client.end.send([frame(bytes(2 << 20))])
    joined.wait("the frame", lambda: server.frames)
    assert joined.network.buffers.held_bytes == 0
    assert isinstance(joined.network, SocketNetwork)
