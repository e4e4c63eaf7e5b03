"""The account of one partition: what was sent, what was acknowledged, what was read, and what does not fit together.

Record number n of a partition carries n as its value, and one producer writes them in this order to a new topic: so
number n has to be read once, after n - 1, at offset n. A number that is skipped counts as lost until it turns up later;
then it was out of order. A number that comes again counts as duplicated.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from operator import add


@dataclass(frozen=True, slots=True)
class Totals:
    sent: int = 0
    acknowledged: int = 0
    read: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    misplaced: int = 0
    """Acknowledged or read at an offset that is not the number's, with nothing lost or duplicated before."""

    @property
    def is_whole(self) -> bool:
        return not (self.lost or self.duplicated or self.reordered or self.misplaced)

    def __add__(self, other: Totals) -> Totals:
        return Totals(*map(add, astuple(self), astuple(other)))


class Account:
    """Producer and reader may be two threads: each calls its own methods alone."""

    def __init__(self) -> None:
        self.sent = 0
        self.acknowledged = 0
        self.next_read = 0
        """All numbers below were read, or are missing."""
        self._read = 0
        self._duplicated = 0
        self._reordered = 0
        self._misplaced_acknowledgements = 0
        self._misplaced_reads = 0
        self._missing: set[int] = set()

    def was_acknowledged(self, first: int, count: int, base_offset: int | None) -> None:
        """The offset is None where the broker said only that it had the batch already."""
        if base_offset is not None and base_offset != first:
            self._misplaced_acknowledgements += count
        self.acknowledged = first + count

    def was_read(self, offset: int, number: int) -> None:
        self._read += 1
        if number >= self.next_read:
            self._missing.update(range(self.next_read, number))
            self.next_read = number + 1
        elif number in self._missing:
            self._missing.discard(number)
            self._reordered += 1
        else:
            self._duplicated += 1
        if offset != number and not (self._missing or self._duplicated or self._reordered):
            self._misplaced_reads += 1

    @property
    def all_read(self) -> bool:
        return self.next_read >= self.acknowledged

    def totals(self, final: bool = False) -> Totals:
        """`final` when nothing more will be read: what was acknowledged and has not come is lost then."""
        unread = max(0, self.acknowledged - self.next_read) if final else 0
        return Totals(
            self.sent,
            self.acknowledged,
            self._read,
            len(self._missing) + unread,
            self._duplicated,
            self._reordered,
            self._misplaced_acknowledgements + self._misplaced_reads,
        )
