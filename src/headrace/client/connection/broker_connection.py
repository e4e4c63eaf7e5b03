"""One connection to a broker: opened when first asked, versions agreed, requests pipelined, answers in order.

    IDLE -> PAUSED -> OPENING -> AGREEING -> OPEN -> IDLE
      asked    \\ after a failure, 20 ms doubling to 1 s  \\ lost: everyone waiting hears why, the next request opens

Requests wait here until the connection is open. All that were asked in one turn leave in one `sendmsg`, their parts
never joined. Each answer has a buffer, of which record sets are slices. When the connection is lost, a
request of which no byte was handed to the kernel hears NeverSent; of any other nobody knows whether the broker saw it.
A request that is not answered in time takes the connection with it, as answers come in order; one that did not leave
in time only hears so. A broker whose answer to Produce or Fetch throttles this client (KIP-219) is asked nothing more
on this connection for so long.

`on_answer` is called once, under the reactor's lock, and never before `ask` has returned.
"""

from __future__ import annotations

import logging
import math
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

from headrace import __version__
from headrace.client.connection.connector import Connector
from headrace.client.connection.reactor import Backoff, Reactor, Timer
from headrace.client.connection.stream import POOL_BYTES, RESPONSE_MAX_BYTES, FrameReader, PartWriter
from headrace.client.errors import BrokerUnreachable, NeverSent, check
from headrace.errors import HeadraceError, ProtocolError, Unsupported
from headrace.ports.disk import Buffer
from headrace.ports.network import Address
from headrace.records.buffers import BufferPool
from headrace.wire import api as apis
from headrace.wire.codec import decode_response, encode_request, read_response_header, write_request
from headrace.wire.foreign_protocol import foreign_protocol
from headrace.wire.message import Message

IN_FLIGHT_MAX: Final = 1000
WAITING_MAX: Final = 10_000
SETUP_TIMEOUT_S: Final = 5.0
THROTTLE_MAX_S: Final = 60.0
ALONE_BYTES: Final = 4096
AGREEMENT_MAX_BYTES: Final = 1 << 20
"""Of a broker's first answer. Other protocols' first bytes read as a size, and are above it."""

TLS_HINT: Final = "; if this port speaks TLS, pass --tls or --tls-ca FILE, or tls= in Python"
CERTIFICATE_HINT: Final = (
    "; a broker may let in only who shows a certificate that it trusts: --tls-cert FILE, or tls= in Python"
)
_FOREIGN_HINTS: Final[dict[str | None, str]] = {
    "TLS": ": this port speaks TLS; pass --tls or --tls-ca FILE, or tls= in Python",
    "HTTP": ": this port speaks HTTP; take the one that the broker listens on for Kafka clients",
}

_QUOTA_APIS: Final = (apis.PRODUCE, apis.FETCH)

LATEST_VERSION: Final = 32_767
API_VERSIONS_VERSION: Final = 3
"""The version of the ApiVersions request itself."""

# The oldest version of each API whose messages this client speaks, where that is not the oldest known.
_MIN_VERSIONS: Final = {
    apis.METADATA: 10,
    apis.OFFSET_FETCH: 8,
    apis.FIND_COORDINATOR: 4,
    apis.LEAVE_GROUP: 3,
    apis.DELETE_TOPICS: 6,
}
# Later versions name topics by id only, and a group's offsets outlive its topics; or they are for brokers.
_MAX_VERSIONS: Final = {apis.OFFSET_FETCH: 9, apis.OFFSET_COMMIT: 9, apis.ADD_PARTITIONS_TO_TXN: 3}

# Size of the rest, API key, version, correlation id; what follows is the same in every request of that version.
HEAD: Final = struct.Struct(">ihhi")
_size = struct.Struct(">i").pack

Body = Message | Callable[[int], Sequence[Buffer]]
OnAnswer = Callable[[Message | HeadraceError], None]
Reads = Callable[[bytes, int], Any]
"""Given a frame, with its size, and the correlation id that it should have: gives None for any other."""

make = tuple.__new__
"""Makes a named tuple as its class does, without running Python code for it."""

log = logging.getLogger(__name__)


