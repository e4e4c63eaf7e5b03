"""Damage that a log knows of: found at its start, reported then, never served, and mended from another replica.

What lay at the front of a log and is gone is damage too. Only deletions raise a start, and a leader's start has all its
followers delete what lies before: so a log that has lost its first files begins where it did.
"""

from __future__ import annotations

from contextlib import suppress

from headrace.errors import HeadraceError
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.queuefile import DAMAGED
from headrace.storage.log import Log
from headrace.storage.segments.log import PartitionedLog


def first_damaged_offset(log: Log) -> int | None:
    """The first offset that the start found damaged. What an earlier one found in a shared log is told by its reads,
    unless it is the first of all."""
    if isinstance(log, PartitionedLog):
        damaged = (damage for segment in log.segments for damage in segment.damage)
        found = [max(each.first_offset, log.start_offset) for each in damaged if each.next_offset > log.start_offset]
        return min(found, default=None)
    if not isinstance(log, SharedLog):
        return None
    known = (log.start_offset, log.damaged_from)
    return next((offset for offset in known if offset is not None and _is_damaged(log, offset)), None)


def lost_front(log: Log) -> bool:
    """Whether what the log began with is damaged or gone."""
    if isinstance(log, SharedLog):
        return _is_damaged(log, log.start_offset)
    return first_damaged_offset(log) == log.start_offset


def _is_damaged(log: SharedLog, offset: int) -> bool:
    entry = next(log.queue.entries(offset), None) if offset >= log.start_offset else None
    return entry is not None and entry.size == DAMAGED


def look_at(log: Log, offset: int) -> None:
    """Somebody could not make sense of the batch at this offset: look at it again. If it is the log that is damaged,
    and not what a client once sent, `Log.on_damage` hears of it."""
    log.doubt()
    with suppress(HeadraceError):
        log.read(offset, 1, log.written_offset, warm=True)
