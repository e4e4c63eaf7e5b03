"""Requests as a connection sends them: size int32, API key, version, correlation id, client id, the body's parts."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from headrace.errors import HeadraceError, ProtocolError
from headrace.ports.disk import Buffer
from headrace.wire import api as apis
from headrace.wire.codec import encode_request
from headrace.wire.header import write_request
from headrace.wire.message import Message

# Size of the rest, API key, version, correlation id; what follows is the same in every request of that version.
_HEAD: Final = struct.Struct(">ihhi")
_INT32: Final = struct.Struct(">i")

Body = Message | Callable[[int], Sequence[Buffer]]
OnAnswer = Callable[[Message | HeadraceError], None]
Reads = Callable[[memoryview], Any]

log = logging.getLogger(__name__)


class Written(NamedTuple):
    """A request that was written past the others."""

    version: int
    correlation_id: int
    size_bytes: int
    fd: int
    whole: bool
    """The kernel has all of it."""


@dataclass(slots=True, eq=False)
class Asked:
    api_key: int
    body: Body
    on_answer: Callable[[Any], None]
    deadline: float
    timeout_s: float
    answered: bool
    reads: Reads | None = None
    version: int = 0
    correlation_id: int = 0
    starts_at: int = 0
    """Where its bytes start and end in all that was ever given to the connection."""
    ends_at: int = 0


class Framer:
    def __init__(self, client_id: str) -> None:
        self.next_id = 0
        self._client_id = client_id
        self._head_ends: dict[tuple[int, int], bytes] = {}

    def used(self) -> None:
        self.next_id = self.next_id + 1 & 0x7FFFFFFF

    def encode(self, asked: Asked, version: int) -> tuple[list[Buffer], int]:
        """The parts of the request's frame, under the next correlation id, and their size."""
        asked.version, asked.correlation_id = version, self.next_id
        self.used()
        try:
            if isinstance(asked.body, Message):
                body = encode_request(asked.api_key, asked.version, asked.body)
                frame = write_request(asked.api_key, asked.version, asked.correlation_id, self._client_id, body)
                return [frame], len(frame)
            pieces = [piece for piece in asked.body(asked.version) if len(piece)]
        except HeadraceError:
            raise
        except Exception as error:
            log.exception("a %s request could not be encoded", apis.KNOWN[asked.api_key].name)
            raise ProtocolError(f"a {apis.KNOWN[asked.api_key].name} request could not be encoded: {error}") from error
        return self.framed(asked.api_key, asked.version, asked.correlation_id, pieces)

    def framed(
        self, api_key: int, version: int, correlation_id: int, pieces: Sequence[Buffer]
    ) -> tuple[list[Buffer], int]:
        head_end = self._head_ends.get((api_key, version))
        if head_end is None:
            whole = write_request(api_key, version, 0, self._client_id, b"")
            head_end = self._head_ends[api_key, version] = whole[_HEAD.size :]
        size = _HEAD.size + len(head_end) + sum(map(len, pieces))
        return [_HEAD.pack(size - 4, api_key, version, correlation_id) + head_end, *pieces], size


def correlation(frame: memoryview) -> int:
    """Which request an answer is for."""
    found: int = _INT32.unpack_from(frame)[0]
    return found
