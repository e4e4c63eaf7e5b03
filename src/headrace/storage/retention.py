"""Deleting what is too old or too much: whole segments, oldest first; an active one that is too old is closed first.

A segment is as old as the newest timestamp in it; if no record has one, as the last write to its file.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.storage.partitioned import PartitionedLog


def apply(log: PartitionedLog, now_ms: int, roll: Callable[[PartitionedLog], None]) -> int:
    """Delete the segments that the topic's settings do not keep; answers how many."""
    settings = log.settings
    if not settings.delete:
        return 0
    segments = log.segments
    count = 0
    if settings.retention_ms >= 0:
        oldest_ms = now_ms - settings.retention_ms
        active = log.active
        if active.written and active.written == active.size and active.newest_ms() < oldest_ms:
            roll(log)
        while count < len(segments) - 1 and segments[count].newest_ms() < oldest_ms:
            count += 1
    if settings.retention_bytes >= 0:
        surplus = log.size_bytes - sum(segment.written for segment in segments[:count]) - settings.retention_bytes
        while count < len(segments) - 1 and surplus >= segments[count].written:
            surplus -= segments[count].written
            count += 1
    if count:
        log.delete_before(segments[count].base_offset)
    return count
