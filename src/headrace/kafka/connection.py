"""One Kafka connection: frames in, handlers run, responses out in request order.

A handler fills its response at once or later; the ready prefix of their queue is sent in one vectored write. What
was appended in one read is written to the log once, at its end. A peer that has too many requests open, or does not
read its responses, is not read any more until it has caught up: its frames stay in its socket.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.errors import HeadraceError, ProtocolError
from headrace.partitions.partition import Appended, Partition
from headrace.ports.network import Address, Channel, Part
from headrace.storage.log import TopicPartition
from headrace.wire.api import ALL_APIS, API_VERSIONS, KAFKA_APIS, PRODUCE
from headrace.wire.codec import decode_request, encode_response, read_request_header, write_response
from headrace.wire.foreign_protocol import HEAD_BYTES as FOREIGN_BYTES
from headrace.wire.foreign_protocol import foreign_protocol
from headrace.wire.message import Message
from headrace.wire.produce import RequestTopic

if TYPE_CHECKING:
    from headrace.kafka.services import Services

log = logging.getLogger(__name__)


class PendingResponse:
    """One response, in the order of its request; `parts` is None until it is known."""

    __slots__ = ("api", "parts", "started")

    def __init__(self, api: str, started: float) -> None:
        self.api = api
        self.started = started
        self.parts: Sequence[Part] | None = None


class Request:
    """A decoded request of any API but Produce and Fetch, which have a fast path."""

    __slots__ = (
        "api_key",
        "body",
        "client_id",
        "connection",
        "correlation_id",
        "is_unsupported",
        "response",
        "services",
        "version",
    )

    def __init__(
        self,
        connection: Connection,
        response: PendingResponse,
        api_key: int,
        version: int,
        correlation_id: int,
        client_id: str | None,
        body: Message,
        *,
        is_unsupported: bool = False,
    ) -> None:
        self.connection = connection
        self.services = connection.services
        self.response = response
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.body: Any = body
        self.is_unsupported = is_unsupported
        """Asked in a version that is not served, so that the body could not be read. Only ApiVersions is then answered.
        """

    def encode(self, message: Message) -> bytes:
        return encode_response(self.api_key, self.version, message)

    def reply(self, message: Message) -> None:
        """Fill the response; it leaves when all earlier ones have."""
        self.reply_encoded(self.encode(message))

    def reply_encoded(self, body: bytes) -> None:
        self.connection.fill(self.response, [write_response(self.api_key, self.version, self.correlation_id, body)])

    def reply_later(self, work: Coroutine[Any, Any, Message]) -> None:
        """Answer with what the coroutine returns. If it fails, the peer is cut off: it must not wait for ever."""
        self.services.spawn(self._answer(work))

    async def _answer(self, work: Coroutine[Any, Any, Message]) -> None:
        try:
            self.reply(await work)
        except HeadraceError as error:
            self.connection.close_with(f"{self.response.api} failed: {error}")
        except Exception:  # the request boundary: one request may not take the broker down
            log.exception("%s v%d from %s failed", self.response.api, self.version, self.connection.peer)
            self.services.metrics.protocol_errors += 1
            self.connection.close_with(f"{self.response.api} failed")


Handler = Callable[[Request], Message | None]
HandleFrame = Callable[["Connection", PendingResponse, int, int, memoryview, int, int], None]
"""(connection, response, version, correlation id, data, where the body begins and ends in it)"""


class FrameHandler(NamedTuple):
    """An API whose handler reads its body itself, with what is needed to find the body."""

    handle: HandleFrame
    name: str
    min_version: int
    max_version: int
    flexible_from: int


def frame_handler(api_key: int, handle: HandleFrame) -> FrameHandler:
    api = KAFKA_APIS[api_key]
    return FrameHandler(handle, api.name, api.min_version, api.max_version, api.flexible_from)


LoneProduce = tuple[PendingResponse, int, int, int, int, RequestTopic, Partition, Appended]
"""A produce of one batch in a turn: response, version, correlation id, acks, timeout ms, topic, partition, result."""

_length = struct.Struct(">i").unpack_from
_head = struct.Struct(">hhih").unpack_from
HEAD_BYTES: Final = 10
_api_key = struct.Struct(">h").unpack_from
OTHER_FRAME_MAX_BYTES: Final = 16 << 20
LENGTH_BYTES: Final = 4
JOINED_MAX_BYTES: Final = 64 << 10
"""Many small answers are cheaper to join than to send as a vector."""
SLICED: Final = frozenset({"Fetch", "ShareFetch"})
"""APIs whose answers have file slices, which cannot be joined."""
NOWHERE: Final = Address("", 0)
FOREIGN: Final = {
    # Anything that is not TLS lets every TLS client say that the port does not speak it.
    "TLS": ("it speaks TLS", b"this port does not speak TLS\n"),
    "HTTP": (
        "it speaks HTTP",
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
        b"this port speaks the protocol of Kafka; HTTP has a port of its own, the setting http.listen\n",
    ),
}
"""By protocol: what is told in the log, and the answer."""


class Connection:
    def __init__(
        self,
        services: Services,
        listener: str,
        handlers: dict[int, Handler],
        frame_handlers: dict[int, FrameHandler],
    ) -> None:
        self.services = services
        self.listener = listener
        self.peer = NOWHERE
        self.last_heard = services.clock.now()
        """When the last whole request came."""
        self._handlers = handlers
        self._frame_handlers = frame_handlers
        self._partitions = services.partitions
        self._metrics = services.metrics
        self._now = services.clock.now
        settings = services.settings
        self._frame_max_bytes: int = settings["frame.max.bytes"]
        self._requests_max: int = settings["connection.requests.max"]
        self._queued_max_bytes: int = settings["connection.queued.bytes"]
        self._channel: Channel | None = None
        self._responses: deque[PendingResponse] = deque()
        self._paused = False
        self._receiving = False
        self._sending_soon = False
        self._blocked = False
        self._ready_bytes = 0
        """Of responses that are known and wait for earlier ones, or for the end of the turn."""
        self.lone_produces: list[LoneProduce] = []
        self.fetched: dict[TopicPartition, tuple[int, int]] = {}
        """From which offset on the consumer at the other end was last sent records of a partition, and the watermark
        then; until it asks for what comes behind them."""

    # Session.

    def opened(self, channel: Channel) -> None:
        self._channel = channel
        self.peer = channel.peer

    def received(self, data: memoryview) -> int:
        channel = self._channel
        assert channel is not None
        self._receiving = True
        started = self._now()
        used, end = 0, len(data)
        room_bytes = self._queued_max_bytes - channel.queued_bytes()
        try:
            while end - used >= LENGTH_BYTES:
                (length,) = _length(data, used)
                if not 0 < length <= self._frame_max_bytes:
                    self._refuse_foreign(data, used)
                    raise ProtocolError(f"a frame of {length} bytes; frame.max.bytes is {self._frame_max_bytes}")
                frame_end = used + LENGTH_BYTES + length
                if frame_end > end:
                    self._check_large(data, used, end, length)
                    channel.want_bytes = LENGTH_BYTES + length
                    break
                if len(self._responses) >= self._requests_max or self._ready_bytes > room_bytes or self._blocked:
                    self._hold()
                    break
                self._frame(data, used + LENGTH_BYTES, frame_end, started)
                used = frame_end
        except HeadraceError as error:
            return self._broken(str(error), end)
        except Exception as error:  # the request boundary: what was staged before it must still be written
            log.exception("a request from %s failed", self.peer)
            return self._broken(f"a request failed: {error!r}", end)
        if used:  # a peer that drips a frame for ever counts as silent
            self.last_heard = started
        self._metrics.bytes_in += used
        self._end_turn()
        return used

    def _broken(self, reason: str, end: int) -> int:
        """Nothing that follows on this connection can be trusted; what came before is answered."""
        self._metrics.protocol_errors += 1
        self._end_turn()
        self.close_with(reason)
        return end

    def _end_turn(self) -> None:
        """Write and answer. The views that were staged die with this call, so a failure here ends the broker."""
        try:
            self._partitions.end_turn()
        except Exception as error:
            self.services.failed(error)
            raise
        finally:
            self._receiving = False
        self._send_ready()

    def _refuse_foreign(self, data: memoryview, used: int) -> None:
        """If it is another protocol, say which, to the peer in its own way and to who reads the log."""
        foreign = foreign_protocol(bytes(data[used : used + FOREIGN_BYTES]))
        if foreign is None:
            return
        reason, answer = FOREIGN[foreign]
        if self._channel is not None and not self._responses:
            self._channel.send([answer])
        raise ProtocolError(f"{reason}, and the listener {self.listener!r} does not")

    def _check_large(self, data: memoryview, used: int, end: int, length: int) -> None:
        """Only records make a large request: others are refused before their memory is spent."""
        if length > OTHER_FRAME_MAX_BYTES and end - used >= LENGTH_BYTES + 2:
            (api_key,) = _api_key(data, used + LENGTH_BYTES)
            if api_key != PRODUCE:
                self._refuse_foreign(data, used)
                raise ProtocolError(
                    f"a request of API {api_key} with {length} bytes; only Produce may have more than "
                    f"{OTHER_FRAME_MAX_BYTES}"
                )

    def drained(self) -> None:
        self._maybe_resume()

    def closed(self, reason: str) -> None:
        self._channel = None
        self._responses.clear()
        if self._paused:
            self._metrics.paused_connections -= 1
        self._metrics.connections_open -= 1
        self.services.connections.pop(self, None)
        self.services.fetch_sessions.close_all(self)
        self.services.share_sessions.close_all(self)
        log.debug("connection from %s ended: %s", self.peer, reason)

    # Requests.

    def _frame(self, data: memoryview, start: int, end: int, started: float) -> None:
        """The fast path: a header without surprises of an API that reads its body where it lies."""
        if end - start > HEAD_BYTES:
            api_key, version, correlation_id, client_id_bytes = _head(data, start)
            raw = self._frame_handlers.get(api_key)
            if raw is not None:
                handle, name, lowest, highest, flexible_from = raw
                body = start + HEAD_BYTES + (client_id_bytes if client_id_bytes > 0 else 0)
                if lowest <= version <= highest and client_id_bytes >= -1 and body < end:
                    if version >= flexible_from and not data[body]:
                        body += 1
                        flexible_from = highest + 1
                    if version < flexible_from:
                        response = PendingResponse(name, started)
                        self._responses.append(response)
                        handle(self, response, version, correlation_id, data, body, end)
                        return
        self._generic_frame(data[start:end], started)

    def _generic_frame(self, frame: memoryview, started: float) -> None:
        api_key, version, correlation_id, client_id, body = read_request_header(frame)
        api = ALL_APIS.get(api_key)
        if api is None:
            raise ProtocolError(f"API {api_key} is not served")
        response = PendingResponse(api.name, started)
        self._responses.append(response)
        if not api.min_version <= version <= api.max_version:
            if api_key != API_VERSIONS:
                raise ProtocolError(
                    f"{api.name} v{version} is not served, only v{api.min_version} to v{api.max_version}"
                )
            self._answer(Request(self, response, api_key, 0, correlation_id, None, Message(), is_unsupported=True))
            return
        raw = self._frame_handlers.get(api_key)
        if raw is not None:
            raw.handle(self, response, version, correlation_id, frame, body, len(frame))
            return
        message = decode_request(api_key, version, frame, body)
        self._answer(Request(self, response, api_key, version, correlation_id, client_id, message))

    def _answer(self, request: Request) -> None:
        try:
            message = self._handlers[request.api_key](request)
        except HeadraceError:
            raise
        except Exception as error:  # the request boundary: one request may not take the broker down
            log.exception("%s v%d from %s failed", request.response.api, request.version, self.peer)
            raise ProtocolError(f"{request.response.api} v{request.version} failed: {error!r}") from None
        if message is not None:
            request.reply(message)

    def skip(self, response: PendingResponse) -> None:
        """A request that gets no answer at all: acks=0. Those behind it may be ready."""
        response.parts = ()
        if not self._receiving:
            self._send_soon()

    def fill(self, response: PendingResponse, parts: Sequence[Part]) -> None:
        """A response is known."""
        response.parts = parts
        self._ready_bytes += sum(map(len, parts))
        if not self._receiving:
            self._send_soon()

    def fill_many(self, filled_bytes: int) -> None:
        """So many bytes of responses were filled by the handler itself."""
        self._ready_bytes += filled_bytes
        if not self._receiving:
            self._send_soon()

    def _send_soon(self) -> None:
        """What one sync or one turn of another connection has answered here leaves together."""
        if not self._sending_soon:
            self._sending_soon = True
            self.services.clock.call_soon(self._send_late)

    def _send_late(self) -> None:
        self._sending_soon = False
        if not self._receiving:
            self._send_ready()

    def _send_ready(self) -> None:
        responses = self._responses
        if not responses or responses[0].parts is None or self._channel is None:
            self._maybe_resume()
            return
        out: list[Part] = []
        now = self._now()
        observe = self._metrics.observe
        api, started, count, sliced = "", 0.0, 0, False
        while responses and (parts := responses[0].parts) is not None:
            response = responses.popleft()
            out.extend(parts)
            if response.started == started and response.api == api:
                count += 1
            else:
                if count:
                    observe(api, now - started, count)
                api, started, count = response.api, response.started, 1
                sliced = sliced or api in SLICED
        observe(api, now - started, count)
        if out:
            queued = self._channel.queued_bytes()
            sent_bytes = sum(map(len, out))
            self._metrics.bytes_out += sent_bytes
            self._ready_bytes -= sent_bytes
            if len(out) > 1 and not sliced and sent_bytes <= JOINED_MAX_BYTES:
                out = [b"".join(out)]  # type: ignore[arg-type]
            self._channel.send(out)
            if queued:
                return
        self._maybe_resume()

    # Pace.

    def _hold(self) -> None:
        if not self._paused and self._channel is not None:
            self._paused = True
            self._metrics.paused_connections += 1
            self._channel.pause()

    def block(self) -> None:
        """Read nothing more until `unblock`: what this peer sent has to be worked off first."""
        self._blocked = True

    def unblock(self) -> None:
        self._blocked = False
        self._maybe_resume()

    def _maybe_resume(self) -> None:
        channel = self._channel
        if (
            self._paused
            and not self._blocked
            and channel is not None
            and len(self._responses) < self._requests_max
            and channel.queued_bytes() + self._ready_bytes <= self._queued_max_bytes
        ):
            self._paused = False
            self._metrics.paused_connections -= 1
            channel.resume()

    def close_with(self, reason: str) -> None:
        """End the connection, after what is ready to leave: the peer cannot be answered in a way that it knows."""
        if self._channel is not None:
            log.warning("closing the connection from %s: %s", self.peer, reason)
            self._channel.close()

    def abort(self) -> None:
        if self._channel is not None:
            self._channel.abort()
