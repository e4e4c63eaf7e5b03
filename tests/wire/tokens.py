"""A plain encoder that says which of its bytes are lengths: slow, written from the protocol guide, for tests only."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.wire.message import Message
from headrace.wire.schema import FIXED, Field, Struct


@dataclass(frozen=True, slots=True)
class Token:
    """Some bytes of a body. `width` is that of a length or count: 2, 4, or 0 for a varint; None for other bytes."""

    data: bytes
    path: str
    width: int | None = None

    def hostile(self) -> Iterator[bytes]:
        """What an attacker would put in the place of this length."""
        if self.width == 0:
            yield from (varint(2**31 - 1), varint(2**32 - 1), b"\xff\xff\xff\xff\xff\x01", b"\x80" * 9 + b"\x01")
        elif self.width is not None:
            most = (1 << 8 * self.width - 1) - 1
            yield from (most.to_bytes(self.width, "big"), (-2 & 2 * most + 1).to_bytes(self.width, "big"))


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def tokens(spec: Struct, message: Message, path: str = "") -> Iterator[Token]:
    """The body of `message`, in pieces."""
    for field in spec.plain:
        value = _value(field, message)
        if field.struct is not None and not field.is_array and field.nullable:
            yield Token(b"\xff" if value is None else b"\x01", f"{path}{field.name}")
            if value is None:
                continue
        yield from _field(field, value, spec.flexible, f"{path}{field.name}")
    if spec.flexible:
        yield from _tags(spec, message, path)


def _value(field: Field, message: Message) -> Any:
    value = vars(message).get(field.name, field.default)
    if value is None and field.struct is not None and not field.is_array and not field.nullable:
        return Message()
    return value


def _field(field: Field, value: Any, flexible: bool, path: str) -> Iterator[Token]:
    if not field.is_array:
        yield from _single(field, value, flexible, path)
        return
    yield _length(None if value is None else len(value), 4, flexible, path)
    for element in value or ():
        yield from _single(field, element, flexible, f"{path}[].")


def _single(field: Field, value: Any, flexible: bool, path: str) -> Iterator[Token]:
    if field.struct is not None:
        yield from tokens(field.struct, value, f"{path}.")
    elif field.kind in FIXED:
        yield Token(struct.pack(">" + FIXED[field.kind], value), path)
    else:
        data = value.encode() if isinstance(value, str) else value
        yield _length(None if data is None else len(data), 2 if field.kind == "string" else 4, flexible, path)
        yield Token(bytes(data or b""), path)


def _length(length: int | None, width: int, flexible: bool, path: str) -> Token:
    if flexible:
        return Token(varint(0 if length is None else length + 1), path, 0)
    return Token((-1 if length is None else length).to_bytes(width, "big", signed=True), path, width)


def _tags(spec: Struct, message: Message, path: str) -> Iterator[Token]:
    present = [(field, _value(field, message)) for field in spec.tagged]
    present = [(field, value) for field, value in present if not _is_default(field, value)]
    yield Token(varint(len(present)), f"{path}tags", 0)
    for field, value in present:
        pieces = list(_field(field, value, True, f"{path}{field.name}"))
        yield Token(varint(field.tag or 0), f"{path}{field.name} tag")
        yield Token(varint(sum(len(piece.data) for piece in pieces)), f"{path}{field.name} size", 0)
        yield from pieces


def _is_default(field: Field, value: Any) -> bool:
    if field.is_array:
        return not value
    if field.struct is not None:
        return all(_value(inner, value) == inner.default for inner in field.struct.fields)
    return bool(value == field.default)
