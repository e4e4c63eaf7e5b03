"""Offsets as runs: a thousand in a row cost as much as one. No I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple


class Run(NamedTuple):
    """The last offset is included."""

    first: int
    last: int


class OffsetRuns:
    """A set of offsets; its runs are in order, and neither touch nor overlap."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __iter__(self) -> Iterator[Run]:
        return map(Run, list(self._firsts), list(self._lasts))

    def __len__(self) -> int:
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def add(self, first: int, last: int) -> None:
        """These too, whether or not some are there."""
        begin = bisect_right(self._lasts, first - 2)  # the first that ends where this one begins, or later
        end = bisect_right(self._firsts, last + 1)
        if begin < end:
            first, last = min(first, self._firsts[begin]), max(last, self._lasts[end - 1])
        self._firsts[begin:end], self._lasts[begin:end] = [first], [last]

    def has(self, first: int, last: int) -> bool:
        """Whether all of these are there."""
        at = bisect_right(self._firsts, first) - 1
        return at >= 0 and self._lasts[at] >= last

    def outside(self, first: int, last: int) -> list[Run]:
        """What of these is not there."""
        found: list[Run] = []
        for at in range(bisect_right(self._lasts, first - 1), len(self._firsts)):
            if self._firsts[at] > last:
                break
            if self._firsts[at] > first:
                found.append(Run(first, self._firsts[at] - 1))
            first = self._lasts[at] + 1
        return [*found, Run(first, last)] if first <= last else found

    def remove(self, first: int, last: int) -> None:
        """None of these any more, whether or not some are there."""
        begin = bisect_right(self._lasts, first - 1)
        end = bisect_right(self._firsts, last)
        if begin >= end:
            return
        left, right = self._firsts[begin], self._lasts[end - 1]
        kept = ([Run(left, first - 1)] if left < first else []) + ([Run(last + 1, right)] if right > last else [])
        self._firsts[begin:end], self._lasts[begin:end] = [run.first for run in kept], [run.last for run in kept]
