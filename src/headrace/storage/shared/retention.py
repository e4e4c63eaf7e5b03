"""Deleting what is too old or too much: the oldest runs of a partition, whatever commit files they lie in.

A run is as old as the newest timestamp up to it in its queue file; if no record has one, as the last write to its
commit file. By size at least the newest run stays. With `retention.archived` a run goes only when all of it is
archived; what stays for that reason alone is counted. So much is done at a time, and the rest at the next check.
"""

from __future__ import annotations

from typing import Final

from headrace.ports.disk import Disk
from headrace.storage.shared.commitlog import CommitLog
from headrace.storage.shared.log import SharedLog
from headrace.storage.shared.queuefile import NO_TIMESTAMP, Entry

RUNS_MAX: Final = 20_000


def deletable_below(log: SharedLog) -> int:
    """Retention and compaction leave everything from this offset on."""
    return log.archived_offset() if log.settings.retention_archived else log.written_offset


def apply(log: SharedLog, now_ms: int, disk: Disk, commit_log: CommitLog) -> bool:
    """Delete what the topic's settings do not keep; True if there may be more."""
    log.held_bytes = 0
    settings = log.settings
    if not settings.delete or log.queue.is_empty:
        return False
    end, oldest_ms = deletable_below(log), now_ms - settings.retention_ms
    surplus = log.size_bytes - settings.retention_bytes if settings.retention_bytes >= 0 else 0
    start, held = log.start_offset, 0
    runs = 0
    changed_ms: dict[int, int] = {}
    for entry in log.queue.entries(log.start_offset):
        is_old = settings.retention_ms >= 0 and _newest_ms(entry, disk, commit_log, changed_ms) < oldest_ms
        size = entry.size if entry.has_batches else 0
        is_much = settings.retention_bytes >= 0 and surplus >= size and entry.next_offset < log.written_offset
        if runs == RUNS_MAX or not (is_old or is_much):
            break
        surplus -= size
        runs += 1
        if entry.next_offset <= end and not held:
            start = entry.next_offset
        else:
            held += size
    log.held_bytes = held
    if start > log.start_offset:
        log.delete_before(start)
    return runs == RUNS_MAX and not held


def _newest_ms(entry: Entry, disk: Disk, commit_log: CommitLog, changed_ms: dict[int, int]) -> int:
    if entry.greatest_ms != NO_TIMESTAMP or entry.number not in commit_log.sizes:
        return entry.greatest_ms
    if entry.number not in changed_ms:
        changed_ms[entry.number] = disk.changed_ms(commit_log.path(entry.number))
    return changed_ms[entry.number]
