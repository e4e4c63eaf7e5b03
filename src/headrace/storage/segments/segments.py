"""A log's segments in order of their first offsets, found by binary search."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress
from typing import overload

from headrace.errors import CorruptBatch
from headrace.ports.disk import FileSlice
from headrace.records.batch import BatchHeader
from headrace.storage.scan import walk_checked
from headrace.storage.segments.segment import NEVER, Segment

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
            if not past_damage and segment is not self.active and not segment.ends_whole:
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
            if wanted_offset < segment.next_offset and segment is not self.active and not segment.ends_whole:
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
