"""Fields of the records that coordinators keep: Kafka's own formats, so that its tools read the internal topics.

Big-endian. A string is its length (int16, -1 for null) and UTF-8; a compact one its length and one more as a varint;
bytes are their length (int32) and the bytes. Fields with tags are behind the others: a count, then tag, length and
content of each. Every length is checked against what is there.
"""

from __future__ import annotations

import struct
from typing import Final

from headrace.errors import CorruptBatch

Record = tuple[bytes, bytes | None]
"""Key and value; without a value it removes its key."""


_SINGLE: Final = tuple(bytes([value]) for value in range(0x80))


def string(text: str | None) -> bytes:
    if text is None:
        return b"\xff\xff"
    encoded = text.encode()
    return struct.pack(">h", len(encoded)) + encoded


def uvarint(value: int) -> bytes:
    """Seven bits to a byte, the lowest first, as the wire's compact types have them."""
    if value <= 0x7F:
        return _SINGLE[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def compact_string(text: str) -> bytes:
    encoded = text.encode()
    return uvarint(len(encoded) + 1) + encoded


def blob(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


class Reader:
    """Reads on from where it stands; CorruptBatch when the record ends before its fields do."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._position = 0

    def take(self, count: int) -> bytes:
        start = self._position
        if count < 0 or start + count > len(self._content):
            raise CorruptBatch(f"a record of {len(self._content)} bytes has no {count} bytes at {start}")
        self._position = start + count
        return self._content[start : start + count]

    def int16(self) -> int:
        return int.from_bytes(self.take(2), "big", signed=True)

    def int32(self) -> int:
        return int.from_bytes(self.take(4), "big", signed=True)

    def int64(self) -> int:
        return int.from_bytes(self.take(8), "big", signed=True)

    def optional_string(self) -> str | None:
        length = self.int16()
        return None if length == -1 else self._text(length)

    def string(self) -> str:
        return self.optional_string() or ""

    def uvarint(self) -> int:
        value = shift = 0
        while shift < 35:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise CorruptBatch("a number in a record has more than five bytes")

    def compact_string(self) -> str:
        return self._text(self.uvarint() - 1)

    def optional_compact_string(self) -> str | None:
        length = self.uvarint()
        return None if length == 0 else self._text(length - 1)

    def tagged(self) -> dict[int, bytes]:
        """Fields by their tags, which end a record of a flexible version."""
        return {self.uvarint(): self.take(self.uvarint()) for _ in range(self.uvarint())}

    def _text(self, length: int) -> str:
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise CorruptBatch("a string in a record is not UTF-8") from None

    def blob(self) -> bytes:
        return self.take(self.int32())
