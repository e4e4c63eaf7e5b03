"""How many segments have open files: a bound for all logs of a store."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headrace.storage.segments.segment import Segment

OPEN_SEGMENTS_MAX: Final = 2000


class OpenSegments:
    """Bounds how many segments have open files: the longest open is dropped first, unless it is being written."""

    def __init__(self, most: int = OPEN_SEGMENTS_MAX) -> None:
        self._most = most
        self._open: deque[Segment] = deque()

    def opened(self, segment: Segment) -> None:
        self._open.append(segment)
        for _ in range(len(self._open) - self._most):
            oldest = self._open.popleft()
            if oldest.written < oldest.size:
                self._open.append(oldest)
            else:
                oldest.release()

    def __len__(self) -> int:
        return len(self._open)

    def closed(self, segment: Segment) -> None:
        if segment in self._open:
            self._open.remove(segment)