class Written(NamedTuple):
    """A request that was written past the others."""

    version: int
    correlation_id: int
    size_bytes: int
    fd: int
    is_complete: bool
    """The kernel has all of it."""


@dataclass(slots=True, eq=False)
class InFlightRequest:
    api_key: int
    body: Body
    on_answer: Callable[[Any], None]
    deadline: float
    timeout_s: float
    answered: bool
    reads: Reads | None = None
    max_version: int = LATEST_VERSION
    version: int = 0
    correlation_id: int = 0
    starts_at: int = 0
    """Where its bytes start and end in all that was ever given to the connection."""
    ends_at: int = 0


class Framer:
    """Requests as they leave: size int32, API key, version, correlation id, client id, and the parts of the body."""

    def __init__(self, client_id: str) -> None:
        self.next_id = 0
        self._client_id = client_id
        self._head_ends: dict[tuple[int, int], bytes] = {}

    def used(self) -> None:
        self.next_id = self.next_id + 1 & 0x7FFFFFFF

    def encode(self, request: InFlightRequest, version: int) -> tuple[list[Buffer], int]:
        """The parts of the request's frame, under the next correlation id, and their size."""
        request.version, request.correlation_id = version, self.next_id
        self.used()
        try:
            if isinstance(request.body, Message):
                body = encode_request(request.api_key, request.version, request.body)
                frame = write_request(request.api_key, request.version, request.correlation_id, self._client_id, body)
                return [frame], len(frame)
            pieces = [piece for piece in request.body(request.version) if len(piece)]
        except HeadraceError:
            raise
        except Exception as error:
            log.exception("a %s request could not be encoded", apis.ALL_APIS[request.api_key].name)
            raise ProtocolError(
                f"a {apis.ALL_APIS[request.api_key].name} request could not be encoded: {error}"
            ) from error
        head_end = self.head_end(request.api_key, version)
        size = HEAD.size + len(head_end) + sum(map(len, pieces))
        return [HEAD.pack(size - 4, request.api_key, version, request.correlation_id) + head_end, *pieces], size

    def head_end(self, api_key: int, version: int) -> bytes:
        """What is between HEAD and the body."""
        found = self._head_ends.get((api_key, version))
        if found is None:
            head = write_request(api_key, version, 0, self._client_id, b"")
            found = self._head_ends[api_key, version] = head[HEAD.size :]
        return found


def decode(request: InFlightRequest, frame: memoryview, peer: Address) -> Any:
    """The answer to a request: what its `reads` makes of it, or else the message."""
    if request.reads is not None:
        answer = request.reads(_size(len(frame)) + frame, request.correlation_id)
        if answer is not None:
            return answer
    correlation_id, body = read_response_header(request.api_key, request.version, frame)
    if correlation_id != request.correlation_id:
        raise ProtocolError(f"{peer} answered request {correlation_id}, not {request.correlation_id}")
    return decode_response(request.api_key, request.version, frame, body)


def api_versions_request() -> Message:
    """The ApiVersions request."""
    return Message(client_software_name="headrace", client_software_version=__version__)


class Versions:
    """Which version of each API a connection speaks: the highest that both sides know.

    A connection begins with an ApiVersions request of version 3. A broker that does not know that version answers in
    the form of version 0; no broker of the last years does, so such an answer counts as no Kafka broker.
    """

    def __init__(self, address: Address, answer: Message) -> None:
        """Raises Refusal if the broker did not say."""
        check(answer.error_code, f"API versions of {address}")
        self._address = address
        self._served: dict[int, tuple[int, int]] = {
            entry.api_key: (entry.min_version, entry.max_version) for entry in answer.api_keys
        }
        self._agreed: dict[int, int] = {}
        self.features: dict[str, int] = {each.name: each.max_version_level for each in answer.finalized_features or ()}
        """What the cluster as a whole has agreed on (KIP-584), by name."""
        self.features_epoch: int = answer.finalized_features_epoch
        """The later of two answers has the higher one; -1 in one that says nothing of them."""

    def version(self, api_key: int) -> int:
        """The highest version of an API that both sides speak."""
        agreed = self._agreed.get(api_key)
        if agreed is None:
            agreed = self._agreed[api_key] = self._agree(api_key)
        return agreed

    def _agree(self, api_key: int) -> int:
        api = apis.ALL_APIS[api_key]
        if api_key not in self._served:
            raise Unsupported(f"the broker at {self._address} does not serve {api.name}")
        lowest, highest = self._served[api_key]
        lowest = max(lowest, api.min_version, _MIN_VERSIONS.get(api_key, 0))
        highest = min(highest, api.max_version, _MAX_VERSIONS.get(api_key, api.max_version))
        if lowest > highest:
            raise Unsupported(
                f"the broker at {self._address} serves {api.name} versions {self._served[api_key]}, "
                f"this client needs {max(api.min_version, _MIN_VERSIONS.get(api_key, 0))} or later"
            )
        return highest


