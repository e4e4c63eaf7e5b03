"""Finding a record by its time: segments by greatest timestamp, then the time index, then headers, then one batch."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.ports.disk import File
from headrace.records import kernel
from headrace.records.batch import BatchHeader
from headrace.storage.log import TimedOffset
from headrace.storage.scan import read_log
from headrace.storage.segments.segment import NEVER, NO_TIMESTAMP, Segment


def offset_for_time(
    segments: Iterable[Segment], timestamp_ms: int, start_offset: int, end_offset: int
) -> TimedOffset | None:
    """The first record at or after `start_offset` whose timestamp is not below the one asked for."""
    for segment in segments:
        if segment.written and segment.next_offset > start_offset and segment.greatest_ms >= timestamp_ms:
            found = _in_segment(segment, timestamp_ms, start_offset)
            if found is not None:
                return found if found.offset < end_offset else None
    return None


def greatest_timestamp(segments: Iterable[Segment], start_offset: int, end_offset: int) -> TimedOffset | None:
    """The first record that bears the greatest timestamp of all."""
    segments = [segment for segment in segments if segment.written]
    greatest_ms = max((segment.greatest_ms for segment in segments), default=NO_TIMESTAMP)
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
