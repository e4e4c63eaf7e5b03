"""Unsigned varints and the tagged-field sections that are made of them (KIP-482).

A varint has seven bits a byte, lowest first, the high bit saying that more follow; here at most five bytes
and 32 bits. A section is a count, then for each field its tag, its size, and that many bytes.
"""

from __future__ import annotations

from typing import Final

MAX_VARINT_BYTES: Final = 5
MAX_VARINT: Final = 0xFFFF_FFFF
_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(0x80))


class Refused(Exception):
    """What is wrong at the current position; the decoder adds the API, version, field and position."""


def read_uvarint(view: memoryview, pos: int) -> tuple[int, int]:
    """The varint at `pos` and the position after it; IndexError when the view ends inside it."""
    byte = view[pos]
    if byte < 0x80:
        return byte, pos + 1
    value = byte & 0x7F
    for nth in range(1, MAX_VARINT_BYTES):
        byte = view[pos + nth]
        value |= (byte & 0x7F) << (7 * nth)
        if byte < 0x80:
            if value > MAX_VARINT:
                break
            return value, pos + nth + 1
    raise Refused(f"a varint of more than {MAX_VARINT_BYTES} bytes or 32 bits")


def write_uvarint(value: int) -> bytes:
    """The shortest varint of `value`."""
    if value < 0x80:
        return _ONE_BYTE[value]
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if value < 0x20_0000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def skip_tags(view: memoryview, pos: int) -> int:
    """The position after the tagged-field section at `pos`, none of whose fields is known."""
    count, pos = read_uvarint(view, pos)
    end = len(view)
    if count * 2 > end - pos:
        raise too_many(count, end - pos)
    for _ in range(count):
        _, pos = read_uvarint(view, pos)
        size, pos = read_uvarint(view, pos)
        if size > end - pos:
            raise too_long(size, end - pos)
        pos += size
    return pos


def too_long(length: int, remaining: int) -> Refused:
    """For a length below zero or above what remains, and for a null where none may be."""
    if length < 0:
        return Refused("a null or negative length where a value is required")
    return Refused(f"a length of {length} bytes with {remaining} left")


def too_many(count: int, remaining: int) -> Refused:
    """For an array count below zero, or above what the remaining bytes or the limit on elements can hold."""
    if count < 0:
        return Refused("a null or negative count where an array is required")
    return Refused(f"{count} elements, more than {remaining} bytes or the limit on one message can hold")
