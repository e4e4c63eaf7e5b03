"""Deleting what is too old or too much: the oldest runs of a partition, whatever commit files they lie in.

A run is as old as the newest timestamp up to it in its queue file; if no record has one, as the last write to its
commit file. By size at least the newest run stays. With `retention.archived` a run goes only when all of it is
archived; what stays for that reason alone is counted. Nothing goes of a transaction that is not decided, and nothing
behind it. So much is done at a time, and the rest once that is gone.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Final

from headrace.ports.disk import Disk
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.queue import Queue
from headrace.storage.commitlog.queuefile import DAMAGED, NO_TIMESTAMP, QueueFile

RUNS_MAX: Final = 20_000
NEVER_MS: Final = -(1 << 62)

Piece = tuple[QueueFile, int, int]
"""A file, and the numbers of its first entry of some and of the one behind the last."""


def apply(log: SharedLog, now_ms: int, disk: Disk, commit_log: CommitLog) -> bool:
    """Retire what the topic's settings do not keep; True if there may be more."""
    if log.retiring_to > log.start_offset:
        return True  # who serves the log has not come round to it yet
    log.held_bytes = 0
    settings = log.settings
    if not settings.delete or log.queue.is_empty:
        return False
    oldest_ms = now_ms - settings.retention_ms if settings.retention_ms >= 0 else NEVER_MS
    surplus = log.size_bytes - settings.retention_bytes if settings.retention_bytes >= 0 else -1
    pieces = _unwanted(log.queue, log.start_offset, oldest_ms, surplus, _Changed(disk, commit_log))
    if not pieces:
        return False
    file, _, last = pieces[-1]
    start, end = log.queue.entry((file, last - 1)).next_offset, log.deletable_below()
    log.wanted_start = start
    is_held = start > end
    if is_held:
        start = _hold(log, pieces, end)
    decided = log.decided_to(start) if start > log.start_offset else start
    if decided < start:
        start, is_held = decided, True
    if start > log.start_offset:
        log.retire(start)
    goes = max(log.start_offset, log.retiring_to) >= start  # what a leader elsewhere keeps is looked at when it is time
    return goes and not is_held and sum(last - first for _, first, last in pieces) == RUNS_MAX


def _unwanted(queue: Queue, start_offset: int, oldest_ms: int, surplus: int, changed: _Changed) -> list[Piece]:
    """The oldest entries: those that are too old, and those that are among the surplus bytes."""
    pieces: list[Piece] = []
    left, place = RUNS_MAX, queue.place(start_offset)
    while place is not None and left:
        file, first = place
        last = min(file.count, first + left)
        sizes = _sizes(file, first, last) if surplus >= 0 else []
        much = first + bisect_right(list(accumulate(sizes)), surplus)
        if much == file.count and queue.settle((file, much)) is None:
            much -= 1  # the newest run
        until = max(_old(file, first, last, oldest_ms, changed), much)
        if until == first:
            break
        pieces.append((file, first, until))
        left -= until - first
        if until < file.count:
            break
        surplus -= sum(sizes)
        place = queue.settle((file, until))
    return pieces


def _old(file: QueueFile, first: int, last: int, oldest_ms: int, changed: _Changed) -> int:
    """The first entry of some that is not too old."""
    old = max(first, min(last, file.first_with_time(oldest_ms)))
    untimed = min(old, file.first_with_time(NO_TIMESTAMP + 1))
    if untimed > first:
        for at, number in enumerate(file.numbers_of(first, untimed), first):
            if changed.ms(number) >= oldest_ms:
                return at
    return old


def _hold(log: SharedLog, pieces: list[Piece], end: int) -> int:
    """Count what is unwanted but has to stay; answers the offset that it begins with."""
    place = log.queue.place(end)
    assert place is not None
    held, at = place
    for file, first, last in pieces:
        if file.first_offset >= held.first_offset:
            log.held_bytes += sum(_sizes(file, max(first, at) if file is held else first, last))
    return max(log.start_offset, log.queue.entry(place).offset)


def _sizes(file: QueueFile, first: int, last: int) -> list[int]:
    sizes = file.sizes_of(first, last) if first < last else []
    return [0 if size == DAMAGED else size for size in sizes] if DAMAGED in sizes else sizes


class _Changed:
    """When commit files were last written."""

    def __init__(self, disk: Disk, commit_log: CommitLog) -> None:
        self._disk = disk
        self._commit_log = commit_log
        self._known: dict[int, int] = {}

    def ms(self, number: int) -> int:
        if number not in self._known:
            there = number in self._commit_log.sizes
            self._known[number] = self._disk.changed_ms(self._commit_log.path(number)) if there else NO_TIMESTAMP
        return self._known[number]
