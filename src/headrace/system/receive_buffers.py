"""The memory of all frames that have not arrived whole: one budget for the connections of a loop.

A channel that cannot have the buffer it needs starves: it is not read until others give theirs back, first come first
served. When every holder of a buffer starves, nobody would ever give one back; then the first in line gets its buffer
beyond the budget, so the sum stays below the limit and one largest frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

SPARE_MAX_BYTES: Final = 2 << 20
LEAN_READ_BYTES: Final = 4 << 10
SHARED_BYTES: Final = 512 << 10


class Starving(Protocol):
    def feed(self) -> bool:
        """Try to get the buffer again; True when this channel need not wait any longer."""
        ...


class ReceiveBuffers:
    def __init__(self, limit_bytes: int, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self.shared = memoryview(bytearray(SHARED_BYTES))
        self.held_bytes = 0
        self.limit_bytes = limit_bytes
        self.lean = False
        """Somebody starves: whoever reads should read little, for the rest of a cut frame has to be kept."""
        self._call_soon = call_soon
        self._growing = 0
        self._spare: memoryview | None = None
        self._line: deque[Starving] = deque()
        self._feeding = False

    def take(self, count: int, replaced_bytes: int = 0) -> memoryview | None:
        """A buffer of at least so many bytes instead of a smaller one, or None when the budget is used up."""
        if self._growing and self.held_bytes + count - replaced_bytes > self.limit_bytes:
            return None
        spare, self._spare = self._spare, None
        if spare is None or len(spare) < count:
            spare = memoryview(bytearray(count))
        self.held_bytes += len(spare)
        self._growing += 1
        return spare

    def starve(self, channel: Starving, own: memoryview | None, data: memoryview) -> memoryview:
        """Stand in line, keeping in as little memory as possible what has arrived."""
        if own is None:
            kept = memoryview(bytearray(data))
            self.held_bytes += len(kept)
        else:
            kept = own
            kept[: len(data)] = data
            self._growing -= 1
        self._line.append(channel)
        self.lean = True
        self._feed_soon()
        return kept

    def give(self, buffer: memoryview, *, starving: bool = False) -> None:
        self.held_bytes -= len(buffer)
        if not starving:
            self._growing -= 1
            if len(buffer) <= SPARE_MAX_BYTES:
                self._spare = buffer
        self._feed_soon()

    def _feed_soon(self) -> None:
        if self._line and not self._feeding:
            self._feeding = True
            self._call_soon(self._feed)

    def _feed(self) -> None:
        self._feeding = False
        while self._line and self._line[0].feed():
            self._line.popleft()
        self.lean = bool(self._line)
