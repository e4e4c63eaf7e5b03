"""A network in memory: hosts joined by links that delay, hold back and cut what passes, all on one clock and one seed.

A connection keeps the order of its bytes, as TCP does; two connections do not wait for each other. What was sent into a
cut waits there and arrives after `heal`; `reset` loses it. The pieces that arrive are as large as the random source
says, so that a session sees frames cut anywhere. A host that was given the clock of a process hears of everything by
that clock, so it hears nothing while the process is paused, and nothing ever after it died.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from headrace.errors import CannotListen
from headrace.ports.clock import Clock
from headrace.ports.disk import FileSlice
from headrace.ports.network import Address, Part, Session
from headrace.virtual.clock import VirtualClock, VirtualTimer
from headrace.virtual.process import Process

WINDOW_BYTES: Final = 256 << 10
PIECE_BYTES: Final = 64 << 10
FIRST_FREE_PORT: Final = 40_000

Way = tuple[str, str]
"""From which host to which."""
Overheard = Callable[["VirtualChannel", Sequence[Part]], None]


class VirtualNetwork:
    """The wires between hosts; each host's own `Network` comes from `host`."""

    def __init__(
        self, clock: VirtualClock, seed: int | None = None, delay_seconds: tuple[float, float] = (0.0001, 0.001)
    ) -> None:
        self.clock = clock
        self.delay_seconds = delay_seconds
        self._random = None if seed is None else random.Random(seed)
        self._listeners: dict[Address, VirtualListener] = {}
        self._channels: dict[VirtualChannel, None] = {}
        self._hosts: dict[str, VirtualHost] = {}
        self._cuts: set[Way] = set()
        self._slow: dict[Way, tuple[float, float]] = {}
        self._held: deque[tuple[Way, Callable[[], None]]] = deque()
        self._next_port = FIRST_FREE_PORT

    def host(self, name: str, clock: Clock | None = None) -> VirtualHost:
        """The network as that host sees it; `clock` is that of the process there."""
        self._hosts[name] = VirtualHost(self, name, clock)
        return self._hosts[name]

    # What is done to the wires.

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between the two hosts, either way, and nobody is told."""
        self.cut_one_way(one, other)
        self.cut_one_way(other, one)

    def cut_one_way(self, source: str, target: str) -> None:
        self._cuts.add((source, target))

    def heal(self, one: str, other: str) -> None:
        """What was sent into the cut arrives now, in the order in which it was sent."""
        self._cuts -= {(one, other), (other, one)}
        held, self._held = self._held, deque()
        for way, call in held:
            self.pass_on(way, call)

    def slow(self, one: str, other: str, delay_seconds: tuple[float, float] | None) -> None:
        """Another delay between the two hosts than elsewhere; None: as elsewhere."""
        for way in ((one, other), (other, one)):
            if delay_seconds is None:
                self._slow.pop(way, None)
            else:
                self._slow[way] = delay_seconds

    def reset(self, one: str, other: str) -> None:
        """End every connection between the two hosts; what was under way is lost."""
        for channel in list(self._channels):
            if {channel.local.host, channel.peer.host} == {one, other}:
                channel.drop("connection reset by peer")

    def vanish(self, host: VirtualHost, *, silent: bool) -> None:
        """The process on the host is dead. Its peers hear that the connections ended; `silent`, as after a power cut,
        they hear nothing and what they send is lost."""
        for listener in [listener for listener in self._listeners.values() if listener.host is host]:
            self.unbind(listener)
        for channel in [channel for channel in self._channels if channel.host is host]:
            channel.vanish(silent=silent)

    # What hosts and channels ask of their network.

    def pass_on(self, way: Way, call: Callable[[], None]) -> None:
        if self._cuts and way in self._cuts:
            self._held.append((way, call))
        else:
            call()

    def draw_delay(self, way: Way) -> float:
        least, most = self._slow.get(way, self.delay_seconds) if self._slow else self.delay_seconds
        return least if self._random is None else least + (most - least) * self._random.random()

    def draw_piece(self) -> int:
        return PIECE_BYTES if self._random is None else 1 + int(self._random.random() * PIECE_BYTES)

    def draw_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def bind(self, listener: VirtualListener) -> None:
        if listener.address in self._listeners:
            raise CannotListen(
                f"cannot listen on {listener.address}: the port is in use; stop what uses it or choose another"
            )
        self._listeners[listener.address] = listener

    def unbind(self, listener: VirtualListener) -> None:
        self._listeners.pop(listener.address, None)

    def reach(self, caller: VirtualHost, local: Address, address: Address, session: Session) -> None:
        """The moment at which a call for a connection reaches the other host."""
        listener = self._listeners.get(address)
        if listener is None:
            reason = f"cannot connect to {address}: Connection refused"
            way = (address.host, caller.name)
            refuse = partial(self.pass_on, way, partial(caller.hear, partial(session.closed, reason)))
            self.clock.call_later(self.draw_delay(way), refuse)
            return
        listener.host.hear(lambda: self._accept(listener, caller, local, session))

    def _accept(self, listener: VirtualListener, caller: VirtualHost, local: Address, session: Session) -> None:
        accepted = listener.accept()
        address = listener.address
        near = VirtualChannel(self, caller, local, address, session)
        far = VirtualChannel(self, listener.host, address, local, accepted)
        near.other, far.other = far, near
        self._channels |= {near: None, far: None}
        far.transmit(near.opened)
        if accepted is None:
            far.close()
        else:
            accepted.opened(far)

    def is_replaced(self, host: VirtualHost) -> bool:
        """Whether another process has the host's network by now."""
        return self._hosts[host.name] is not host

    def forget(self, channel: VirtualChannel) -> None:
        self._channels.pop(channel, None)


