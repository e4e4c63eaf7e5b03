"""Which bytes of a segment this process wrote or has checked, so that each is checked once and no more than is read.

A process trusts what it wrote. What it found on opening a file may have been damaged while nobody looked, so CRCs and
the chain of offsets are checked before the bytes are first served.
"""

from __future__ import annotations

from typing import Final

RANGES_MAX: Final = 64


class CheckedBytes:
    """Bytes from `own_from` on were written by this process; before it, some ranges were checked."""

    __slots__ = ("_ranges", "own_from")

    def __init__(self) -> None:
        self.own_from = 0
        self._ranges: list[tuple[int, int]] = []

    def covers(self, position: int, end: int) -> bool:
        end = min(end, self.own_from)
        return position >= end or any(start <= position and end <= stop for start, stop in self._ranges)

    def add(self, position: int, end: int) -> None:
        apart: list[tuple[int, int]] = []
        for start, stop in self._ranges:
            if position <= stop and start <= end:
                position, end = min(start, position), max(stop, end)
            else:
                apart.append((start, stop))
        # A range that is forgotten is only checked again.
        self._ranges = [*apart[1 - RANGES_MAX :], (position, end)]

    def cut(self, position: int) -> None:
        """What was behind the position is gone; what comes there is our own."""
        self.own_from = min(self.own_from, position)
