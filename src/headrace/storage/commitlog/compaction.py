"""Compaction by key in the shared layout: of each key's records the latest stays, with its offset.

First the keys of the dirty part are read into a map, key -> latest offset. Then every run up to the end of that part is
thinned (see `storage.compaction`). Runs that lose something are written as replace frames, neighbours together; the
others stay where they are. The queue leads to the new ones when they are synced (see `replace_frames`).

The newest `segment.bytes` of a log are left alone, except what lies in commit files that have not been written to for
`segment.ms`, and what is older than `max.compaction.lag.ms`. Nothing younger than `min.compaction.lag.ms` is touched,
and with `retention.archived` nothing that is not archived. The last run stays as it is, so that the end of a log can be
read. A crash leaves some runs thinned and others not; the log is cleaned again then.

All of it is a generator that hands back after every run, for `cleaner`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from headrace.errors import CorruptBatch, InvalidRecord, UnreadableBatch
from headrace.ports.disk import Buffer, Disk
from headrace.records.batch import BatchHeader, batches
from headrace.settings.values import FOREVER_MS
from headrace.storage import compaction
from headrace.storage.cleaner import Steps
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.queue import Queue
from headrace.storage.commitlog.queuefile import DAMAGED, GONE, Entry, QueueFile
from headrace.storage.commitlog.replace_frames import Replacements
from headrace.storage.compaction import CompactionFilter, DecidedTransactions, LatestOffsets
from headrace.storage.scan import read_log, walk_checked

log = logging.getLogger(__name__)

GROUP_BYTES: Final = 1 << 18
GROUP_ENTRIES: Final = 512
WAITING_RUNS_MAX: Final = 4096


def due(cleaned: SharedLog, disk: Disk, commit_log: CommitLog, now_ms: int) -> bool:
    """Whether enough of the log is dirty, or something dirty is too old."""
    settings, queue = cleaned.settings, cleaned.queue
    if not settings.compact or cleaned.offline is not None or queue.is_empty:
        return False
    end, dirty_from = cleanable_to(cleaned, disk, commit_log, now_ms), max(cleaned.cleaned_to, cleaned.start_offset)
    dirty_bytes = _bytes_between(queue, dirty_from, end)
    if not dirty_bytes:
        return False
    if dirty_bytes >= settings.min_cleanable_dirty_ratio * _bytes_between(queue, cleaned.start_offset, end):
        return True
    if settings.max_compaction_lag_ms == FOREVER_MS:
        return False
    first, _ = next(cleaned.sound_headers(dirty_from))
    return first.base_timestamp_ms < now_ms - settings.max_compaction_lag_ms


def cleanable_to(cleaned: SharedLog, disk: Disk, commit_log: CommitLog, now_ms: int) -> int:
    """Everything from this offset on is left alone."""
    settings, queue = cleaned.settings, cleaned.queue
    end = max(
        _newest_from(queue, settings.segment_bytes),
        _written_before(cleaned, disk, commit_log, now_ms - settings.segment_ms),
    )
    if settings.max_compaction_lag_ms != FOREVER_MS:
        end = max(end, _older_than(queue, now_ms - settings.max_compaction_lag_ms))
    if settings.min_compaction_lag_ms:
        end = min(end, _older_than(queue, now_ms - settings.min_compaction_lag_ms + 1))
    limit = cleaned.cleanable_below()
    if limit < end:
        place = queue.place(limit)
        end = queue.entry(place).offset if place is not None else limit
    return end


def _newest_from(queue: Queue, size_bytes: int) -> int:
    """Where the newest so many bytes begin."""
    following = queue.end_offset
    for file, front in reversed(list(queue.files())):
        sizes = _sizes(file, front, file.count)
        total = sum(sizes)
        if total > size_bytes:
            for nth in range(len(sizes) - 1, -1, -1):
                if sizes[nth] > size_bytes:
                    return following
                size_bytes -= sizes[nth]
                following = file.offset_at(front + nth)
        size_bytes -= total
        following = file.offset_at(front)
    return following


def _older_than(queue: Queue, time_ms: int) -> int:
    """The first offset by which this timestamp was reached."""
    for file, front in queue.files():
        at = max(front, file.first_with_time(time_ms))
        if at < file.count:
            return file.offset_at(at)
    return queue.end_offset


def _written_before(cleaned: SharedLog, disk: Disk, commit_log: CommitLog, wall_ms: int) -> int:
    """The first dirty offset that lies in a commit file that was written to since then."""
    offset, young = max(cleaned.cleaned_to, cleaned.start_offset), {commit_log.number: True}
    for entry in cleaned.queue.entries(offset):
        if entry.number not in young:
            there = entry.number in commit_log.sizes
            young[entry.number] = not there or disk.changed_ms(commit_log.path(entry.number)) > wall_ms
        if young[entry.number]:
            return entry.offset
    return cleaned.queue.end_offset


def _bytes_between(queue: Queue, first_offset: int, next_offset: int) -> int:
    total = 0
    for file, front in queue.files():
        first = max(front, file.at_or_before(first_offset))
        last = file.at_or_before(next_offset - 1) + 1
        if first < last:
            total += sum(_sizes(file, first, last))
    return total


def _sizes(file: QueueFile, first: int, last: int) -> list[int]:
    return [0 if size == DAMAGED else size for size in file.sizes_of(first, last)]


def steps(cleaned: SharedLog, disk: Disk, commit_log: CommitLog, replacements: Replacements, now_ms: int) -> Steps:
    """The whole compaction of one log. A damaged batch ends it: a log that is not whole is not believed. After an
    OSError what was done counts, and the rest is as it was."""
    before, truncations, latest = cleaned.size_bytes, cleaned.truncations, LatestOffsets()
    try:
        yield from cleaned.producers.steps()
        latest.transactions = DecidedTransactions(cleaned.producers.known.aborted)
        end = cleanable_to(cleaned, disk, commit_log, now_ms)
        yield from _read_keys(cleaned, commit_log, latest, end)
        if cleaned.truncations == truncations:  # else keys may be known by records that are cut
            yield from _Compaction(cleaned, commit_log, latest, replacements, now_ms, truncations).run()
    except (CorruptBatch, InvalidRecord) as error:
        compaction.give_up(cleaned, latest, error)
        return
    except OSError:
        yield from replacements.settle()
        raise
    yield from replacements.settle()
    if cleaned.truncations == truncations and cleaned.offline is None and latest.complete_to > cleaned.cleaned_to:
        compaction.remember(cleaned, latest.complete_to, now_ms)
        log.info(
            "%s: compacted up to offset %d, from %d to %d bytes",
            cleaned.topic_partition,
            latest.complete_to - 1,
            before,
            cleaned.size_bytes,
        )


def _batches(commit_log: CommitLog, entry: Entry) -> Iterator[tuple[BatchHeader, memoryview]]:
    if entry.size == DAMAGED:
        raise CorruptBatch(
            f"{commit_log.path(entry.number)} at byte {entry.byte}: offsets {entry.offset} to {entry.next_offset - 1} "
            "are damaged"
        )
    if entry.size == GONE:
        return
    file, end = commit_log.file(entry.number), entry.byte + entry.size
    try:
        data = read_log(file, entry.size, entry.byte)
    except UnreadableBatch:
        for byte, header in walk_checked(file, entry.byte, end):
            yield header, memoryview(read_log(file, header.size_bytes, byte))
        return
    yield from batches(memoryview(data))


def _read_keys(cleaned: SharedLog, commit_log: CommitLog, latest: LatestOffsets, end: int) -> Steps:
    first = offset = max(cleaned.cleaned_to, cleaned.start_offset)
    latest.complete_to = min(offset, end)
    truncations = cleaned.truncations
    while offset < end and cleaned.truncations == truncations and cleaned.offline is None:
        place = cleaned.queue.place(offset)
        if place is None:
            return
        entry = cleaned.queue.entry(place)
        latest.reached = entry.offset
        for header, batch in _batches(commit_log, entry):
            latest.add(batch, header)
        offset = latest.complete_to = max(offset + 1, entry.next_offset)
        if latest.is_full and offset > first:
            return  # what is left waits for the next round
        yield None


class _Compaction:
    def __init__(
        self,
        cleaned: SharedLog,
        commit_log: CommitLog,
        latest: LatestOffsets,
        replacements: Replacements,
        now_ms: int,
        truncations: int,
    ) -> None:
        self._log = cleaned
        self._truncations = truncations
        self._commit_log = commit_log
        self._end = latest.complete_to
        self._thinning = CompactionFilter(cleaned, latest, now_ms)
        self._replacements = replacements
        self._group: list[Entry] = []
        self._kept: list[Buffer] = []
        self._kept_bytes = 0
        self._loses = False
        """Whether an entry of the group loses something; if not, all of them are gone already."""
        self._file: QueueFile | None = None

    def run(self) -> Steps:
        cleaned, queue = self._log, self._log.queue
        offset = cleaned.start_offset
        while offset < self._end:
            place = queue.place(offset)
            if place is None or cleaned.truncations != self._truncations or cleaned.offline is not None:
                return
            entry = queue.entry(place)
            if entry.next_offset > self._end or entry.next_offset >= queue.end_offset:
                break
            if place[0] is not self._file or len(self._group) >= GROUP_ENTRIES or self._kept_bytes >= GROUP_BYTES:
                self._flush()
                self._file = place[0]
            self._take(entry)
            offset = max(offset + 1, entry.next_offset)
            if self._replacements.runs >= WAITING_RUNS_MAX:
                self._flush()
                yield from self._replacements.settle()
            yield None
        self._flush()

    def _take(self, entry: Entry) -> None:
        kept: list[Buffer] = []
        loses = False
        self._thinning.begins(entry.offset)
        for header, batch in _batches(self._commit_log, entry):
            found = self._thinning.thin(batch, header)
            if found is None or found[0] is not batch:
                loses = True
            if found is not None:
                kept.append(found[0])
        if not loses and entry.size != GONE:
            self._flush()
            return
        self._group.append(entry)
        self._kept += kept
        self._kept_bytes += sum(map(len, kept))
        self._loses = self._loses or loses

    def _flush(self) -> None:
        """Write what the group keeps, unless it was all gone before, or since this began the log was truncated or the
        archive set back."""
        group, kept, loses = self._group, self._kept, self._loses
        self._group, self._kept, self._kept_bytes, self._loses = [], [], 0, False
        if not loses or self._log.truncations != self._truncations:
            return
        if group[-1].next_offset <= self._log.cleanable_below():
            self._replacements.add(self._log, group[0].offset, group[-1].next_offset, kept, fewer=True)