class VirtualHost:
    """The network as one host sees it."""

    def __init__(self, network: VirtualNetwork, name: str, clock: Clock | None = None) -> None:
        self._network = network
        self._clock = clock
        self._process = clock if isinstance(clock, Process) else None
        self.name = name
        self.overheard: Overheard | None = None
        """Is told of everything that this host sends."""

    def hear(self, call: Callable[[], None]) -> None:
        """Something reaches this host."""
        if self._process is not None:
            self._process.hear(call)
        elif self._clock is None:
            call()
        else:
            self._clock.call_soon(call)

    def listen(
        self, address: Address, accept: Callable[[], Session | None], tls: object | None = None
    ) -> VirtualListener:
        port = address.port or self._network.draw_port()
        listener = VirtualListener(self._network, self, Address(self.name, port), accept)
        self._network.bind(listener)
        return listener

    def connect(self, address: Address, session: Session, tls: object | None = None) -> None:
        network = self._network
        local = Address(self.name, network.draw_port())
        way = (self.name, address.host)
        reach = partial(network.reach, self, local, address, session)
        network.clock.call_later(network.draw_delay(way), partial(network.pass_on, way, reach))


class VirtualListener:
    def __init__(
        self, network: VirtualNetwork, host: VirtualHost, address: Address, accept: Callable[[], Session | None]
    ) -> None:
        self._network = network
        self.host = host
        self.address = address
        self.accept = accept

    def close(self) -> None:
        self._network.unbind(self)


class _Arrival(VirtualTimer):
    """What one end of a connection has sent reaches the other."""

    __slots__ = ("end", "way")
    call: Callable[[], None]

    def __init__(self, way: Way, end: VirtualChannel, call: Callable[[], None]) -> None:
        self.way = way
        self.end = end
        self.call = call

    def run(self) -> None:
        self.end.network.pass_on(self.way, self._reach)

    def _reach(self) -> None:
        """What a dead process left behind is answered by its host."""
        if self.end.vanished:
            self.call()
        else:
            self.end.host.hear(self.call)


