"""Damage that a log knows of: found at its start, reported then, never served, and mended from another replica."""

from __future__ import annotations

from contextlib import suppress

from headrace.errors import HeadraceError
from headrace.storage.log import Log
from headrace.storage.partitioned import PartitionedLog


def first_damaged_offset(log: Log) -> int | None:
    """The first offset that recovery found damaged. A shared log tells by its reads alone."""
    if not isinstance(log, PartitionedLog):
        return None
    found = [damage.first_offset for segment in log.segments for damage in segment.damage]
    return min(found, default=None)


def look_at(log: Log, offset: int) -> None:
    """Somebody could not make sense of the batch at this offset: look at it again. If it is the log that is damaged,
    and not what a client once sent, `Log.on_damage` hears of it."""
    log.doubt()
    with suppress(HeadraceError):
        log.read(offset, 1, log.written_offset, warm=True)
