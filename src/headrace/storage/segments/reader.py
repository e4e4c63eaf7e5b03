"""From an offset to file slices: the places of recent reads first, then the index, then a few headers.

A consumer that follows the log begins each read where the last one ended. Those places are remembered, so that it costs
no search; a read that the byte limit cuts ends at an index entry for the same reason.
"""

from __future__ import annotations

from typing import Final

from headrace.errors import CorruptBatch
from headrace.ports.disk import FileSlice, Source
from headrace.storage.epochs import EpochHistory
from headrace.storage.log import ReadResult
from headrace.storage.scan import read_log
from headrace.storage.segments.checked_bytes import CheckBudget
from headrace.storage.segments.segment import Checks, Segment
from headrace.storage.segments.segments import Segments

PLACES_MAX: Final = 16


class Reader:
    def __init__(self, segments: Segments, epochs: EpochHistory, budget: CheckBudget, source: Source) -> None:
        self._segments = segments
        self._epochs = epochs
        self._budget = budget
        self._source = source
        self._places: dict[int, tuple[Segment, int]] = {}

    def forget(self) -> None:
        """Positions have changed."""
        self._places.clear()

    def read(self, offset: int, max_bytes: int, limit: int, written_offset: int, *, warm: bool) -> ReadResult:
        """Slices from the batch that holds the offset; the limit is the boundary of a batch above it."""
        place = self._places.get(offset)
        segment, position = place if place is not None else self._segments.locate(offset)
        end = self._end_in(segment, limit, written_offset)
        if position + max_bytes < end:
            end = self._cut(segment, position, max_bytes, whole_first=True)
        checks = Checks(self._epochs, self._budget, warm)
        # An offset that compaction removed from the end of one segment is served from the beginning of the next.
        held = max(offset, segment.base_offset)
        sound = segment.sound_end(position, end, held, checks, exact=place is not None)
        slices = [FileSlice(segment.file, position, sound - position, self._source)] if sound > position else []
        count = sound - position
        while sound == segment.written and segment.next_offset < limit and count < max_bytes:
            if not segment.ends_whole:
                break  # the next read begins with what is missing, and says so
            segment = self._segments.after(segment)
            end = self._end_in(segment, limit, written_offset)
            if max_bytes - count < end:
                end = self._cut(segment, 0, max_bytes - count, whole_first=False)
            try:
                sound = segment.sound_end(0, end, segment.base_offset, checks, exact=True)
            except CorruptBatch:
                break  # the next read begins there, and says so
            if sound:
                slices.append(FileSlice(segment.file, 0, sound, self._source))
                count += sound
        return ReadResult(tuple(slices), count, checks.unchecked)

    def _end_in(self, segment: Segment, limit: int, written_offset: int) -> int:
        """Where the limit lies in the segment."""
        if limit >= segment.next_offset or limit == written_offset:
            end = segment.written
        else:
            place = self._places.get(limit)
            end = place[1] if place is not None and place[0] is segment else segment.locate(limit)
        self._remember(limit, segment, end)
        return end

    def _cut(self, segment: Segment, position: int, max_bytes: int, *, whole_first: bool) -> int:
        """Where the byte limit cuts: at an index entry, if the first batch fits before it."""
        segment.load_indexes()
        first_end = position
        if whole_first:
            first_end = position + int.from_bytes(read_log(segment.file, 4, position + 8), "big") + 12
        relative_offset, boundary = segment.index.at_or_below_position(position + max_bytes)
        if boundary > position and boundary >= first_end:
            self._remember(segment.base_offset + relative_offset, segment, boundary)
            return boundary
        return max(first_end, position + max_bytes)

    def _remember(self, offset: int, segment: Segment, position: int) -> None:
        if position == segment.written and segment is not self._segments.active:
            return  # that offset lies in a later segment
        places = self._places
        if len(places) >= PLACES_MAX:
            del places[next(iter(places))]
        places[offset] = (segment, position)