class VirtualChannel:
    """One end of a connection. `_under_way` bytes have left the other end and not been read here yet."""

    def __init__(
        self, network: VirtualNetwork, host: VirtualHost, local: Address, peer: Address, session: Session | None
    ) -> None:
        self.host = host
        self.local, self.peer = local, peer
        self._way = (local.host, peer.host)
        self.want_bytes = 0
        self.other: VirtualChannel
        self.network = network
        self._session = session
        self._out: deque[bytes | memoryview | FileSlice] = deque()
        self._out_bytes = 0
        self._under_way = 0
        self._arrived = bytearray()
        self._kept = bytearray()
        self._last_arrival = 0.0
        self._reading = True
        self._finished = False
        self._closing = False
        self._gone = False
        self.vanished = False

    def opened(self) -> None:
        """The other host has answered our call for a connection."""
        if not self._gone and self._session is not None:
            self._session.opened(self)

    # Receiving.

    def _arrive(self, data: bytes) -> None:
        if not self._gone:
            self._arrived += data
            self._read()
        elif self.vanished and self.network.is_replaced(self.host):
            self.transmit(partial(self.other.drop, "connection reset by peer"))

    def _read(self) -> None:
        """Take what has arrived; that opens the window for the other end."""
        if self._gone or not self._reading:
            return
        arrived = self._arrived
        if arrived:
            self._kept += arrived
            self._under_way -= len(arrived)
            arrived.clear()
            if self.other._out:
                self.network.clock.call_soon(lambda: self.other.host.hear(self.other.pump))
            if len(self._kept) >= self.want_bytes:
                self._offer()
        if self._finished and not self._gone and self._reading:
            self.drop("closed by the peer")

    def _offer(self) -> None:
        """Offer what there is; a session that has kept a view of it makes the deletion raise BufferError."""
        if self._session is None or not self._kept:
            return
        self.want_bytes = 0
        with memoryview(self._kept) as view:
            used = self._session.received(view)
        del self._kept[:used]

    def _end(self) -> None:
        """The other end sends nothing more."""
        self._finished = True
        self._read()

    def pause(self) -> None:
        self._reading = False

    def resume(self) -> None:
        if not self._reading and not self._gone and not self._closing:
            self._reading = True
            self.network.clock.call_soon(lambda: self.host.hear(self._resumed))

    def _resumed(self) -> None:
        if self._reading and not self._gone:
            self._offer()
            self._read()

    # Sending.

    def send(self, parts: Sequence[Part]) -> None:
        if self._gone or self._closing:
            return
        if self.host.overheard is not None:
            self.host.overheard(self, parts)
        for part in parts:
            count = len(part)
            if count:
                self._out.append(part if isinstance(part, FileSlice) else bytes(part))
                self._out_bytes += count
        self.pump()

    def queued_bytes(self) -> int:
        return self._out_bytes

    def pump(self) -> None:
        """Put on the wire what the window takes."""
        if self._gone:
            return
        had, out, other = self._out_bytes, self._out, self.other
        while out and other._under_way < WINDOW_BYTES:
            try:
                data = self._take(min(self.network.draw_piece(), WINDOW_BYTES - other._under_way))
            except OSError as error:
                self.drop(f"sending failed: {error.strerror or error}")
                return
            other._under_way += len(data)
            self.transmit(partial(other._arrive, data))
        if out:
            return
        if self._closing:
            self.drop("closed by us")
        elif had and self._session is not None:
            self._session.drained()

    def _take(self, count: int) -> bytes:
        head = self._out.popleft()
        size = len(head)
        if isinstance(head, FileSlice):
            if count < size:
                self._out.appendleft(head.part(count, size - count))
                head = head.part(0, count)
            self._out_bytes -= len(head)
            return head.read()
        if count < size:
            self._out.appendleft(memoryview(head)[count:])
            self._out_bytes -= count
            return bytes(head[:count])
        self._out_bytes -= size
        return bytes(head)

    def transmit(self, call: Callable[[], None]) -> None:
        network = self.network
        arrival = network.clock.now() + network.draw_delay(self._way)
        self._last_arrival = max(self._last_arrival, arrival)
        network.clock.set(self._last_arrival, _Arrival(self._way, self.other, call))

    # Closing.

    def close(self) -> None:
        if self._gone or self._closing:
            return
        self._closing = True
        self._reading = False
        if not self._out:
            self.drop("closed by us")

    def abort(self) -> None:
        self.drop("closed by us")

    def drop(self, reason: str) -> None:
        if self._gone:
            return
        self._gone = True
        self._out.clear()
        self._out_bytes = 0
        self.network.forget(self)
        self.transmit(self.other._end)
        if self._session is not None:
            self._session.closed(reason)

    def vanish(self, *, silent: bool) -> None:
        """The process at this end is dead: its session hears nothing of it."""
        self._session = None
        if silent:
            self._gone = self.vanished = True
            self.network.forget(self)
        else:
            self.drop("")
