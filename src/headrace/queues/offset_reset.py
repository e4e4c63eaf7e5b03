"""Where a share group begins to read a partition that it has no start of: Kafka's `share.auto.offset.reset`."""

from __future__ import annotations

import re
from typing import Final

from headrace.errors import OffsetNotAvailable, SettingError
from headrace.partitions.partition import Partition

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
BY_DURATION: Final = "by_duration:"

_DURATION: Final = re.compile(
    r"P(?=.)(?:(?P<days>\d{1,6})D)?(?:T(?=.)(?:(?P<hours>\d{1,8})H)?(?:(?P<minutes>\d{1,9})M)?"
    r"(?:(?P<seconds>\d{1,10})(?:\.(?P<fraction>\d{1,9}))?S)?)?",
    re.IGNORECASE,
)
"""ISO 8601, as Java reads it, and never back in time."""


def check_reset(reset: str) -> None:
    """SettingError for what the setting cannot be."""
    if reset not in (EARLIEST, LATEST):
        duration_ms(reset)


def duration_ms(reset: str) -> int:
    """How far back `by_duration:` goes."""
    match = _DURATION.fullmatch(reset.removeprefix(BY_DURATION)) if reset.startswith(BY_DURATION) else None
    if match is None:
        raise SettingError(
            f"share.auto.offset.reset={reset!r} cannot be: give {EARLIEST}, {LATEST} or such as {BY_DURATION}PT1H"
        )
    days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    return (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000 + int(
        (match["fraction"] or "0").ljust(3, "0")[:3]
    )


def initial_offset(partition: Partition, reset: str, now_ms: int) -> int:
    """OffsetNotAvailable while a new leader does not know it yet."""
    if reset == EARLIEST:
        return max(partition.first_offset(), partition.log.start_offset)
    core = partition.core
    if core is not None and core.high_watermark < core.epoch_start:
        raise OffsetNotAvailable(f"{partition.topic_partition}: not all of it is known to be committed")
    if reset == LATEST:
        return partition.high_watermark
    found = partition.log.offset_for_time(max(0, now_ms - duration_ms(reset)))
    return partition.high_watermark if found is None else min(found.offset, partition.high_watermark)
