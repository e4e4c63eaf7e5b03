"""One blocking connection to a broker: versions agreed, requests pipelined, answers in order.

Any number of requests leave in one vectored `sendmsg`; their parts, ready-made record batches among them, are never
joined. Each answer is read into a buffer of its own, so that record sets can be handed out as slices of it. After a
timeout, a broken frame or ctrl-C in the middle the connection is closed: what follows on the socket could no longer be
told apart.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.client.connection.versions import ASKED_IN, Versions, question
from headrace.client.errors import BrokerUnreachable
from headrace.errors import HeadraceError, ProtocolError
from headrace.ports.disk import Buffer
from headrace.ports.network import Address
from headrace.wire import api as apis
from headrace.wire.codec import decode_response, encode_request
from headrace.wire.header import read_response_header, write_request
from headrace.wire.message import Message

RESPONSE_MAX_BYTES: Final = 1 << 30
PIPELINE_MAX: Final = 1000
PARTS_PER_WRITE: Final = 1024  # IOV_MAX of Linux


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose body is encoded by the schema, or comes as parts that are sent as they are."""

    api_key: int
    body: Message | Sequence[Buffer]
    answered: bool = True


@dataclass(frozen=True, slots=True)
class _Awaited:
    correlation_id: int
    api_key: int
    version: int


