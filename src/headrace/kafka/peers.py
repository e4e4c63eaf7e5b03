"""Requests to the other brokers of the cluster, in the protocol that their listeners speak to clients.

A connection is opened when a broker is first asked something, to a listener that the image has of it: one without TLS
if there is one, else one with, where this broker shows its own certificate. A broker answers a connection in order, so
each API has a connection of its own: a marker that waits for its watermark holds up no question about a transaction.
Both ends are of one version, or the older one closes the connection when it is asked what it does not know; then the
asker tries again, until the other was updated.

Every request is answered once, never before `ask` has returned: with the message, or with an error when the broker does
not answer in time, is not in the image any more, or has too many requests of ours. A request that is not answered in
time takes its connection with it, and so all that wait there. Of a request that failed nobody knows whether it was
worked on: what is asked here must be such that it can be asked again. Deadlines are looked at in ticks; there is no
timer for a request.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from headrace.cluster.image import Broker, Endpoint, Image
from headrace.errors import HeadraceError, PeerUnreachable, ProtocolError
from headrace.ports.clock import Clock
from headrace.ports.network import Address, Channel, Network
from headrace.wire.api import ALL_APIS
from headrace.wire.codec import decode_response, encode_request, read_response_header, write_request
from headrace.wire.message import Message

WAITING_MAX: Final = 200
"""Requests of one API to one broker that are not answered."""
QUEUED_MAX_BYTES: Final = 8 << 20
"""Of requests to a broker that does not read."""
RESPONSE_MAX_BYTES: Final = 16 << 20
PAUSE_SECONDS: Final = 0.2
"""After a connection that failed: a broker that is away is not called in every turn."""
LENGTH_BYTES: Final = 4

Reply = Callable[[Message | HeadraceError], None]
_length = struct.Struct(">i").unpack_from


@dataclass(frozen=True, slots=True)
class PeerListener:
    """A listener by its name, which all brokers of a cluster give alike, and how it is spoken to."""

    name: str
    tls: object | None = None


class Lane(NamedTuple):
    broker: int
    api_key: int
    again: bool


class _Asked(NamedTuple):
    correlation_id: int
    version: int
    deadline: float
    reply: Reply


class Peers:
    """`listeners` in the order of preference; of a broker that has none of them any is taken, without TLS."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        broker_id: int,
        image: Callable[[], Image],
        listeners: Sequence[PeerListener] = (),
    ) -> None:
        self._network = network
        self._clock = clock
        self._broker_id = broker_id
        self._image = image
        self._listeners = listeners
        self._connections: dict[Lane, _Connection] = {}
        self._open_from: dict[Lane, float] = {}
        """After a failure, when the next connection may be tried."""
        self._closed = False

    def ask(
        self,
        broker: int,
        api_key: int,
        version: int,
        message: Message,
        reply: Reply,
        timeout_ms: int,
        *,
        again: bool = False,
    ) -> None:
        """What is asked `again`, because it could not be done before, has a connection of its own: it may be long in
        coming, and what is asked for the first time must not wait behind it."""
        lane = Lane(broker, api_key, again)
        try:
            connection = self._connection(lane)
            connection.ask(version, message, self._clock.now() + timeout_ms / 1000, reply)
        except PeerUnreachable as error:
            refused = error  # the name of the handler ends with it
            self._clock.call_soon(lambda: reply(refused))

    def tick(self) -> None:
        """Every 100 ms: what is overdue, and whose broker is gone or elsewhere."""
        now = self._clock.now()
        for lane, connection in list(self._connections.items()):
            broker = self._image().brokers.get(lane.broker)
            if broker is None:
                connection.fail(f"broker {lane.broker} is not alive")
            elif connection.endpoint not in broker.listeners.values():
                connection.fail(f"broker {lane.broker} listens elsewhere now")
            elif connection.is_overdue(now):
                connection.fail(f"broker {lane.broker} did not answer {ALL_APIS[lane.api_key].name} in time")
        self._open_from = {lane: at for lane, at in self._open_from.items() if at > now}

    def close(self) -> None:
        self._closed = True
        for connection in list(self._connections.values()):
            connection.fail("this broker stops")

    def _connection(self, lane: Lane) -> _Connection:
        connection = self._connections.get(lane)
        if connection is not None:
            return connection
        broker = self._image().brokers.get(lane.broker)
        if self._closed or broker is None:
            raise PeerUnreachable(f"broker {lane.broker} is not alive" if broker is None else "this broker stops")
        if self._open_from.get(lane, 0.0) > self._clock.now():
            raise PeerUnreachable(f"broker {lane.broker} could not be reached just now")
        endpoint, tls = self._way(broker)
        connection = _Connection(self, lane, endpoint, f"headrace-broker-{self._broker_id}")
        self._connections[lane] = connection
        self._network.connect(Address(endpoint.host, endpoint.port), connection, tls)
        return connection

    def _way(self, broker: Broker) -> tuple[Endpoint, object | None]:
        for listener in self._listeners:
            endpoint = broker.listeners.get(listener.name)
            if endpoint is not None:
                return endpoint, listener.tls
        endpoint = next(iter(broker.listeners.values()), None)
        if endpoint is None:
            raise PeerUnreachable(f"broker {broker.id} has no listener")
        return endpoint, None

    def gone(self, connection: _Connection) -> None:
        if self._connections.get(connection.lane) is connection:
            del self._connections[connection.lane]
            self._open_from[connection.lane] = self._clock.now() + PAUSE_SECONDS


