"""Damage that a log knows of: found at its start, reported then, never served, and mended from another replica."""

from __future__ import annotations

from headrace.storage.log import Log
from headrace.storage.partitioned import PartitionedLog


def first_damaged_offset(log: Log) -> int | None:
    """The first offset that recovery found damaged. A shared log tells by its reads alone."""
    if not isinstance(log, PartitionedLog):
        return None
    found = [damage.first_offset for segment in log.segments for damage in segment.damage]
    return min(found, default=None)
