"""A seeded mutator of valid frames: the same seed gives the same mutants.

    mutator = Mutator(seed, donors)
    broken = mutator.body(valid)          # any bytes
    broken = mutator.frame(valid_frame)   # a request frame with its four-byte length

`donors` are other valid bytes, from which pieces are spliced in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from headrace.wire import codec

_HOSTILE_LENGTHS = (
    b"\x7f\xff",
    b"\xff\xfe",
    b"\x80\x00",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\xfe",
    b"\x80\x00\x00\x00",
    b"\x00\xff\xff\xff",
    b"\x00\x00\xff\xff",
    b"\x01\x00\x00\x00",
)
_VARINT_BOMBS = (
    b"\xff\xff\xff\xff\x07",
    b"\xff\xff\xff\xff\x0f",
    b"\xff\xff\xff\xff\x7f",
    b"\xff" * 9 + b"\x01",
    b"\x80\x80\x80\x80\x00",
    b"\x80" * 12,
    b"\xff\xff\x7f",
    b"\xff\xff\xff\x7f",
)
_LYING_FRAME_SHARE = 0.02
_HEADER_SHARE = 0.08


class Mutator:
    """Each call applies one to three mutations."""

    def __init__(self, seed: int, donors: Sequence[bytes]) -> None:
        self._rng = random.Random(seed)
        self._donors = donors
        self._kinds: tuple[Callable[[bytearray], None], ...] = (
            self._flip_bits,
            self._truncate,
            self._hostile_length,
            self._varint_bomb,
            self._splice,
            self._repeat,
            self._overwrite,
            self._nudge,
            self._stretch_varint,
        )

    def body(self, valid: bytes) -> bytes:
        """A mutant of `valid`; now and then it is as valid as before."""
        data = bytearray(valid)
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            self._rng.choice(self._kinds)(data)
        return bytes(data)

    def frame(self, valid: bytes) -> bytes:
        """A mutant of a request frame: mostly of its body, sometimes of its header, seldom of its length."""
        content = valid[4:]
        start = codec.read_request_header(memoryview(content)).body
        if self._rng.random() < _HEADER_SHARE:
            start = 0
        mutant = content[:start] + self.body(content[start:])
        length = len(mutant)
        if self._rng.random() < _LYING_FRAME_SHARE:
            length = self._rng.choice((0, length - 1, length + 1, 2**31 - 1, 2**32 - 1, 2**31))
        return (length & 0xFFFF_FFFF).to_bytes(4, "big") + mutant

    def _place(self, data: bytearray) -> int:
        return self._rng.randrange(len(data) + 1)

    def _flip_bits(self, data: bytearray) -> None:
        for _ in range(self._rng.choice((1, 1, 2, 8))):
            if data:
                data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)

    def _truncate(self, data: bytearray) -> None:
        del data[self._place(data) :]

    def _hostile_length(self, data: bytearray) -> None:
        length = self._rng.choice(_HOSTILE_LENGTHS)
        place = self._place(data)
        data[place : place + len(length)] = length

    def _varint_bomb(self, data: bytearray) -> None:
        place = self._place(data)
        data[place : place + 1] = self._rng.choice(_VARINT_BOMBS)

    def _splice(self, data: bytearray) -> None:
        donor = self._rng.choice(self._donors)
        start = self._rng.randrange(len(donor) + 1)
        piece = donor[start : start + self._rng.randrange(40)]
        place = self._place(data)
        data[place : place + self._rng.choice((0, len(piece)))] = piece

    def _repeat(self, data: bytearray) -> None:
        start = self._place(data)
        piece = data[start : start + self._rng.randrange(1, 30)]
        data[start:start] = piece * self._rng.choice((1, 2, 50))

    def _overwrite(self, data: bytearray) -> None:
        place = self._place(data)
        size = min(self._rng.randrange(1, 9), len(data) - place)
        data[place : place + size] = self._rng.choice((bytes(size), b"\xff" * size, self._rng.randbytes(size)))

    def _nudge(self, data: bytearray) -> None:
        """Add or take one: lengths just beyond what remains."""
        if data:
            place = self._rng.randrange(len(data))
            data[place] = (data[place] + self._rng.choice((-1, 1))) & 0xFF

    def _stretch_varint(self, data: bytearray) -> None:
        """Write a byte as a varint of more bytes than it needs: where it was one, the value stays the same."""
        if data:
            place = self._rng.randrange(len(data))
            data[place : place + 1] = bytes((data[place] | 0x80,)) + b"\x80" * self._rng.randrange(3) + b"\0"
