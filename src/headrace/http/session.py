"""One HTTP connection. h11 turns bytes into events and answers into bytes; this runs them over a channel.

One request is worked on at a time; what a client has pipelined behind it waits, here up to one read, then in its
socket, so answers leave in the order of the requests. While a client does not read its answers, none of its further
requests is worked on.
After an answer to a request that was not read to its end (too large, not HTTP) the rest is discarded for a while before
the connection is closed: closing at once would reset it, and the client would never see the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Any, Final, cast

import h11

from headrace.errors import HeadraceError
from headrace.http import routes
from headrace.http.exchange import Exchange
from headrace.http.message import Request, Response, error_response, refusal
from headrace.http.routes import Route
from headrace.http.services import HttpServices
from headrace.ports.network import Address, Channel, Part

log = logging.getLogger(__name__)

HEADERS_MAX_BYTES: Final = 32 << 10
DISCARD_MAX_BYTES: Final = 64 << 20
DISCARD_SECONDS: Final = 2.0
NOWHERE: Final = Address("", 0)
STRANGERS: Final = {b"\x00": "the protocol of Kafka", b"\x16": "TLS"}
"""Who comes to a port that is not theirs, by the first byte; no request begins with it."""


class HttpSession:
    def __init__(self, services: HttpServices, table: Sequence[Route], ended: Callable[[HttpSession], None]) -> None:
        self.peer = NOWHERE
        self.quiet_since = services.clock.now()
        """When the last request was answered, or its answer read; one under way is bounded by its own deadline."""
        self._services = services
        self._table = table
        self._metrics = services.metrics
        self._ended = ended
        self._body_max_bytes: int = services.settings["http.body.max.bytes"]
        self._queued_max_bytes: int = services.settings["connection.queued.bytes"]
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADERS_MAX_BYTES)
        self._channel: Channel | None = None
        self._request: h11.Request | None = None
        self._body = bytearray()
        self._exchange: Exchange | None = None
        self._paused = False
        self._working = False
        self._discarding: _Discarding | None = None

    # Session.

    def opened(self, channel: Channel) -> None:
        self._channel = channel
        self.peer = channel.peer

    def received(self, data: memoryview) -> int:
        if self._discarding is not None:
            self._discarding.count(len(data))
            return len(data)
        if self._busy():
            self._hold()
            return 0
        self._metrics.bytes_in += len(data)
        self._http.receive_data(bytes(data))
        self._work()
        return len(data)

    def drained(self) -> None:
        self.quiet_since = self._services.clock.now()
        self._work()

    def closed(self, reason: str) -> None:
        self._channel = None
        if self._exchange is not None:
            self._exchange.gone = True
        if self._discarding is not None:
            self._discarding.answered = True
        self._ended(self)
        log.debug("HTTP connection from %s ended: %s", self.peer, reason)

    @property
    def idle(self) -> bool:
        """Nothing is worked on: what keeps the connection open is the client alone."""
        return self._exchange is None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def abort(self) -> None:
        if self._channel is not None:
            self._channel.abort()

    # Pace.

    def _busy(self) -> bool:
        """A request is worked on, or the client does not read its answers."""
        channel = self._channel
        return self._exchange is not None or channel is None or channel.queued_bytes() > self._queued_max_bytes

    def _hold(self) -> None:
        if self._channel is not None and not self._paused:
            self._paused = True
            self._channel.pause()

    def _go_on(self) -> None:
        if self._channel is not None and self._paused:
            self._paused = False
            self._channel.resume()

    def _work(self) -> None:
        """Take events until a request is under way or bytes run out. Answers come from within too, hence the guard."""
        if self._working:
            return
        self._working = True
        try:
            while not self._busy() and self._discarding is None and self._take_event():
                pass
        finally:
            self._working = False
        if not self._busy():
            self._go_on()

    # Requests.

    def _take_event(self) -> bool:
        """Handle one event; False when there is none."""
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._refuse_bytes(error)
            return False
        if event is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                self._send([self._http.send(h11.InformationalResponse(status_code=100, headers=[]))])
            return False
        if event is h11.PAUSED:
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return False
            self._http.start_next_cycle()
        elif isinstance(event, h11.Request):
            self._request = event
            self._body = bytearray()
            self._check_head(event)
        elif isinstance(event, h11.Data):
            self._body += event.data
            if len(self._body) > self._body_max_bytes:
                self._refuse_body(f"more than {self._body_max_bytes}")
        elif isinstance(event, h11.EndOfMessage):
            self._dispatch()
        return True

    def _check_head(self, request: h11.Request) -> None:
        if request.http_version not in (b"1.0", b"1.1"):
            version = request.http_version.decode()
            self._refuse(refusal(505, "UnknownVersion", f"HTTP/{version} is not served, only 1.0 and 1.1", close=True))
            return
        for name, value in request.headers:
            # h11 has checked that the length is a number.
            if name == b"content-length" and int(value) > self._body_max_bytes:
                self._refuse_body(value.decode())

    def _dispatch(self) -> None:
        received = self._request
        assert received is not None
        headers = tuple((name.decode("latin-1"), value) for name, value in received.headers.raw_items())
        target = received.target.decode("latin-1")
        request = Request(received.method.decode("latin-1"), target, {}, headers, bytes(self._body))
        self._body = bytearray()
        try:
            found = routes.find(self._table, request, target)
        except HeadraceError as error:
            found = error_response(error)
        if isinstance(found, Response):
            self._exchange = Exchange(self._services, routes.UNKNOWN_API, request, self._answer)
            self._exchange.answer(found)
            return
        route, request = found
        self._exchange = Exchange(self._services, route.api, request, self._answer)
        self._exchange.run(route.handler)

    def _refuse_body(self, size: str) -> None:
        message = f"a body of {size} bytes; http.body.max.bytes is {self._body_max_bytes}"
        self._refuse(refusal(413, "BodyTooLarge", message, close=True))

    def _refuse_bytes(self, error: h11.RemoteProtocolError) -> None:
        self._metrics.protocol_errors += 1
        stranger = STRANGERS.get(self._http.trailing_data[0][:1])
        if stranger is not None:
            log.warning("closing the connection from %s: it speaks %s, and this port HTTP", self.peer, stranger)
        status = error.error_status_hint
        self._refuse(refusal(status, "BadRequest", f"this is not a request that can be read: {error}", close=True))

    def _refuse(self, response: Response) -> None:
        """Answer a request that was not read to its end, and the connection with it."""
        self._metrics.error(routes.UNKNOWN_API, response.status)
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send(self._encode(response, head=False))
        deadlines, clock = self._services.partitions.deadlines, self._services.clock
        self._discarding = _Discarding(self)
        deadlines.add(clock.now() + DISCARD_SECONDS, self._discarding)

    # Answers.

    def _answer(self, exchange: Exchange, response: Response) -> None:
        if exchange is not self._exchange or self._channel is None:
            return
        self._exchange = None
        self.quiet_since = self._services.clock.now()
        self._send(self._encode(response, head=exchange.request.method == "HEAD"))
        if self._http.our_state is h11.MUST_CLOSE:
            self.close()
        else:
            self._work()

    def _encode(self, response: Response, *, head: bool) -> list[Part]:
        headers = [
            ("Date", formatdate(self._services.clock.wall_ms() / 1000, usegmt=True)),
            ("Content-Type", response.content_type),
            ("Content-Length", str(response.body_bytes)),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
        ]
        if response.close:
            headers.append(("Connection", "close"))
        http = self._http
        parts: list[Any] = [http.send(h11.Response(status_code=response.status, headers=headers))]
        if not head:
            for part in response.body:
                # h11 only asks a part for its length, so a slice of a file passes through unread.
                parts += http.send_with_data_passthrough(h11.Data(data=cast(bytes, part))) or ()
        parts.append(http.send(h11.EndOfMessage()))
        return [part for part in parts if part]

    def _send(self, parts: list[Any]) -> None:
        if self._channel is not None:
            self._metrics.bytes_out += sum(len(part) for part in parts)
            self._channel.send(parts)


class _Discarding:
    """The rest of a refused request, read and forgotten within bounds of size and time."""

    def __init__(self, session: HttpSession) -> None:
        self.answered = False
        self._session = session
        self._bytes = 0

    def count(self, count: int) -> None:
        self._bytes += count
        if self._bytes > DISCARD_MAX_BYTES:
            self._session.abort()

    def expire(self) -> None:
        self._session.close()