class Connection:
    def __init__(
        self,
        address: Address,
        *,
        client_id: str = "headrace",
        timeout_ms: int = 30_000,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address = address
        self._client_id = client_id
        self._timeout_ms = timeout_ms
        self._awaited: deque[_Awaited] = deque()
        self._next_id = 0
        self._versions: Versions | None = None
        self._socket = self._open(tls)
        try:
            self._negotiate()
        except HeadraceError:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    @property
    def awaited_count(self) -> int:
        """Requests that were sent and not answered yet."""
        return len(self._awaited)

    def close(self) -> None:
        self._awaited.clear()
        self._socket.close()

    def version(self, api_key: int) -> int:
        """The highest version of an API that both sides speak."""
        return ASKED_IN if self._versions is None else self._versions.version(api_key)

    def call(self, api_key: int, message: Message, timeout_ms: int | None = None) -> Message:
        """One request and its answer."""
        assert not self._awaited, "answers of earlier requests come first"
        self.submit(Request(api_key, message), timeout_ms=timeout_ms)
        return self.receive(timeout_ms)

    def submit(self, *requests: Request, timeout_ms: int | None = None) -> None:
        """Send all requests in as few system calls as the kernel allows; `receive` gives the answers in order."""
        assert len(self._awaited) + len(requests) <= PIPELINE_MAX, "too many requests without an answer"
        parts: list[Buffer] = []
        awaited: list[_Awaited] = []
        for request in requests:
            version = self.version(request.api_key)
            body = request.body
            pieces = (encode_request(request.api_key, version, body),) if isinstance(body, Message) else body
            head = write_request(request.api_key, version, self._next_id, self._client_id, b"")
            size = len(head) - 4 + sum(map(len, pieces))
            parts += (struct.pack(">i", size) + head[4:], *pieces)
            if request.answered:
                awaited.append(_Awaited(self._next_id, request.api_key, version))
            self._next_id = self._next_id + 1 & 0x7FFFFFFF
        self._awaited += awaited
        try:
            self._write(parts, self._deadline(timeout_ms))
        except OSError as error:
            raise self._broken("sending to", error) from None
        except KeyboardInterrupt:
            self.close()
            raise

    def receive(self, timeout_ms: int | None = None) -> Message:
        """The answer to the oldest request that waits for one; `records` fields are slices of its own buffer."""
        awaited = self._awaited.popleft()
        deadline = self._deadline(timeout_ms)
        try:
            (size,) = struct.unpack(">i", self._read(4, deadline))
            if not 4 <= size <= RESPONSE_MAX_BYTES:
                raise ProtocolError(f"{self.address} announced an answer of {size} bytes: is it a Kafka port?")
            frame = self._read(size, deadline)
        except OSError as error:
            raise self._broken("waiting for an answer from", error) from None
        except (ProtocolError, KeyboardInterrupt):
            self.close()
            raise
        try:
            correlation_id, body = read_response_header(awaited.api_key, awaited.version, frame)
            if correlation_id != awaited.correlation_id:
                raise ProtocolError(f"{self.address} answered request {correlation_id}, not {awaited.correlation_id}")
            return decode_response(awaited.api_key, awaited.version, frame, body)
        except ProtocolError:
            self.close()
            raise

    def _open(self, tls: ssl.SSLContext | None) -> socket.socket:
        try:
            plain = socket.create_connection((self.address.host, self.address.port), self._timeout_ms / 1000)
        except ConnectionRefusedError:
            raise BrokerUnreachable(f"no broker answers at {self.address}; start one with `make serve`") from None
        except OSError as error:
            raise BrokerUnreachable(f"cannot connect to {self.address}: {_reason(error)}") from None
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            return plain
        try:
            return tls.wrap_socket(plain, server_hostname=self.address.host)
        except OSError as error:
            plain.close()
            raise BrokerUnreachable(f"no TLS with {self.address}: {_reason(error)}") from None

    def _negotiate(self) -> None:
        try:
            answer = self.call(apis.API_VERSIONS, question())
        except ProtocolError:
            # A broker that does not know the version asked for answers in the form of version 0.
            raise ProtocolError(f"{self.address} does not answer as a Kafka broker") from None
        self._versions = Versions(self.address, answer)

    def _deadline(self, timeout_ms: int | None) -> float:
        return time.monotonic() + (self._timeout_ms if timeout_ms is None else timeout_ms) / 1000

    def _write(self, parts: list[Buffer], deadline: float) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            self._arm(deadline)
            self._socket.sendall(b"".join(parts))
            return
        waiting = deque(memoryview(part).cast("B") for part in parts if len(part))
        while waiting:
            self._arm(deadline)
            sent = self._socket.sendmsg([waiting[nth] for nth in range(min(len(waiting), PARTS_PER_WRITE))])
            while waiting and sent >= len(waiting[0]):
                sent -= len(waiting.popleft())
            if sent:
                waiting[0] = waiting[0][sent:]

    def _read(self, count: int, deadline: float) -> memoryview:
        buffer = memoryview(bytearray(count))
        filled = 0
        while filled < count:
            self._arm(deadline)
            received = self._socket.recv_into(buffer[filled:])
            if not received:
                raise ConnectionResetError("the broker closed the connection")
            filled += received
        return buffer

    def _arm(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _broken(self, doing: str, error: OSError) -> BrokerUnreachable:
        self.close()
        return BrokerUnreachable(f"{doing} {self.address}: {_reason(error)}")


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer within the timeout"
    return error.strerror or str(error)


def exchange(
    asked: Sequence[tuple[Connection, Request]], timeout_ms: int | None = None
) -> list[Message | HeadraceError]:
    """Send to all connections before waiting for any; answers, or what went wrong, in the order asked.

    A request that wants no answer gets an empty message.
    """
    by_connection: dict[Connection, list[int]] = {}
    for nth, (connection, _) in enumerate(asked):
        by_connection.setdefault(connection, []).append(nth)
    results: list[Message | HeadraceError] = [Message() for _ in asked]
    try:
        for connection, places in by_connection.items():
            _submit(connection, asked, places, results, timeout_ms)
        for connection, places in by_connection.items():
            _receive(connection, asked, places, results, timeout_ms)
    finally:
        for connection in by_connection:
            if connection.awaited_count:
                connection.close()
    return results


def _submit(
    connection: Connection,
    asked: Sequence[tuple[Connection, Request]],
    places: list[int],
    results: list[Message | HeadraceError],
    timeout_ms: int | None,
) -> None:
    try:
        connection.submit(*(asked[nth][1] for nth in places), timeout_ms=timeout_ms)
    except HeadraceError as error:
        for nth in places:
            results[nth] = error


def _receive(
    connection: Connection,
    asked: Sequence[tuple[Connection, Request]],
    places: list[int],
    results: list[Message | HeadraceError],
    timeout_ms: int | None,
) -> None:
    failure: HeadraceError | None = None
    for nth in places:
        if isinstance(results[nth], HeadraceError) or not asked[nth][1].answered:
            continue
        try:
            results[nth] = failure or connection.receive(timeout_ms)
        except HeadraceError as error:
            results[nth] = failure = error
