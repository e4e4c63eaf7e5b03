"""Compaction by key: of each key's records the latest stays, with its offset.

First the keys of the dirty part are read into a map, key -> latest offset. Then every closed segment up to the end of
that part is written anew without the records that the map outdates; small neighbours become one. A record without a
value (a tombstone) goes once `delete.retention.ms` have passed since the first cleaning that saw it; a log remembers
its cleanings as (cleaned up to, wall ms). Control batches stay. A producer's last batch stays, empty if need be, so
that its sequence is not forgotten. The active segment is never touched. How the new segment takes its place: see
`swap`.

All of it is a generator that hands back after every batch, or with a function that tells when to go on.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Final

from crc32c import crc32c

from headrace.errors import CorruptBatch, InvalidRecord
from headrace.ports.disk import Disk, File
from headrace.records import kernel
from headrace.records.batch import HEADER, HEADER_BYTES, LENGTH_END, BatchHeader, read_header, sign
from headrace.settings import FOREVER_MS
from headrace.storage import retention, sums, swap
from headrace.storage.index import TIME_ENTRY, MappedIndex, OffsetIndex, TimeIndex
from headrace.storage.partitioned import PartitionedLog
from headrace.storage.segment import INDEX, LOG, NO_TIMESTAMP, RELATIVE_OFFSET_MAX, SUM, TIME_INDEX, Segment, stem

log = logging.getLogger(__name__)

KEYS_MAX: Final = 500_000
SHORT_KEY_BYTES: Final = 24
WRITE_BYTES: Final = 1 << 18
CLEANINGS_MAX: Final = 32

Ready = Callable[[], bool]
Steps = Generator[Ready | None, None, None]


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
    end = retention.deletable_below(cleaned)
    found: list[Segment] = []
    for segment in cleaned.segments[:-1]:
        if segment.damage or segment.next_offset > end or (lag_ms and segment.greatest_ms > now_ms - lag_ms):
            break
        found.append(segment)
    return found


def steps(cleaned: PartitionedLog, disk: Disk, now_ms: int) -> Steps:
    """The whole compaction of one log. A damaged batch ends it: a log that is not whole is not believed. After an
    OSError the log is as it was, or offline."""
    segments = _cleanable(cleaned, now_ms)
    try:
        latest = _LatestOffsets()
        yield from latest.read(segments, cleaned.cleaned_to)
        segments = [segment for segment in segments if segment.next_offset <= latest.complete_to]
        horizon = _tombstones_below(cleaned, now_ms)
        for group in _groups(segments, cleaned.settings.segment_bytes):
            if not all(segment in cleaned.segments for segment in group):
                return  # retention took one; the next round begins anew
            yield from _Rewrite(cleaned, disk, group, latest.offsets, horizon).run()
    except (CorruptBatch, InvalidRecord) as error:
        log.error("%s is not compacted: %s", cleaned.topic_partition, error)
        return
    except FileNotFoundError:
        return  # a segment was deleted meanwhile; the next round begins anew
    if segments:
        remember(cleaned, segments[-1].next_offset, now_ms)


def remember(cleaned: PartitionedLog, cleaned_to: int, now_ms: int) -> None:
    """Add a cleaning; when there are many, the oldest two count as one, with the later time."""
    kept = [cleaning for cleaning in cleaned.cleanings if cleaning[0] < cleaned_to]
    if len(kept) >= CLEANINGS_MAX:
        del kept[0]
    cleaned.cleanings = [*kept, (cleaned_to, now_ms)]


def _tombstones_below(cleaned: PartitionedLog, now_ms: int) -> int:
    """Tombstones below this offset were there long enough for every reader to see."""
    old_ms = now_ms - cleaned.settings.delete_retention_ms
    return max((offset for offset, at_ms in cleaned.cleanings if at_ms <= old_ms), default=0)


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


def _short(key: bytes) -> bytes:
    """Long keys are told apart by a digest, so that the map's memory does not depend on them."""
    return key if len(key) <= SHORT_KEY_BYTES else hashlib.blake2b(key, digest_size=32).digest()


class _LatestOffsets:
    """Key -> offset of its latest record in the dirty part, for at most KEYS_MAX keys."""

    def __init__(self) -> None:
        self.offsets: dict[bytes, int] = {}
        self.complete_to = 0

    def read(self, segments: list[Segment], from_offset: int) -> Steps:
        for segment in segments:
            if segment.next_offset > from_offset:
                for position, header in segment.headers(0, segment.base_offset):
                    if not header.is_control and header.record_count:
                        self._add(segment.file.pread(header.size_bytes, position))
                    yield None
                if len(self.offsets) > KEYS_MAX and self.complete_to > from_offset:
                    return  # this segment waits for the next round
            self.complete_to = segment.next_offset

    def _add(self, batch: bytes) -> None:
        for offset, key, _ in kernel.keys(batch):
            if key is not None:
                self.offsets[_short(key)] = offset


