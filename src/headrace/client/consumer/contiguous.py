"""Progress through records that are done in any order: only what is done without a gap may be saved."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Contiguous:
    """`position` is the first offset that is not done: all before it are, or hold no record."""

    __slots__ = ("_done", "_end", "_waiting")

    def __init__(self, position: int) -> None:
        self._end = position
        self._waiting: deque[int] = deque()
        self._done: set[int] = set()

    @property
    def position(self) -> int:
        return self._waiting[0] if self._waiting else self._end

    @property
    def waiting(self) -> int:
        """Offsets that are expected and not yet covered by `position`."""
        return len(self._waiting)

    def expect(self, offsets: Iterable[int], next_offset: int) -> None:
        """Records that will be done: their offsets, which rise, and where the log goes on after them."""
        self._waiting.extend(offsets)
        self._end = next_offset

    def done(self, offset: int) -> None:
        """One of the expected; once each, in any order."""
        waiting, done = self._waiting, self._done
        if waiting and waiting[0] == offset:
            waiting.popleft()
            while waiting and waiting[0] in done:
                done.remove(waiting.popleft())
        else:
            done.add(offset)
