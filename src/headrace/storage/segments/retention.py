"""Deleting what is too old or too much: whole segments, oldest first; an active one that is too old is closed first.

A segment is as old as the newest timestamp in it; if no record has one, as the last write to its file. With
`retention.archived` a segment goes only when all of it is archived; what stays for that reason alone is counted.
Nothing goes before it is committed and, if it is of a transaction, decided; nor before whoever serves the log agrees
(`Log.retire`).
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.storage.segments.log import PartitionedLog


def apply(log: PartitionedLog, now_ms: int, roll: Callable[[PartitionedLog], None]) -> int:
    """Retire the segments that the topic's settings do not keep; answers how many."""
    log.held_bytes = 0
    if not log.settings.delete:
        return 0
    end = log.deletable_below()
    if _active_is_too_old(log, now_ms) and log.active.next_offset <= end:
        roll(log)
    unwanted = _unwanted(log, now_ms)
    log.wanted_start = log.segments[unwanted].base_offset
    count = 0
    while count < unwanted and log.segments[count].next_offset <= end:
        count += 1
    if count:
        decided = log.decided_to(log.segments[count].base_offset)
        while count and log.segments[count].base_offset > decided:
            count -= 1
    log.held_bytes = sum(segment.written for segment in log.segments[count:unwanted])
    if count:
        log.retire(log.segments[count].base_offset)
    return count


def _active_is_too_old(log: PartitionedLog, now_ms: int) -> bool:
    active, retention_ms = log.active, log.settings.retention_ms
    settled = active.written > 0 and active.written == active.size
    return retention_ms >= 0 and settled and active.newest_ms() < now_ms - retention_ms


def _unwanted(log: PartitionedLog, now_ms: int) -> int:
    """How many of the oldest segments are too old or too much, archived or not."""
    settings, segments = log.settings, log.segments
    count = 0
    if settings.retention_ms >= 0:
        oldest_ms = now_ms - settings.retention_ms
        while count < len(segments) - 1 and segments[count].newest_ms() < oldest_ms:
            count += 1
    if settings.retention_bytes >= 0:
        surplus = log.size_bytes - sum(segment.written for segment in segments[:count]) - settings.retention_bytes
        while count < len(segments) - 1 and surplus >= segments[count].written:
            surplus -= segments[count].written
            count += 1
    return count
