"""Bytes to messages and back for every (API, version), compiled on first use and kept.

Bodies only: `wire.header` has the headers. Bytes that are not one valid body
raise ProtocolError naming API, version, field and position; an API or version without a schema is Unsupported.
"""

from __future__ import annotations

from typing import Final

from headrace.wire import schema
from headrace.wire.decoder import Decode, compile_decoder, walk
from headrace.wire.encoder import Encode, compile_encoder
from headrace.wire.message import Message
from headrace.wire.schema import Direction

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


def unknown_fields(api_key: int, direction: Direction, message: Message) -> list[str]:
    """Fields of `message` that no version of the API has: misspelt ones, which the encoder would ignore."""
    known: dict[tuple[str, ...], set[str]] = {}
    for version in schema.landmark_versions(api_key):
        for keys, spec in walk(schema.load(api_key, version, direction)):
            known.setdefault(keys, set()).update(field.name for field in spec.fields)
    return sorted(_unknown(message, (), known))


def _unknown(message: Message, keys: tuple[str, ...], known: dict[tuple[str, ...], set[str]]) -> set[str]:
    unknown = set()
    for name, value in vars(message).items():
        inside = (*keys, name)
        if name not in known.get(keys, set()):
            unknown.add(".".join(inside))
        for inner in value if isinstance(value, list | tuple) else (value,):
            if isinstance(inner, Message):
                unknown |= _unknown(inner, inside, known)
    return unknown
