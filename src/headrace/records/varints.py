"""Zigzag varints, the numbers of a record: seven bits a byte, lowest first; -1 is the length of a null.

Positions are checked before a byte is read. A reader that runs out answers position -1, every later one hands it on,
and the record is refused once, at its end.

This is what kernels use that run as Python. Compiled ones have the same functions, inlined, from `varints.pxd`; a test
compares the two line by line.
"""

from __future__ import annotations

from typing import Any


def varint(data: Any, pos: int, end: int) -> tuple[int, int]:
    """The number at `pos` and the position after it, or -1 if it has no end before `end` or in ten bytes. One and two
    bytes are at hand: the length of a hundred bytes is such."""
    if pos < 0 or pos >= end:
        return 0, -1
    raw = data[pos]
    if raw < 0x80:
        return (raw >> 1) ^ -(raw & 1), pos + 1
    if pos + 1 < end and data[pos + 1] < 0x80:
        raw = (raw & 0x7F) | (data[pos + 1] << 7)
        return (raw >> 1) ^ -(raw & 1), pos + 2
    return long_varint(data, pos, end)


def long_varint(data: Any, pos: int, end: int) -> tuple[int, int]:
    raw = 0
    shift = 0
    while pos < end and shift <= 63:
        byte = data[pos]
        pos += 1
        if shift == 63 and byte > 1:
            break
        raw |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (raw >> 1) ^ -(raw & 1), pos
        shift += 7
    return 0, -1


def skip(pos: int, length: int, end: int) -> int:
    """The position after `length` bytes (none for a null), or -1 if they do not fit."""
    if pos < 0 or length < -1 or length > end - pos:
        return -1
    return pos + length if length > 0 else pos


def skip_headers(data: Any, pos: int, count: int, end: int) -> int:
    while count > 0 and pos >= 0:
        length, pos = varint(data, pos, end)
        if length < 0:
            return -1
        pos = skip(pos, length, end)
        length, pos = varint(data, pos, end)
        pos = skip(pos, length, end)
        count -= 1
    return pos if count == 0 else -1


def varint_size(value: int) -> int:
    raw = (value << 1) ^ (value >> 63)
    size = 1
    while raw >= 0x80:
        raw >>= 7
        size += 1
    return size


def put_varint(out: Any, pos: int, value: int) -> int:
    """Answers the position after it."""
    raw = (value << 1) ^ (value >> 63)
    while raw >= 0x80:
        out[pos] = (raw & 0x7F) | 0x80
        pos += 1
        raw >>= 7
    out[pos] = raw
    return pos + 1
