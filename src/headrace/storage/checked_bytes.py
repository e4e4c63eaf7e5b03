"""Which bytes of a segment this process wrote or has checked, so that each is checked once and no more than is read.

A process trusts what it wrote. What it found on opening a file may have been damaged while nobody looked, so CRCs and
the chain of offsets are checked before the bytes are first served. All logs together check so much in a turn of the
loop and no more, so that a reader of old data does not hold up the others.
"""

from __future__ import annotations

from typing import Final

from headrace.ports.clock import Clock

RANGES_MAX: Final = 64
TURN_BYTES: Final = 1 << 20
TURN_BATCHES: Final = 1000


class CheckedBytes:
    """Bytes from `own_from` on were written by this process; before it, some ranges were checked."""

    __slots__ = ("_ranges", "own_from")

    def __init__(self) -> None:
        self.own_from = 0
        self._ranges: list[tuple[int, int, int]] = []

    def covers(self, position: int, end: int) -> bool:
        end = min(end, self.own_from)
        return position >= end or any(start <= position and end <= stop for start, stop, _ in self._ranges)

    def reached(self, position: int) -> tuple[int, int] | None:
        """Where the checked range that the position lies in ends, and which offset is due there."""
        for start, stop, next_offset in self._ranges:
            if start <= position < stop:
                return stop, next_offset
        return None

    def add(self, position: int, end: int, next_offset: int) -> None:
        """Bytes up to `end`, where the batch with the next offset begins."""
        apart: list[tuple[int, int, int]] = []
        for start, stop, following in self._ranges:
            if position <= stop and start <= end:
                position = min(start, position)
                end, next_offset = max((stop, following), (end, next_offset))
            else:
                apart.append((start, stop, following))
        # A range that is forgotten is only checked again.
        self._ranges = [*apart[1 - RANGES_MAX :], (position, end, next_offset)]

    def cut(self, position: int) -> None:
        """What was behind the position is gone; what comes there is our own."""
        self.own_from = min(self.own_from, position)


class CheckBudget:
    """What may still be checked in this turn of the loop, over all logs of a store."""

    __slots__ = ("_clock", "_renewing", "batches", "bytes")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._renewing = False
        self.bytes = TURN_BYTES
        self.batches = TURN_BATCHES

    @property
    def spent(self) -> bool:
        return self.bytes <= 0 or self.batches <= 0

    def spend(self, count_bytes: int, batches: int) -> None:
        self.bytes -= count_bytes
        self.batches -= batches
        if not self._renewing:
            self._renewing = True
            self._clock.call_soon(self._renew)

    def _renew(self) -> None:
        self._renewing = False
        self.bytes, self.batches = TURN_BYTES, TURN_BATCHES
