"""A request that a handler works on, and the slot in the connection's ordered queue that its answer fills."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.ports.network import Part
from headrace.wire.codec import encode_response
from headrace.wire.header import write_response
from headrace.wire.message import Message

if TYPE_CHECKING:
    from headrace.kafka.connection import Connection
    from headrace.kafka.services import Services

log = logging.getLogger(__name__)


class Slot:
    """One response, in the order of its request; `parts` is None until it is known."""

    __slots__ = ("api", "parts", "started")

    def __init__(self, api: str, started: float) -> None:
        self.api = api
        self.started = started
        self.parts: Sequence[Part] | None = None


class Request:
    """A decoded request of any API but Produce and Fetch, which have their own road."""

    __slots__ = ("api_key", "body", "client_id", "connection", "correlation_id", "services", "slot", "version")

    def __init__(
        self,
        connection: Connection,
        slot: Slot,
        api_key: int,
        version: int,
        correlation_id: int,
        client_id: str | None,
        body: Message,
    ) -> None:
        self.connection = connection
        self.services: Services = connection.services
        self.slot = slot
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.body: Any = body

    def encode(self, message: Message) -> bytes:
        return encode_response(self.api_key, self.version, message)

    def reply(self, message: Message) -> None:
        """Fill the slot; it leaves when all earlier ones have."""
        self.reply_encoded(self.encode(message))

    def reply_encoded(self, body: bytes) -> None:
        self.connection.fill(self.slot, [write_response(self.api_key, self.version, self.correlation_id, body)])

    def later(self, work: Coroutine[Any, Any, Message]) -> None:
        """Answer with what the coroutine returns. If it fails, the peer is cut off: it must not wait for ever."""
        self.services.spawn(self._answer(work))

    async def _answer(self, work: Coroutine[Any, Any, Message]) -> None:
        try:
            self.reply(await work)
        except HeadraceError as error:
            self.connection.refuse(f"{self.slot.api} failed: {error}")
        except Exception:  # the request boundary: one request may not take the broker down
            log.exception("%s v%d from %s failed", self.slot.api, self.version, self.connection.peer)
            self.services.metrics.protocol_errors += 1
            self.connection.refuse(f"{self.slot.api} failed")
