"""Bytes to messages and back for every (API, version), compiled on first use and kept.

Bodies only: `wire.header` has the headers. Bytes that are not one valid body
raise ProtocolError naming API, version, field and position; an API or version without a schema is Unsupported.
"""

from __future__ import annotations

from typing import Final

from headrace.wire.decoder import Decode, compile_decoder
from headrace.wire.encoder import Encode, compile_encoder
from headrace.wire.message import Message

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
