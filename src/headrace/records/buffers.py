"""Buffers that are used again, where new memory would cost more than to fill it: the kernel clears every page first.

A buffer that was lent is free again when its last view is gone, which a bytearray tells by itself: while one lives it
refuses to be resized. What somebody keeps is so never written to, however long it is kept. A pool that has too many
forgets its oldest buffers; those are then their keeper's alone.
"""

from __future__ import annotations

from functools import cache
from typing import Final

GRAIN_BYTES: Final = 64 << 10
"""Smaller ones are simply new."""
MOST_BUFFERS: Final = 64
HEAP_BYTES: Final = 16 << 20


class BufferPool:
    """Not for several threads at once. It remembers buffers of up to `most_bytes`, whether lent or free."""

    __slots__ = ("_bytes", "_known", "_most_bytes")

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._known: list[bytearray] = []
        self._bytes = 0
        _keep_heap()

    def take(self, size: int) -> bytearray:
        """Room for `size` bytes or, by half at most, more; any bytes are in it. The caller's alone until it is lent."""
        if size < GRAIN_BYTES:
            return _fresh(size)
        known, most = self._known, max(size + size // 2, 2 * GRAIN_BYTES)
        for nth in range(len(known) - 1, -1, -1):
            if size <= len(known[nth]) <= most and _is_free(known[nth]):
                found = known.pop(nth)
                self._bytes -= len(found)
                return found
        # A little to spare: the next one may be slightly larger.
        return _fresh(-(-(size + size // 8) // GRAIN_BYTES) * GRAIN_BYTES)

    def lend(self, buffer: bytearray) -> None:
        """The buffer is free once the views of it are gone, the first of which must have been taken before."""
        known = self._known
        if len(buffer) < GRAIN_BYTES:
            return
        known.append(buffer)
        self._bytes += len(buffer)
        while self._bytes > self._most_bytes or len(known) > MOST_BUFFERS:
            self._bytes -= len(known.pop(0))

    def clear(self) -> None:
        """Forget all: what is free goes back at once, what is lent is its keeper's alone."""
        self._known.clear()
        self._bytes = 0


@cache
def _keep_heap() -> None:
    """Once in a process. The C library gives free memory at the end of its heap back to the kernel at once, until a
    large block was freed; then it keeps up to twice as much. Else records that come and go would be new pages again
    and again. No page of this block is touched.
    """
    bytes(HEAP_BYTES)


def _fresh(size: int) -> bytearray:
    """The kernel that has it brings the codecs with it: a client that only asks small questions starts without."""
    from headrace.records.arrow_decoder import fresh

    return fresh(size)


def _is_free(buffer: bytearray) -> bool:
    try:
        last = buffer.pop()
    except BufferError:
        return False
    buffer.append(last)
    return True
