"""Batches of one partition by offset and by time, for everything that is not a fetch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress

from headrace.errors import CorruptBatch
from headrace.ports.disk import FileSlice
from headrace.records.batch import BatchHeader
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.queue import Queue
from headrace.storage.commitlog.queuefile import DAMAGED, NO_TIMESTAMP, Entry
from headrace.storage.log import TimedOffset
from headrace.storage.scan import Walk, walk, walk_checked
from headrace.storage.segments.search import in_batch

log = logging.getLogger(__name__)


def headers(
    queue: Queue, commit_log: CommitLog, from_offset: int, wanted_offset: int
) -> Iterator[tuple[BatchHeader, FileSlice]]:
    """Every batch from the one that holds the offset. Damage is skipped below the wanted offset, else raised."""
    for entry in queue.entries(from_offset):
        if entry.size == DAMAGED and wanted_offset < entry.next_offset:
            raise CorruptBatch(
                f"{commit_log.path(entry.number)} at byte {entry.byte}: offsets {entry.offset} to "
                f"{entry.next_offset - 1} are damaged; `headrace log verify` says more"
            )
        for header, piece in _in_run(commit_log, entry):
            if header.next_offset > from_offset:
                yield header, piece


def checked_headers(
    queue: Queue, commit_log: CommitLog, from_offset: int, *, past_damage: bool, left_out: list[int]
) -> Iterator[tuple[BatchHeader, FileSlice]]:
    """The same, of batches that agree with their CRCs, and known damage is left out. At one that does not agree:
    CorruptBatch, or on with the next run. Takes down where damage was left out."""
    for entry in queue.entries(from_offset):
        if entry.size == DAMAGED and max(entry.offset, from_offset) < entry.next_offset:
            left_out.append(max(entry.offset, from_offset))
        try:
            for header, piece in _in_run(commit_log, entry, walk_checked):
                if header.next_offset > from_offset:
                    yield header, piece
        except CorruptBatch as error:
            if not past_damage:
                raise
            log.error("%s", error)
            left_out.append(max(entry.offset, from_offset))


def _in_run(commit_log: CommitLog, entry: Entry, walk_batches: Walk = walk) -> Iterator[tuple[BatchHeader, FileSlice]]:
    if not entry.has_batches:
        return
    file, expected = commit_log.file(entry.number), entry.offset
    for byte, header in walk_batches(file, entry.byte, entry.byte + entry.size):
        if header.base_offset != expected:
            raise CorruptBatch(
                f"{file.path} at byte {byte}: base offset is {header.base_offset}, but {expected} comes next; "
                "`headrace log verify` says more"
            )
        yield header, FileSlice(file, byte, header.size_bytes)
        expected = header.next_offset


def end_of_run(commit_log: CommitLog, entry: Entry) -> int:
    """The offset behind the last batch of a run, as far as its batches follow each other."""
    end = entry.offset
    with suppress(CorruptBatch):
        for header, _ in _in_run(commit_log, entry):
            end = header.next_offset
    return end


def offset_for_time(
    queue: Queue, commit_log: CommitLog, timestamp_ms: int, start_offset: int, end_offset: int
) -> TimedOffset | None:
    """The first record at or after `start_offset` whose timestamp is not below the one asked for."""
    for file, front in queue.files():
        if file.greatest_ms < timestamp_ms:
            continue
        for at in range(max(front, file.first_with_time(timestamp_ms)), file.count):
            for header, piece in _in_run(commit_log, queue.entry((file, at))):
                if header.next_offset > start_offset and header.max_timestamp_ms >= timestamp_ms:
                    found = in_batch(piece.file, piece.position, header, timestamp_ms, start_offset)
                    if found is not None:
                        return found if found.offset < end_offset else None
    return None


def greatest_timestamp(queue: Queue, commit_log: CommitLog, start_offset: int, end_offset: int) -> TimedOffset | None:
    """The first record that bears the greatest timestamp of all."""
    greatest_ms = max((file.greatest_ms for file, _ in queue.files()), default=NO_TIMESTAMP)
    if greatest_ms == NO_TIMESTAMP:
        return None
    return offset_for_time(queue, commit_log, greatest_ms, start_offset, end_offset)