class _State(Enum):
    IDLE = "idle"
    PAUSED = "paused"
    OPENING = "opening"
    AGREEING = "agreeing"
    OPEN = "open"
    ENDED = "ended"


class BrokerConnection:
    """A connection; see the module."""

    _reader: FrameReader
    _writer: PartWriter

    def __init__(
        self,
        reactor: Reactor,
        address: Address,
        *,
        client_id: str,
        tls: ssl.SSLContext | None = None,
        on_opened: Callable[[BrokerConnection], None] | None = None,
        on_failed: Callable[[BrokerConnection, HeadraceError], None] | None = None,
        buffers: BufferPool | None = None,
        setup_timeout_s: float | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self.address = address
        self.opened_count = 0
        self._reactor = reactor
        self.framer = Framer(client_id)
        self._tls = tls
        self._on_opened = on_opened
        self._on_failed = on_failed
        self._buffers = buffers or BufferPool(POOL_BYTES)
        self._setup_timeout_s = SETUP_TIMEOUT_S if setup_timeout_s is None else setup_timeout_s
        self._backoff = backoff or Backoff()
        self._state = _State.IDLE
        self._waiting: deque[InFlightRequest] = deque()
        self._in_flight: deque[InFlightRequest] = deque()
        self._unanswered: deque[InFlightRequest] = deque()
        self._flush_due = False
        self._held_until = 0.0
        self._checks_at = math.inf
        self._check: Timer | None = None
        self._retry_at = 0.0
        """When it may be opened again after a failure; 0 if there was none since the last answer."""
        self._connector: Connector | None = None
        self._setup: Timer | None = None
        self._socket: socket.socket | None = None
        self._writes_blocked = False
        self._versions: Versions | None = None
        self._end_error: HeadraceError | None = None

    @property
    def is_open(self) -> bool:
        return self._state is _State.OPEN

    @property
    def is_connected(self) -> bool:
        """There is a socket, whether or not versions are agreed."""
        return self._socket is not None

    @property
    def versions(self) -> Versions | None:
        """What the broker has said; None before the connection was first open."""
        return self._versions

    @property
    def is_idle(self) -> bool:
        """Not connected, and nobody waits for it."""
        return self._state is _State.IDLE and not self._waiting

    @property
    def in_flight(self) -> int:
        """Requests that have left, or wait to leave, and have no answer yet."""
        return len(self._in_flight) + len(self._waiting) + len(self._unanswered)

    def version(self, api_key: int) -> int:
        """The agreed version of an API; Unsupported while the connection is not open."""
        if self._versions is None:
            raise Unsupported(f"the connection to {self.address} is not open")
        return self._versions.version(api_key)

    def ask(
        self,
        api_key: int,
        body: Body,
        on_answer: Callable[[Any], None],
        *,
        timeout_s: float,
        answered: bool = True,
        reads: Reads | None = None,
        written: Written | None = None,
        max_version: int = LATEST_VERSION,
    ) -> None:
        """Send a request; `on_answer` gets the answer or what went wrong. A callable gives the body's parts for the
        version agreed. One that is not `answered` gets an empty message once the kernel has all of it.

        `reads` sees the frame of the answer before it is decoded: what it gives is the answer, unless that is None.
        `written` says that `send_alone` has sent this request. No later version than `max_version` is spoken.
        """
        reactor = self._reactor
        with reactor.lock:
            deadline = reactor.now() + timeout_s
            request = InFlightRequest(api_key, body, on_answer, deadline, timeout_s, answered, reads, max_version)
            if self._end_error is not None or len(self._waiting) >= WAITING_MAX:
                error = self._end_error or NeverSent(f"{WAITING_MAX} requests wait for {self.address} already")
                reactor.call_soon(lambda: self._answer(request, error))
                return
            if written is None:
                self._waiting.append(request)
            else:
                self._take_over(request, written)
            if request.deadline < self._checks_at:
                self._check_at(request.deadline)
            if self._state is _State.OPEN:
                self._flush_soon()
            elif self._state is _State.IDLE:
                self._begin()

    def send_alone(self, version: int, frame: Callable[[int, Buffer], bytes], data: Buffer) -> Written | None:
        """Write `frame(correlation_id, data)` if nothing else is under way; None if it cannot be and was not written.
        Before anybody else has the lock, the caller has read the answer, or it has given the request to `ask`.
        """
        sock, writer = self._socket, self._writer
        if self._state is not _State.OPEN or sock is None or self._tls is not None or self._held_until:
            return None
        if self._in_flight or self._waiting or self._unanswered or writer.taken_bytes != writer.given_bytes:
            return None
        if not self._reader.is_idle:
            return None
        framer = self.framer
        correlation_id = framer.next_id
        framed = frame(correlation_id, data)
        try:
            taken = sock.send(framed)
        except OSError:
            return None
        size = len(framed)
        framer.next_id = correlation_id + 1 & 0x7FFFFFFF
        writer.given_bytes += size
        writer.taken_bytes += taken
        if taken < size:
            writer.left_over(memoryview(framed)[taken:])
        return make(Written, (version, correlation_id, size, sock.fileno(), taken == size))

    def read_alone(self, written: Written, reads: Reads) -> Any:
        """The answer to what was sent alone; None if `reads` has none or it is not just this that came. That is then
        left to `catch_up`, as errors are, which the caller calls when it has given the request to `ask`.
        """
        try:
            received = b"" if self._socket is None else self._socket.recv(ALONE_BYTES)
        except OSError:
            received = b""
        answer = reads(received, written.correlation_id)
        if answer is None:
            self._reader.put_back(received)
        elif self._retry_at:
            self._works()
        return answer

    def _take_over(self, request: InFlightRequest, written: Written) -> None:
        request.version, request.correlation_id = written.version, written.correlation_id
        request.ends_at = self._writer.given_bytes
        request.starts_at = request.ends_at - written.size_bytes
        self._in_flight.append(request)
        if not self._writer.is_idle:
            self._reactor.call_soon(self._write)

    def close(self, error: HeadraceError) -> None:
        """Drop the connection; everyone who waits hears the error, or NeverSent with its words. The next request opens
        it again.
        """
        with self._reactor.lock:
            self._lose(error, failed=False)

    def end(self, error: HeadraceError) -> None:
        """Close for good: this and every later request hears the error."""
        with self._reactor.lock:
            self._end_error = error
            self._lose(error, failed=False)
            self._state = _State.ENDED

    def _works(self) -> None:
        """An answer came after a failure."""
        self._retry_at = 0.0
        self._backoff.reset()

    def _begin(self) -> None:
        """Open now, or when the pause after the last failure is over."""
        if self._retry_at > self._reactor.now():
            self._state = _State.PAUSED
            self._setup = self._reactor.call_at(self._retry_at, self._open)
        else:
            self._open()

    def _open(self) -> None:
        if not self._waiting:
            self._state = _State.IDLE
            return
        self._state = _State.OPENING
        self._setup = self._reactor.call_at(self._reactor.now() + self._setup_timeout_s, self._setup_over)
        self._connector = Connector(
            self._reactor, self.address, self._tls, self._connected, lambda error: self._lose(error, failed=True)
        )
        self._connector.start()

    def _setup_over(self) -> None:
        what = "no connection to" if self._state is _State.OPENING else "no answer as a Kafka broker from"
        self._lose(BrokerUnreachable(f"{what} {self.address} within {self._setup_timeout_s:g} s"), failed=True)

    def _connected(self, sock: socket.socket) -> None:
        self._connector = None
        self._socket = sock
        self._reader = FrameReader(sock, self.address, self._buffers)
        self._reader.max_bytes = AGREEMENT_MAX_BYTES
        self._writer = PartWriter(sock)
        self._writes_blocked, self._held_until = False, 0.0
        self._state = _State.AGREEING
        self._reactor.watch(sock, self.catch_up, None)
        request = InFlightRequest(
            apis.API_VERSIONS, api_versions_request(), self._agree, math.inf, self._setup_timeout_s, True
        )
        self._send([request])

    def _agree(self, answer: Message | HeadraceError) -> None:
        if isinstance(answer, HeadraceError):
            return
        try:
            self._versions = Versions(self.address, answer)
        except HeadraceError as error:
            self._lose(error, failed=True)
            return
        if self._setup is not None:
            self._setup.cancel()
            self._setup = None
        self._state = _State.OPEN
        self._reader.max_bytes = RESPONSE_MAX_BYTES
        self.opened_count += 1
        if self._on_opened is not None:
            self._on_opened(self)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._reactor.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        # What the kernel did not take yet holds the rest back: it can then still be said that it never left.
        if self._state is _State.OPEN and self._writer.is_idle and self._waiting and not self._is_held():
            room = IN_FLIGHT_MAX - len(self._in_flight)
            self._send([self._waiting.popleft() for _ in range(min(room, len(self._waiting)))])

    def _is_held(self) -> bool:
        if self._held_until and self._held_until <= self._reactor.now():
            self._held_until = 0.0
        return self._held_until > 0.0

    def _hold(self, throttle_ms: int) -> None:
        until = self._reactor.now() + min(throttle_ms / 1000, THROTTLE_MAX_S)
        if until > self._held_until:
            self._held_until = until
            self._reactor.call_at(until, self._flush_soon)

    def _send(self, chosen: list[InFlightRequest]) -> None:
        for request in chosen:
            try:
                version = (
                    API_VERSIONS_VERSION if request.api_key == apis.API_VERSIONS else self.version(request.api_key)
                )
                version = min(version, request.max_version)
                parts, size = self.framer.encode(request, version)
            except HeadraceError as error:
                self._answer(request, error)
                continue
            request.starts_at = self._writer.given_bytes
            self._writer.give(parts, size)
            request.ends_at = self._writer.given_bytes
            (self._in_flight if request.answered else self._unanswered).append(request)
        self._write()

    def _write(self) -> None:
        if self._socket is None:
            return
        try:
            emptied = self._writer.write()
        except OSError as error:
            why = f"{_reason(error)}{self._hint()}"
            self._lose(BrokerUnreachable(f"sending to {self.address}: {why}"), failed=True)
            return
        if emptied is self._writes_blocked:
            self._writes_blocked = not emptied
            self._reactor.watch(self._socket, self.catch_up, None if emptied else self._writable)
        taken = self._writer.taken_bytes
        while self._unanswered and self._unanswered[0].ends_at <= taken:
            self._answer(self._unanswered.popleft(), Message())

    def _writable(self) -> None:
        self._write()
        if self._waiting and self._state is _State.OPEN and self._writer.is_idle:
            self._flush_soon()

    def catch_up(self) -> None:
        """Read what has come."""
        sock = self._socket
        if sock is None:
            return
        frames: list[memoryview] = []
        failure: HeadraceError | None = None
        try:
            self._reader.read(frames)
        except ProtocolError as error:
            failure = self._no_broker() if self._state is _State.AGREEING else error
        except OSError as error:
            why = f"{_reason(error)}{self._hint()}"
            failure = BrokerUnreachable(f"waiting for an answer from {self.address}: {why}")
        try:
            for frame in frames:
                self._take(frame)
                if self._socket is not sock:
                    return
        except BaseException:
            # Ctrl-C between two answers: which of them was taken cannot be told any more.
            self._lose(BrokerUnreachable(f"interrupted while reading from {self.address}"), failed=False)
            raise
        if failure is not None:
            was_used = bool(self._in_flight or self._unanswered or self._waiting)
            self._lose(failure, failed=was_used or self._state is not _State.OPEN)
        elif self._waiting and frames:
            self._flush_soon()

    def _hint(self) -> str:
        """Why a broker may have hung up that has not answered once."""
        if self._state is not _State.AGREEING:
            return ""
        return TLS_HINT if self._tls is None else CERTIFICATE_HINT

    def _no_broker(self) -> ProtocolError:
        hint = _FOREIGN_HINTS.get(foreign_protocol(self._reader.strange_head), "")
        return ProtocolError(f"{self.address} does not answer as a Kafka broker{hint}")

    def _take(self, frame: memoryview) -> None:
        """One whole answer; it is for the oldest request in flight."""
        if not self._in_flight:
            self._lose(ProtocolError(f"{self.address} sent an answer that nobody asked for"), failed=True)
            return
        request = self._in_flight[0]
        try:
            answer = decode(request, frame, self.address)
        except ProtocolError as error:
            failure = self._no_broker() if self._state is _State.AGREEING else _placed(error, self.address)
            self._lose(failure, failed=True)
            return
        if self._retry_at and self._state is _State.OPEN:
            self._works()
        if request.api_key in _QUOTA_APIS and isinstance(answer, Message) and answer.throttle_time_ms > 0:
            self._hold(answer.throttle_time_ms)
        self._in_flight.popleft()
        self._answer(request, answer)

    def _answer(self, request: InFlightRequest, answer: object) -> None:
        try:
            request.on_answer(answer)
        except Exception:
            log.exception("a fault in the client: %r raised on an answer", request.on_answer)

    def _lose(self, error: HeadraceError, *, failed: bool) -> None:
        """Close whatever there is of a connection, and tell everyone who waits for it."""
        if self._setup is not None:
            self._setup.cancel()
        if self._connector is not None:
            self._connector.cancel()
        taken = 0
        if self._socket is not None:
            taken = self._writer.taken_bytes
            self._reactor.unwatch(self._socket)
            self._socket.close()
        heard = [*self._in_flight, *self._unanswered]
        begun = [request for request in heard if request.starts_at < taken]
        never = [*(request for request in heard if request.starts_at >= taken), *self._waiting]
        self._in_flight.clear()
        self._unanswered.clear()
        self._waiting.clear()
        self._setup = self._connector = self._socket = self._versions = None
        self._state = _State.IDLE
        if failed:
            self._retry_at = self._reactor.now() + self._backoff.take()
            if self._on_failed is not None:
                self._on_failed(self, error)
        for request in begun:
            self._answer(request, error)
        unsent = isinstance(error, BrokerUnreachable) and not isinstance(error, NeverSent)
        for request in never:
            self._answer(request, NeverSent(str(error)) if unsent else error)

    def _check_at(self, when: float) -> None:
        if self._check is not None:
            self._check.cancel()
        self._checks_at = when
        self._check = self._reactor.call_at(when, self._check_deadlines)

    def _check_deadlines(self) -> None:
        """One timer for all: at the earliest deadline, not one for each request."""
        self._check, self._checks_at = None, math.inf
        now = self._reactor.now()
        late = next((request for request in (*self._in_flight, *self._unanswered) if request.deadline <= now), None)
        if late is not None:
            what = f"no answer to {apis.ALL_APIS[late.api_key].name} from {self.address} within {late.timeout_s:g} s"
            self._lose(BrokerUnreachable(what), failed=True)
            return
        expired = [request for request in self._waiting if request.deadline <= now]
        if expired:
            self._waiting = deque(request for request in self._waiting if request.deadline > now)
        left = min(
            (request.deadline for request in (*self._in_flight, *self._unanswered, *self._waiting)), default=math.inf
        )
        if left < math.inf:
            self._check_at(left)
        for request in expired:
            name = apis.ALL_APIS[request.api_key].name
            what = f"{name} could not be sent to {self.address} within {request.timeout_s:g} s"
            self._answer(request, NeverSent(what))


def _placed(error: ProtocolError, address: Address) -> ProtocolError:
    return error if str(address) in str(error) else ProtocolError(f"{address} sent an answer that is broken: {error}")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
