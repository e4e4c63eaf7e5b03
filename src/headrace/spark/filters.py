"""Filters that a scan takes over from Spark: on topic, partition, offset and timestamp.

Topic and partition are known before anything is read, so every filter on them is decided here, exactly. A range of
offsets is exact too. Of timestamps only a lower bound helps: records of a partition need not lie in the order of time,
so all that is known is that nothing before the first record of that time can match; what follows may or may not, and
Spark looks at it again. An upper bound tells nothing about where to stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

FIRST: Final = 0
LAST: Final = (1 << 63) - 1

_NEVER_NULL: Final = frozenset(("topic", "partition", "offset", "timestamp", "timestampType"))
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_COMPARE: Final[dict[type[Filter], Callable[[Any, Any], bool]]] = {
    EqualTo: lambda left, right: left == right,
    EqualNullSafe: lambda left, right: left == right,
    GreaterThan: lambda left, right: left > right,
    GreaterThanOrEqual: lambda left, right: left >= right,
    LessThan: lambda left, right: left < right,
    LessThanOrEqual: lambda left, right: left <= right,
    In: lambda left, right: left in right,
    StringStartsWith: lambda left, right: left.startswith(right),
    StringEndsWith: lambda left, right: left.endswith(right),
    StringContains: lambda left, right: right in left,
}


@dataclass(frozen=True, slots=True)
class Pushed:
    """What is left to read after the filters: partitions, a range of offsets, and a time to begin at."""

    places: tuple[Filter, ...] = ()
    first_offset: int = FIRST
    next_offset: int = LAST
    from_ms: int | None = None

    def takes(self, topic: str, partition: int) -> bool:
        values = {"topic": topic, "partition": partition}
        return all(_holds(each, values) for each in self.places)

    def span(self, start: int, end: int) -> tuple[int, int]:
        return max(start, self.first_offset), min(end, self.next_offset)

    def __str__(self) -> str:
        told = [repr(each) for each in self.places]
        if self.first_offset > FIRST or self.next_offset < LAST:
            told.append(f"offsets {self.first_offset} to {self.next_offset}")
        if self.from_ms is not None:
            told.append(f"from {self.from_ms} ms on")
        return ", ".join(told) or "nothing"


def push(filters: Sequence[Filter]) -> tuple[Pushed, list[Filter]]:
    """What the scan does itself, and the filters that Spark has to apply to its rows all the same."""
    places: list[Filter] = []
    first, after, from_ms = FIRST, LAST, None
    left: list[Filter] = []
    for each in filters:
        column, value, kind = _parts(each)
        if kind is IsNotNull and column in _NEVER_NULL:
            continue
        if kind is IsNull and column in _NEVER_NULL:
            after = first
        elif (column == "topic" and _is_of(value, str)) or (column == "partition" and _is_of(value, int)):
            places.append(each)
        elif column == "offset" and not isinstance(each, Not) and _is_of(value, int):
            low, high = _range(kind, value)
            first, after = max(first, low), min(after, high)
            if kind is In:
                left.append(each)
        else:
            if column == "timestamp" and not isinstance(each, Not):
                from_ms = _later(from_ms, _least_ms(kind, value))
            left.append(each)
    return Pushed(tuple(places), first, max(first, after), from_ms), left


def _parts(each: Filter) -> tuple[str | None, Any, type[Filter]]:
    """Column, value and kind of a filter; a negated one answers for what it negates, but never for a null test."""
    inner = each.child if isinstance(each, Not) else each
    path: tuple[str, ...] = getattr(inner, "attribute", ())
    kind = type(inner)
    if len(path) != 1 or (inner is not each and kind in (IsNull, IsNotNull)):
        return None, None, kind
    return path[0], getattr(inner, "value", None), kind


def _is_of(value: Any, kind: type) -> bool:
    values = value if isinstance(value, tuple | list) else (value,)
    return all(isinstance(one, kind) and not isinstance(one, bool) for one in values)


def _holds(each: Filter, values: dict[str, Any]) -> bool:
    if isinstance(each, Not):
        return not _holds(each.child, values)
    column, value, kind = _parts(each)
    assert column is not None
    return _COMPARE[kind](values[column], value)


def _range(kind: type[Filter], value: Any) -> tuple[int, int]:
    if kind is In:
        return (min(value), max(value) + 1) if value else (FIRST, FIRST)
    low = {GreaterThan: 1, GreaterThanOrEqual: 0, EqualTo: 0, EqualNullSafe: 0}
    high = {LessThan: 0, LessThanOrEqual: 1, EqualTo: 1, EqualNullSafe: 1}
    return value + low[kind] if kind in low else FIRST, value + high[kind] if kind in high else LAST


def _least_ms(kind: type[Filter], value: Any) -> int | None:
    """The earliest whole millisecond that can match."""
    if kind is In:
        value = min(value, default=None) if all(isinstance(one, datetime) for one in value) else None
    elif kind not in (GreaterThan, GreaterThanOrEqual, EqualTo, EqualNullSafe):
        return None
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    least_us = (value - _EPOCH) // timedelta(microseconds=1) + (kind is GreaterThan)
    return math.ceil(least_us / 1000)


def _later(one: int | None, other: int | None) -> int | None:
    return max((each for each in (one, other) if each is not None), default=None)
