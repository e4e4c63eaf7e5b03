"""Damage that a log knows of: found at its start, reported then, never served, and mended from another replica.

What lay at the front of a log and is gone is damage too. Only deletions raise a start, and a leader's start has all its
followers delete what lies before: so a log that has lost its first files begins where it did.
"""

from __future__ import annotations

from contextlib import suppress

from headrace.errors import HeadraceError
from headrace.storage.log import Log
from headrace.storage.partitioned import PartitionedLog
from headrace.storage.shared.log import SharedLog
from headrace.storage.shared.queuefile import DAMAGED


def first_damaged_offset(log: Log) -> int | None:
    """The first offset that recovery found damaged. Of a shared log that is the first of all, or its reads tell."""
    if isinstance(log, PartitionedLog):
        damaged = (damage for segment in log.segments for damage in segment.damage)
        found = [max(each.first_offset, log.start_offset) for each in damaged if each.next_offset > log.start_offset]
        return min(found, default=None)
    return log.start_offset if lost_front(log) else None


def lost_front(log: Log) -> bool:
    """Whether what the log began with is damaged or gone."""
    if isinstance(log, SharedLog):
        first = next(log.queue.entries(log.start_offset), None)
        return first is not None and first.size == DAMAGED
    return first_damaged_offset(log) == log.start_offset


def look_at(log: Log, offset: int) -> None:
    """Somebody could not make sense of the batch at this offset: look at it again. If it is the log that is damaged,
    and not what a client once sent, `Log.on_damage` hears of it."""
    log.doubt()
    with suppress(HeadraceError):
        log.read(offset, 1, log.written_offset, warm=True)
