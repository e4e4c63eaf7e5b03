"""Two ends of one network and the means to let it run, for the network's contract and the tests of sockets."""

from __future__ import annotations

import asyncio
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from certificates import Certificate
from headrace.ports.network import Address, Channel, Listener, Network, Session
from headrace.system.network import SocketNetwork
from headrace.virtual.clock import VirtualClock
from headrace.virtual.network import VirtualNetwork

DEADLINE_SECONDS = 120.0
TURN_SECONDS = 0.001
LENGTH = struct.Struct(">I")
LOCAL = Address("127.0.0.1", 0)


class Recorder:
    """A session that takes everything and notes what happened."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.data = bytearray()
        self.offers: list[int] = []
        self.drains = 0
        self.reasons: list[str] = []

    @property
    def end(self) -> Channel:
        assert self.channel is not None
        return self.channel

    @property
    def is_closed(self) -> bool:
        return bool(self.reasons)

    def opened(self, channel: Channel) -> None:
        self.channel = channel

    def received(self, data: memoryview) -> int:
        self.offers.append(len(data))
        return self.take(data)

    def take(self, data: memoryview) -> int:
        self.data += data
        return len(data)

    def drained(self) -> None:
        self.drains += 1

    def closed(self, reason: str) -> None:
        self.reasons.append(reason)


class FrameReader(Recorder):
    """A session that takes whole frames only, each led by its length in four bytes."""

    def __init__(self, frames_before_pause: int = 1 << 30) -> None:
        super().__init__()
        self.frames: list[bytes] = []
        self.frames_before_pause = frames_before_pause

    def take(self, data: memoryview) -> int:
        used = 0
        while len(data) - used >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data, used)
            end = used + LENGTH.size + length
            if end > len(data):
                self.end.want_bytes = LENGTH.size + length
                break
            if len(self.frames) >= self.frames_before_pause:
                self.end.pause()
                break
            self.frames.append(bytes(data[used + LENGTH.size : end]))
            used = end
        return used


def frame(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


class Joined:
    """A network under test: where to listen, where to connect, and how to let it run."""

    listening: Network
    connecting: Network
    server_tls: object | None = None
    client_tls: object | None = None

    def turn(self) -> None:
        raise NotImplementedError

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        end = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < end, f"waited {DEADLINE_SECONDS:g} s for {what}"
            self.turn()

    def settle(self) -> None:
        """Let everything that is under way happen."""
        for _ in range(20):
            self.turn()

    def listen(self, accept: Callable[[], Session | None], address: Address = LOCAL) -> Listener:
        return self.listening.listen(address, accept, self.server_tls)

    def connect(self, address: Address, session: Session) -> None:
        self.connecting.connect(address, session, self.client_tls)

    def pair(self, server: Recorder, client: Recorder) -> None:
        """Connect two sessions and wait until both are open."""
        listener = self.listen(lambda: server)
        self.connect(listener.address, client)
        self.wait("both ends", lambda: server.channel and client.channel)
        listener.close()


class JoinedSockets(Joined):
    def __init__(
        self, loop: asyncio.AbstractEventLoop, limit_bytes: int = 256 << 20, certificate: Certificate | None = None
    ) -> None:
        self.loop = loop
        self.network = self.listening = self.connecting = SocketNetwork(loop, limit_bytes)
        if certificate is not None:
            self.server_tls, self.client_tls = certificate.server_context(), certificate.client_context()

    def turn(self) -> None:
        self.loop.call_later(TURN_SECONDS, self.loop.stop)
        self.loop.run_forever()


class JoinedMemory(Joined):
    def __init__(self, seed: int) -> None:
        self.clock = VirtualClock()
        self.network = VirtualNetwork(self.clock, seed)
        self.listening, self.connecting = self.network.host("north"), self.network.host("south")

    def turn(self) -> None:
        self.clock.advance(TURN_SECONDS)


@contextmanager
def sockets(limit_bytes: int = 256 << 20, certificate: Certificate | None = None) -> Iterator[JoinedSockets]:
    loop = uvloop.new_event_loop()
    failures: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    joined = JoinedSockets(loop, limit_bytes, certificate)
    try:
        yield joined
        joined.turn()
    finally:
        loop.close()
    assert failures == [], "something was raised on the loop"


def pattern(count: int) -> bytes:
    """Bytes in which any shift or loss shows."""
    return array("Q", range(count // 8 + 1)).tobytes()[:count]


def written(folder: Path, content: bytes) -> str:
    path = folder / "content"
    path.write_bytes(content)
    return str(path)
