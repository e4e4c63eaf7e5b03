"""Compaction by key: of each key's records the latest stays, with its offset.

First the keys of the dirty part are read into a map, key -> latest offset. Then every closed segment up to the end of
that part is written anew without the records that the map outdates (see `storage.compaction`); neighbours become one.
The active segment is never touched. How the new segment takes its place: see `swap`.

All of it is a generator that hands back after every batch, for `cleaner`.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass, field
from typing import Final

from crc32c import crc32c

from headrace.errors import CorruptBatch, InvalidRecord
from headrace.ports.disk import Disk, File
from headrace.records.batch import BatchHeader
from headrace.settings.values import FOREVER_MS
from headrace.storage import compaction
from headrace.storage.cleaner import Steps, wait_for_sync
from headrace.storage.compaction import Batch, CompactionFilter, DecidedTransactions, LatestOffsets
from headrace.storage.folder import stem
from headrace.storage.scan import read_log
from headrace.storage.segments import swap
from headrace.storage.segments.index import TIME_ENTRY, OffsetIndex, TimeIndex, closed
from headrace.storage.segments.log import PartitionedLog
from headrace.storage.segments.segment import (
    INDEX,
    LOG,
    NO_TIMESTAMP,
    RELATIVE_OFFSET_MAX,
    SUM,
    TIME_INDEX,
    Segment,
    Sum,
    encode_sum,
)

log = logging.getLogger(__name__)

WRITE_BYTES: Final = 1 << 18


def due(cleaned: PartitionedLog, now_ms: int) -> bool:
    """Whether enough of the log is dirty, or something dirty is too old."""
    settings = cleaned.settings
    if not settings.compact or cleaned.offline is not None:
        return False
    segments = _cleanable(cleaned, now_ms)
    dirty = [segment for segment in segments if segment.next_offset > cleaned.cleaned_to and segment.written]
    if not dirty:
        return False
    dirty_bytes = sum(segment.written for segment in dirty)
    if dirty_bytes >= settings.min_cleanable_dirty_ratio * sum(segment.written for segment in segments):
        return True
    if settings.max_compaction_lag_ms == FOREVER_MS:
        return False
    _, first = next(dirty[0].headers(0, dirty[0].base_offset))
    return first.base_timestamp_ms < now_ms - settings.max_compaction_lag_ms


def _cleanable(cleaned: PartitionedLog, now_ms: int) -> list[Segment]:
    """Closed segments, up to the first that is too young or not archived, where that matters."""
    lag_ms = cleaned.settings.min_compaction_lag_ms
    end = cleaned.cleanable_below()
    found: list[Segment] = []
    for segment in cleaned.segments[:-1]:
        if segment.damage or segment.next_offset > end or (lag_ms and segment.load_greatest_ms() > now_ms - lag_ms):
            break
        found.append(segment)
    return found


def steps(cleaned: PartitionedLog, disk: Disk, now_ms: int) -> Steps:
    """The whole compaction of one log. A damaged batch ends it: a log that is not whole is not believed. After an
    OSError the log is as it was, or offline."""
    truncations, latest = cleaned.truncations, LatestOffsets()
    try:
        yield from cleaned.producers.steps()
        segments = _cleanable(cleaned, now_ms)
        latest.transactions = DecidedTransactions(cleaned.producers.known.aborted)
        yield from _read_keys(latest, segments, cleaned.cleaned_to)
        segments = [segment for segment in segments if segment.next_offset <= latest.complete_to]
        for group in _groups(segments, cleaned.settings.segment_bytes):
            if cleaned.truncations != truncations or not all(segment in cleaned.segments for segment in group):
                return  # retention took one, or keys are known by records that are cut; the next round begins anew
            yield from _Rewrite(cleaned, disk, group, CompactionFilter(cleaned, latest, now_ms), truncations).run()
    except (CorruptBatch, InvalidRecord) as error:
        compaction.give_up(cleaned, latest, error)
        return
    except FileNotFoundError:
        return  # a segment was deleted meanwhile; the next round begins anew
    if segments and cleaned.truncations == truncations:
        compaction.remember(cleaned, segments[-1].next_offset, now_ms)


def _groups(segments: list[Segment], segment_bytes: int) -> list[list[Segment]]:
    """Neighbours that fit into one segment together."""
    groups: list[list[Segment]] = []
    size = 0
    for segment in segments:
        fits = groups and size + segment.written <= segment_bytes
        if fits and segment.next_offset - groups[-1][0].base_offset <= RELATIVE_OFFSET_MAX:
            groups[-1].append(segment)
            size += segment.written
        else:
            groups.append([segment])
            size = segment.written
    return groups


def _read_keys(latest: LatestOffsets, segments: list[Segment], from_offset: int) -> Steps:
    for segment in segments:
        if segment.next_offset > from_offset:
            latest.reached = segment.base_offset
            for position, header in segment.headers(0, segment.base_offset):
                latest.add(read_log(segment.file, header.size_bytes, position), header)
                yield None
            if latest.is_full and latest.complete_to > from_offset:
                return  # this segment waits for the next round
        latest.complete_to = segment.next_offset


@dataclass(slots=True)
class _Output:
    """The new segment in the making: written in pieces, indexed batch by batch, summed as it grows."""

    file: File
    base_offset: int
    size: int = 0
    crc: int = 0
    greatest_ms: int = NO_TIMESTAMP
    parts: list[Batch] = field(default_factory=list)
    waiting_bytes: int = 0
    index: array[int] = field(default_factory=lambda: array("Q"))
    times: bytearray = field(default_factory=bytearray)

    def add(self, batch: Batch, header: BatchHeader) -> None:
        relative_offset = header.base_offset - self.base_offset
        entry = relative_offset << 32 | self.size
        if entry:
            self.index.append(entry)
        self.crc = crc32c(batch, self.crc)
        self.size += len(batch)
        self.parts.append(batch)
        self.waiting_bytes += len(batch)
        if header.max_timestamp_ms > self.greatest_ms:
            self.greatest_ms = header.max_timestamp_ms
            self.times += TIME_ENTRY.pack(self.greatest_ms, header.next_offset - self.base_offset)
        if self.waiting_bytes >= WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.parts:
            self.file.pwritev(self.parts, self.size - self.waiting_bytes)
        self.parts, self.waiting_bytes = [], 0


class _Rewrite:
    """One group of segments becomes one new segment."""

    def __init__(
        self, cleaned: PartitionedLog, disk: Disk, group: list[Segment], thinning: CompactionFilter, truncations: int
    ) -> None:
        self._log = cleaned
        self._disk = disk
        self._group = group
        self._thinning = thinning
        self._truncations = truncations
        self._stem = stem(cleaned.folder, group[0].base_offset)

    def run(self) -> Steps:
        try:
            yield from self._run()
        except OSError:
            # Full disk, or the partition was deleted: the old segments are untouched.
            if self._log.offline is None:
                self._forget(swap.CLEANED)
                self._forget(swap.SWAP)
            raise

    def _run(self) -> Steps:
        output = _Output(self._new_file(LOG), self._group[0].base_offset)
        for segment in self._group:
            self._thinning.begins(segment.base_offset)
            for position, header in segment.headers(0, segment.base_offset):
                kept = self._thinning.thin(read_log(segment.file, header.size_bytes, position), header)
                if kept is not None:
                    output.add(kept[0], kept[1])
                yield None
        output.flush()
        files = [output.file, *self._write_indexes(output)]
        yield from wait_for_sync(self._disk, files)
        if not self._still_there():
            self._forget(swap.CLEANED)
            return
        swap.prepare(self._disk, self._log.folder, output.base_offset)
        yield from wait_for_sync(self._disk, [self._disk.open(self._log.folder)])
        if not self._still_there():
            self._forget(swap.SWAP)
            return
        self._put_in_place(output)

    def _put_in_place(self, output: _Output) -> None:
        try:
            swap.finish(self._disk, self._log.folder, output.base_offset)
        except OSError as error:
            self._log.fail(error)  # half old, half new: the next start finishes it
            raise
        before = sum(segment.written for segment in self._group)
        first = self._log.segments.index(self._group[0])
        replacement = self._log.swap_segments(first, len(self._group), output.size)
        log.info(
            "%s: compacted offsets %d to %d from %d to %d bytes",
            self._log.topic_partition,
            output.base_offset,
            replacement.next_offset - 1,
            before,
            output.size,
        )

    def _write_indexes(self, output: _Output) -> list[File]:
        """Index, time index and sum of the new segment."""
        found = Sum(output.crc, output.size, self._group[-1].next_offset)
        files: list[File] = []
        for ending, content in (
            (INDEX, closed(output.index.tobytes(), OffsetIndex, output.size)),
            (TIME_INDEX, closed(bytes(output.times), TimeIndex, output.size)),
            (SUM, encode_sum(found)),
        ):
            files.append(self._new_file(ending))
            files[-1].pwritev([content], 0)
        return files

    def _new_file(self, ending: str) -> File:
        file = self._disk.open(self._stem + ending + swap.CLEANED, create=True, writable=True)
        file.truncate(0)
        return file

    def _still_there(self) -> bool:
        there = all(segment in self._log.segments[:-1] for segment in self._group) and self._log.offline is None
        there = there and self._log.truncations == self._truncations
        # The archive may have been set back, or the topic's setting altered, since this began.
        return there and self._group[-1].next_offset <= self._log.cleanable_below()

    def _forget(self, what: str) -> None:
        # The `.log` goes first: without it, what is left of a swap does not count.
        for ending in (LOG, SUM, TIME_INDEX, INDEX):
            path = self._stem + ending + what
            if self._disk.exists(path):
                self._disk.remove(path)