class _Connection:
    """See `ports.network.Session`. From its first request until something fails."""

    def __init__(self, peers: Peers, lane: Lane, endpoint: Endpoint, client_id: str) -> None:
        self.lane = lane
        self.endpoint = endpoint
        self._peers = peers
        self._client_id = client_id
        self._channel: Channel | None = None
        self._unsent: list[bytes] = []
        """Until the connection is open."""
        self._unsent_bytes = 0
        self._asked: deque[_Asked] = deque()
        self._next_id = 0
        self._failed = False

    def ask(self, version: int, message: Message, deadline: float, reply: Reply) -> None:
        channel = self._channel
        queued_bytes = self._unsent_bytes if channel is None else channel.queued_bytes()
        if len(self._asked) >= WAITING_MAX or queued_bytes >= QUEUED_MAX_BYTES:
            raise PeerUnreachable(
                f"broker {self.lane.broker} has {len(self._asked)} requests of ours and {queued_bytes} bytes to read"
            )
        body = encode_request(self.lane.api_key, version, message)
        frame = write_request(self.lane.api_key, version, self._next_id, self._client_id, body)
        self._asked.append(_Asked(self._next_id, version, deadline, reply))
        self._next_id = self._next_id + 1 & 0x7FFFFFFF
        if channel is None:
            self._unsent.append(frame)
            self._unsent_bytes += len(frame)
        else:
            channel.send([frame])

    def is_overdue(self, now: float) -> bool:
        return any(asked.deadline <= now for asked in self._asked)

    def fail(self, reason: str) -> None:
        """End the connection: all that was asked hears why."""
        if self._failed:
            return
        self._failed = True
        channel, self._channel = self._channel, None
        self._peers.gone(self)
        if channel is not None:
            channel.abort()
        asked, self._asked = self._asked, deque()
        for one in asked:
            one.reply(PeerUnreachable(reason))

    # Session.

    def opened(self, channel: Channel) -> None:
        if self._failed:  # given up meanwhile
            channel.abort()
            return
        self._channel = channel
        unsent, self._unsent, self._unsent_bytes = self._unsent, [], 0
        channel.send(unsent)

    def received(self, data: memoryview) -> int:
        used, end = 0, len(data)
        try:
            while not self._failed and end - used >= LENGTH_BYTES:
                (length,) = _length(data, used)
                if not 0 < length <= RESPONSE_MAX_BYTES:
                    raise ProtocolError(f"an answer of {length} bytes")
                frame_end = used + LENGTH_BYTES + length
                if frame_end > end:
                    if self._channel is not None:
                        self._channel.want_bytes = LENGTH_BYTES + length
                    break
                self._answered(data[used + LENGTH_BYTES : frame_end])
                used = frame_end
        except ProtocolError as error:
            self.fail(f"broker {self.lane.broker}: {error}")
        return end if self._failed else used

    def _answered(self, frame: memoryview) -> None:
        if not self._asked:
            raise ProtocolError("an answer to nothing")
        asked = self._asked[0]
        correlation_id, body = read_response_header(self.lane.api_key, asked.version, frame)
        if correlation_id != asked.correlation_id:
            raise ProtocolError(f"an answer to request {correlation_id}, not to {asked.correlation_id}")
        message = decode_response(self.lane.api_key, asked.version, frame, body)
        self._asked.popleft()
        asked.reply(message)

    def drained(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        self._channel = None
        self.fail(f"broker {self.lane.broker}: {reason}")
