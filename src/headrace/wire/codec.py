"""A frame of the Kafka protocol and back: the header of a request or response, and its body.

    request v0:  api_key int16, api_version int16, correlation_id int32
    request v1:  v0, client_id nullable string with a two-byte length
    request v2:  v1, tagged fields
    response v0: correlation_id int32
    response v1: v0, tagged fields

Flexible versions use request v2 and response v1; others request v1 and response v0. The client id keeps its
two-byte length in v2. The ApiVersions response always has v0: a client must be able to read it before it knows
which versions the broker has. Only ControlledShutdown 0, which is not served, ever had request v0.

A body's codec is compiled for its (API, version) on first use and kept. Bytes that are not one valid body raise
ProtocolError naming API, version, field and position; an API or version without a schema is Unsupported.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from headrace.errors import ProtocolError
from headrace.wire.api import ALL_APIS, API_VERSIONS, NEVER_FLEXIBLE
from headrace.wire.decoder import Decode, compile_decoder
from headrace.wire.encoder import Encode, compile_encoder
from headrace.wire.message import Message
from headrace.wire.varint import Refused, skip_tags

_CONTROLLED_SHUTDOWN: Final = 7

# Half the cost of calling the named tuple itself.
_new = tuple.__new__

_request_v1 = struct.Struct(">hhih")
_request_v0 = struct.Struct(">hhi")
_framed_v0 = struct.Struct(">ii").pack
_framed_v1 = struct.Struct(">iix").pack
_correlation = struct.Struct(">i").unpack_from
_REQUEST_V0_BYTES: Final = 8
_REQUEST_V1_BYTES: Final = 10
_RESPONSE_V0_BYTES: Final = 4
_RESPONSE_V1_BYTES: Final = 5

FLEXIBLE_FROM: Final[dict[int, int]] = {api.key: api.flexible_from for api in ALL_APIS.values()}
RESPONSE_V1_FROM: Final[dict[int, int]] = {**FLEXIBLE_FROM, API_VERSIONS: NEVER_FLEXIBLE}


class RequestHeader(NamedTuple):
    api_key: int
    version: int
    correlation_id: int
    client_id: str | None
    body: int
    """Where the body begins."""


def read_request_header(view: memoryview, pos: int = 0) -> RequestHeader:
    """The header at `pos` of a view that ends where the frame ends."""
    try:
        api_key, version, correlation_id, size = _request_v1.unpack_from(view, pos)
        body = pos + _REQUEST_V1_BYTES
        client_id = None
        if size >= 0:
            body += size
            if body > len(view):
                raise Refused(f"a client id of {size} bytes with {len(view) - body + size} left")
            client_id = str(view[body - size : body], "utf-8")
        elif size != -1:
            raise Refused(f"a client id of {size} bytes")
        if version >= FLEXIBLE_FROM.get(api_key, NEVER_FLEXIBLE):
            if view[body]:
                body = skip_tags(view, body)
            else:
                body += 1
        return _new(RequestHeader, (api_key, version, correlation_id, client_id, body))
    except (Refused, struct.error, IndexError, UnicodeDecodeError) as error:
        return _read_request_v0(view, pos, error)


def _read_request_v0(view: memoryview, pos: int, error: Exception) -> RequestHeader:
    """The one request with header v0, or the error of reading it as another."""
    if len(view) - pos >= _REQUEST_V0_BYTES:
        api_key, version, correlation_id = _request_v0.unpack_from(view, pos)
        if (api_key, version) == (_CONTROLLED_SHUTDOWN, 0):
            return RequestHeader(api_key, version, correlation_id, None, pos + _REQUEST_V0_BYTES)
    raise ProtocolError(f"request header of {len(view) - pos} bytes: cut short or malformed ({error})") from None


def write_request(api_key: int, version: int, correlation_id: int, client_id: str | None, body: bytes) -> bytes:
    """A complete request frame, its length included."""
    client = b"" if client_id is None else client_id.encode()
    head = _request_v1.pack(api_key, version, correlation_id, -1 if client_id is None else len(client)) + client
    if version >= FLEXIBLE_FROM.get(api_key, NEVER_FLEXIBLE):
        head += b"\0"
    return b"".join(((len(head) + len(body)).to_bytes(4, "big"), head, body))


def write_response(api_key: int, version: int, correlation_id: int, body: bytes) -> bytes:
    """A complete response frame, its length included."""
    if version >= RESPONSE_V1_FROM.get(api_key, NEVER_FLEXIBLE):
        return _framed_v1(_RESPONSE_V1_BYTES + len(body), correlation_id) + body
    return _framed_v0(_RESPONSE_V0_BYTES + len(body), correlation_id) + body


def read_response_header(api_key: int, version: int, view: memoryview, pos: int = 0) -> tuple[int, int]:
    """The correlation id of a response frame and where its body begins."""
    try:
        (correlation_id,) = _correlation(view, pos)
        pos += _RESPONSE_V0_BYTES
        if version >= RESPONSE_V1_FROM.get(api_key, NEVER_FLEXIBLE):
            pos = skip_tags(view, pos)
        return correlation_id, pos
    except (Refused, struct.error, IndexError) as error:
        raise ProtocolError(f"response header of {len(view)} bytes: cut short or malformed ({error})") from None


# Bodies.

_request_decoders: Final[dict[tuple[int, int], Decode]] = {}
_response_decoders: Final[dict[tuple[int, int], Decode]] = {}
_request_encoders: Final[dict[tuple[int, int], Encode]] = {}
_response_encoders: Final[dict[tuple[int, int], Encode]] = {}


def decode_request(api_key: int, version: int, view: memoryview, pos: int = 0) -> Message:
    """The request body that fills `view` from `pos` to its end; `records` fields are slices of the view."""
    decode = _request_decoders.get((api_key, version))
    if decode is None:
        decode = _request_decoders[api_key, version] = compile_decoder(api_key, version, "request")
    return decode(view, pos)


def decode_response(api_key: int, version: int, view: memoryview, pos: int = 0) -> Message:
    """The response body that fills `view` from `pos` to its end; `records` fields are slices of the view."""
    decode = _response_decoders.get((api_key, version))
    if decode is None:
        decode = _response_decoders[api_key, version] = compile_decoder(api_key, version, "response")
    return decode(view, pos)


def encode_request(api_key: int, version: int, message: Message) -> bytes:
    """The request body of `message`."""
    encode = _request_encoders.get((api_key, version))
    if encode is None:
        encode = _request_encoders[api_key, version] = compile_encoder(api_key, version, "request")
    return encode(message)


def encode_response(api_key: int, version: int, message: Message) -> bytes:
    """The response body of `message`."""
    encode = _response_encoders.get((api_key, version))
    if encode is None:
        encode = _response_encoders[api_key, version] = compile_encoder(api_key, version, "response")
    return encode(message)