@dataclass(slots=True)
class _Output:
    """The new segment in the making: written in pieces, indexed batch by batch, summed as it grows."""

    file: File
    base_offset: int
    size: int = 0
    crc: int = 0
    greatest_ms: int = NO_TIMESTAMP
    parts: list[bytes | bytearray] = field(default_factory=list)
    waiting_bytes: int = 0
    index: array[int] = field(default_factory=lambda: array("Q"))
    times: bytearray = field(default_factory=bytearray)

    def add(self, batch: bytes | bytearray, header: BatchHeader) -> None:
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
        self, cleaned: PartitionedLog, disk: Disk, group: list[Segment], latest: dict[bytes, int], horizon: int
    ) -> None:
        self._log = cleaned
        self._disk = disk
        self._group = group
        self._latest = latest
        self._horizon = horizon
        self._stem = stem(cleaned.folder, group[0].base_offset)
        states = cleaned.producers.states.values()
        self._last_batches = {state.batches[-1].base_offset for state in states if state.batches}

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
            for position, header in segment.headers(0, segment.base_offset):
                kept = self._thin(segment.file.pread(header.size_bytes, position), header)
                if kept is not None:
                    output.add(kept[0], kept[1])
                yield None
        output.flush()
        files = [output.file, *self._write_beside(output)]
        yield from self._wait_for_sync(files)
        if not self._still_there():
            self._forget(swap.CLEANED)
            return
        swap.prepare(self._disk, self._log.folder, output.base_offset)
        yield from self._wait_for_sync([self._disk.open(self._log.folder)])
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

    def _thin(self, batch: bytes, header: BatchHeader) -> tuple[bytes | bytearray, BatchHeader] | None:
        """The batch with what is kept of it, and its new header; None if nothing is."""
        if header.is_control:
            kernel.columns(batch)
            return batch, header
        keep = bytes(self._stays(*record) for record in kernel.keys(batch))
        if keep and all(keep):
            return batch, header
        thinner = kernel.filter_batch(batch, keep) if any(keep) else None
        if thinner is None:
            if header.base_offset not in self._last_batches or header.producer_id < 0:
                return None
            thinner = _emptied(header)
        return thinner, read_header(thinner)

    def _stays(self, offset: int, key: bytes | None, is_tombstone: bool) -> bool:
        if key is None or self._latest.get(_short(key), -1) > offset:
            return False
        return not (is_tombstone and offset < self._horizon)

    def _write_beside(self, output: _Output) -> list[File]:
        """Index, time index and sum of the new segment."""
        found = sums.Sum(output.crc, output.size, self._group[-1].next_offset)
        files: list[File] = []
        for ending, content in (
            (INDEX, _closed(output.index.tobytes(), OffsetIndex)),
            (TIME_INDEX, _closed(bytes(output.times), TimeIndex)),
            (SUM, sums.encode(found)),
        ):
            files.append(self._new_file(ending))
            files[-1].pwritev([content], 0)
        return files

    def _new_file(self, ending: str) -> File:
        file = self._disk.open(self._stem + ending + swap.CLEANED, create=True, writable=True)
        file.truncate(0)
        return file

    def _wait_for_sync(self, files: list[File]) -> Steps:
        answers: list[OSError | None] = []
        self._disk.request_sync(files, answers.append)
        while not answers:
            yield lambda: bool(answers)
        if answers[0] is not None:
            raise answers[0]

    def _still_there(self) -> bool:
        there = all(segment in self._log.segments[:-1] for segment in self._group) and self._log.offline is None
        # The archive may have been set back, or the topic's setting altered, since this began.
        return there and self._group[-1].next_offset <= retention.deletable_below(self._log)

    def _forget(self, what: str) -> None:
        # The `.log` goes first: without it, what is left of a swap does not count.
        for ending in (LOG, SUM, TIME_INDEX, INDEX):
            path = self._stem + ending + what
            if self._disk.exists(path):
                self._disk.remove(path)


def _closed(entries: bytes, kind: type[MappedIndex]) -> bytes:
    return entries + kind.last_entry(crc32c(entries))


def _emptied(header: BatchHeader) -> bytearray:
    """The batch without its records, which still holds its offsets and its producer's sequence."""
    empty = bytearray(HEADER_BYTES)
    HEADER.pack_into(empty, 0, *header._replace(size_bytes=HEADER_BYTES - LENGTH_END, record_count=0))
    sign(empty)
    return empty
