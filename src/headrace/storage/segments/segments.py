"""A log's segments in order of their first offsets: found by binary search, read by offset, searched by time.

A time is looked for in segments by their greatest timestamp, then in the time index, then headers, then one batch.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, overload

from headrace.errors import CorruptBatch
from headrace.ports.disk import File, FileSlice, Source
from headrace.records import kernel
from headrace.records.batch import BatchHeader
from headrace.storage.checked_bytes import CheckBudget
from headrace.storage.epochs import EpochHistory
from headrace.storage.log import ReadResult, TimedOffset
from headrace.storage.scan import read_log, walk_checked
from headrace.storage.segments.segment import NEVER, NO_TIMESTAMP, Checks, Segment

log = logging.getLogger(__name__)


class Segments:
    """Never empty but while it is being replaced; the last one is the active one."""

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments
        self._bases = [segment.base_offset for segment in segments]

    @property
    def active(self) -> Segment:
        return self._segments[-1]

    @property
    def bases(self) -> list[int]:
        return self._bases

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def __contains__(self, segment: object) -> bool:
        return segment in self._segments

    @overload
    def __getitem__(self, at: int) -> Segment: ...

    @overload
    def __getitem__(self, at: slice) -> list[Segment]: ...

    def __getitem__(self, at: int | slice) -> Segment | list[Segment]:
        return self._segments[at]

    def index(self, segment: Segment) -> int:
        return self._segments.index(segment)

    def add(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._bases.append(segment.base_offset)

    def replace(self, first: int, count: int, replacement: list[Segment]) -> list[Segment]:
        """Answers those that were replaced."""
        replaced = self._segments[first : first + count]
        self._segments[first : first + count] = replacement
        self._bases[first : first + count] = [segment.base_offset for segment in replacement]
        return replaced

    def after(self, segment: Segment) -> Segment:
        return self._segments[bisect_right(self._bases, segment.base_offset)]

    def base_of(self, offset: int) -> int:
        """Where the segment begins in which the offset is."""
        return self._bases[max(0, bisect_right(self._bases, offset) - 1)]

    def count_below(self, offset: int) -> int:
        """How many begin before the offset."""
        return bisect_left(self._bases, offset)

    def locate(self, offset: int) -> tuple[Segment, int]:
        """The first batch that ends at or after the offset; the active segment's end if there is none."""
        at = max(0, bisect_right(self._bases, offset) - 1)
        while True:
            segment = self._segments[at]
            position = segment.locate(offset)
            if position < segment.written or at == len(self._segments) - 1:
                return segment, position
            at += 1

    def headers(self, from_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        """Every batch from the one that holds the offset; CorruptBatch at damage."""
        return self._headers(from_offset, from_offset)

    def sound_headers(self, from_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        """The same, but known damage is left out."""
        return self._headers(from_offset, NEVER)

    def checked_headers(
        self, from_offset: int, *, past_damage: bool, left_out: list[int]
    ) -> Iterator[tuple[BatchHeader, FileSlice]]:
        """The same, of batches that agree with their CRCs; those before are passed by their headers. At one that does
        not: CorruptBatch, or on where the index has the next batch. Takes down where damage was left out."""
        first = max(0, bisect_right(self._bases, from_offset) - 1)
        for segment in self._segments[first:]:
            if not (segment.written or segment.damage):
                continue
            left_out += [
                max(each.first_offset, from_offset) for each in segment.damage if each.next_offset > from_offset
            ]
            segment.load_indexes()
            relative_offset, position = _place(segment, from_offset)
            while position < segment.written:
                expected = segment.base_offset + relative_offset
                try:
                    for found_at, header in segment.headers(position, expected, NEVER, walk_checked):
                        position, expected = found_at + header.size_bytes, header.next_offset
                        if header.next_offset > from_offset:
                            yield header, FileSlice(segment.file, found_at, header.size_bytes)
                    break
                except CorruptBatch as error:
                    if not past_damage:
                        raise
                    log.error("%s", error)
                    left_out.append(max(expected, from_offset))
                    following = segment.index.entries_below(position + 1)
                    if following == segment.index.count:
                        break
                    relative_offset, position = segment.index.entry(following)
            if not past_damage and segment is not self.active and not segment.is_complete:
                raise segment.missing_end()

    def _headers(self, from_offset: int, wanted_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        first = max(0, bisect_right(self._bases, from_offset) - 1)
        for segment in self._segments[first:]:
            if not (segment.written or segment.damage):
                continue
            segment.load_indexes()
            relative_offset, position = segment.index.at_or_before(max(0, from_offset - segment.base_offset))
            expected = segment.base_offset + relative_offset
            for found_at, header in segment.headers(position, expected, wanted_offset):
                if header.next_offset > from_offset:
                    yield header, FileSlice(segment.file, found_at, header.size_bytes)
            if wanted_offset < segment.next_offset and segment is not self.active and not segment.is_complete:
                raise segment.missing_end()


def _place(segment: Segment, from_offset: int) -> tuple[int, int]:
    """Relative offset and position of the batch with the offset, or of one before it."""
    relative_offset, position = segment.index.at_or_before(max(0, from_offset - segment.base_offset))
    if segment.base_offset + relative_offset >= from_offset:
        return relative_offset, position
    with suppress(CorruptBatch):  # whoever checks what lies before meets it again
        for found_at, header in segment.headers(position, segment.base_offset + relative_offset, NEVER):
            if header.next_offset > from_offset:
                return header.base_offset - segment.base_offset, found_at
    return relative_offset, position


def offset_for_time(
    segments: Iterable[Segment], timestamp_ms: int, start_offset: int, end_offset: int
) -> TimedOffset | None:
    """The first record at or after `start_offset` whose timestamp is not below the one asked for."""
    for segment in segments:
        if segment.written and segment.next_offset > start_offset and segment.load_greatest_ms() >= timestamp_ms:
            found = _in_segment(segment, timestamp_ms, start_offset)
            if found is not None:
                return found if found.offset < end_offset else None
    return None


def greatest_timestamp(segments: Iterable[Segment], start_offset: int, end_offset: int) -> TimedOffset | None:
    """The first record that bears the greatest timestamp of all."""
    segments = [segment for segment in segments if segment.written]
    greatest_ms = max((segment.load_greatest_ms() for segment in segments), default=NO_TIMESTAMP)
    if greatest_ms == NO_TIMESTAMP:
        return None
    return offset_for_time(segments, greatest_ms, start_offset, end_offset)


def _in_segment(segment: Segment, timestamp_ms: int, start_offset: int) -> TimedOffset | None:
    segment.load_indexes()
    entry = segment.times.last_below(timestamp_ms)
    from_offset = max(start_offset, segment.base_offset + (entry[1] if entry else 0))
    relative_offset, position = segment.index.at_or_before(from_offset - segment.base_offset)
    for found_at, header in segment.headers(position, segment.base_offset + relative_offset, NEVER):
        if header.next_offset > start_offset and header.max_timestamp_ms >= timestamp_ms:
            found = in_batch(segment.file, found_at, header, timestamp_ms, start_offset)
            if found is not None:
                return found
    return None


def in_batch(
    file: File, position: int, header: BatchHeader, timestamp_ms: int, start_offset: int
) -> TimedOffset | None:
    if header.append_time:
        return TimedOffset(max(header.base_offset, start_offset), header.max_timestamp_ms)
    found = kernel.columns(read_log(file, header.size_bytes, position))
    for offset, record_ms in zip(found.offsets, found.timestamps_ms, strict=True):
        if record_ms >= timestamp_ms and offset >= start_offset:
            return TimedOffset(offset, record_ms)
    return None


PLACES_MAX: Final = 16


class Reader:
    """From an offset to file slices: the places of recent reads first, then the index, then a few headers.

    A consumer that follows the log begins each read where the last one ended. Those places are remembered, so that it
    costs no search; a read that the byte limit cuts ends at an index entry for the same reason.
    """

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
            if not segment.is_complete:
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
