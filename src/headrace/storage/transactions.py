"""Which transactions of a log are not decided yet for its readers; nothing of it is on disk by itself.

A transaction is open from its first batch to its marker. It is decided when the marker is below the high watermark: a
marker above it may still be cut, and the transaction end in the other way. So a transaction that has ended waits here
until the watermark has passed its marker. Everything costs the same however many are open: the first one stands first,
because each begins at a higher offset than all before it.

What was ended and not decided is kept in snapshots of producers (`storage.producers`), with `decided_to`: a log whose
watermark is lower than that after a crash takes an older snapshot, and reads more of itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Transactions:
    """By their first offsets."""

    __slots__ = ("_open", "_undecided", "decided_to", "ended")

    def __init__(
        self, open_from: Iterable[int] = (), ended: Iterable[tuple[int, int]] = (), decided_to: int = 0
    ) -> None:
        """`ended`: first offset and marker's offset, in the order of the markers."""
        self.ended: OrderedDict[int, int] = OrderedDict(ended)
        """The offset of the marker by the first one, in the order of the markers."""
        self._open: OrderedDict[int, None] = OrderedDict.fromkeys(sorted(open_from))
        self._undecided: OrderedDict[int, None] = OrderedDict.fromkeys(sorted([*self._open, *self.ended]))
        self.decided_to = decided_to
        """Behind the last marker that was passed by the watermark, as far as one was: of what came before nothing is
        known any more."""

    @property
    def open_count(self) -> int:
        return len(self._open)

    def begin(self, first_offset: int) -> None:
        self._open[first_offset] = self._undecided[first_offset] = None

    def end(self, first_offset: int, marker_offset: int) -> None:
        del self._open[first_offset]
        self.ended[first_offset] = marker_offset

    def take_back_begin(self, first_offset: int) -> None:
        """Nothing of it was written."""
        del self._open[first_offset], self._undecided[first_offset]

    def take_back_end(self, first_offset: int) -> None:
        """The marker, the last one of all, was not written."""
        self.ended.popitem()
        self._open = OrderedDict.fromkeys(sorted([*self._open, first_offset]))

    def advance(self, watermark: int) -> None:
        """Markers below the watermark count."""
        ended = self.ended
        while ended:
            first_offset, marker_offset = next(iter(ended.items()))
            if marker_offset >= watermark:
                break
            del ended[first_offset], self._undecided[first_offset]
            self.decided_to = marker_offset + 1

    def first_undecided(self, watermark: int) -> int | None:
        """The first offset of those that are open, or whose marker is not below the watermark."""
        if self.ended:
            self.advance(watermark)
        return next(iter(self._undecided), None)

    def first_open(self, end_offset: int) -> int:
        """The first offset of those without a marker; the end if there is none."""
        return next(iter(self._open), end_offset)
