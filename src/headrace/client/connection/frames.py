"""Requests as a connection sends them, and answers as it takes them.

A request is its size int32, API key, version, correlation id, client id, and the parts of its body.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from headrace.errors import HeadraceError, ProtocolError
from headrace.ports.disk import Buffer
from headrace.ports.network import Address
from headrace.wire import api as apis
from headrace.wire.codec import decode_response, encode_request
from headrace.wire.header import read_response_header, write_request
from headrace.wire.message import Message

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
        head_end = self.head_end(asked.api_key, version)
        size = HEAD.size + len(head_end) + sum(map(len, pieces))
        return [HEAD.pack(size - 4, asked.api_key, version, asked.correlation_id) + head_end, *pieces], size

    def head_end(self, api_key: int, version: int) -> bytes:
        """What is between HEAD and the body."""
        found = self._head_ends.get((api_key, version))
        if found is None:
            whole = write_request(api_key, version, 0, self._client_id, b"")
            found = self._head_ends[api_key, version] = whole[HEAD.size :]
        return found


def decode(asked: Asked, frame: memoryview, peer: Address) -> Any:
    """The answer to a request: what its `reads` makes of it, or else the message."""
    if asked.reads is not None:
        answer = asked.reads(_size(len(frame)) + frame, asked.correlation_id)
        if answer is not None:
            return answer
    correlation_id, body = read_response_header(asked.api_key, asked.version, frame)
    if correlation_id != asked.correlation_id:
        raise ProtocolError(f"{peer} answered request {correlation_id}, not {asked.correlation_id}")
    return decode_response(asked.api_key, asked.version, frame, body)
