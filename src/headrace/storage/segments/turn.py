"""Where a turn of appends began, to go back to when its write fails."""

from __future__ import annotations

from typing import NamedTuple

from headrace.storage.epochs import EpochHistory
from headrace.storage.segments.segment import Segment


class Turn(NamedTuple):
    end_offset: int
    index_count: int
    times_count: int
    next_index_at: int
    greatest_ms: int
    epochs: int

    @staticmethod
    def begin(end_offset: int, segment: Segment, epochs: EpochHistory) -> Turn:
        return Turn(
            end_offset,
            segment.index.count,
            segment.times.count,
            segment.next_index_at,
            segment.greatest_ms,
            len(epochs.entries),
        )

    def take_back(self, segment: Segment, epochs: EpochHistory) -> None:
        """As if nothing had been staged; an index may have been rebuilt meanwhile, with less in it."""
        segment.size = segment.written
        segment.next_offset = self.end_offset
        segment.index.count = min(segment.index.count, self.index_count)
        segment.times.count = min(segment.times.count, self.times_count)
        segment.next_index_at = self.next_index_at
        segment.greatest_ms = self.greatest_ms
        epochs.cut(self.epochs)
