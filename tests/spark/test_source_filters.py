"""Filters handed to the scan: nothing that matches is ever left out, and what is taken over is taken over wholly."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
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
    StringStartsWith,
)

from headrace.spark.filters import FIRST, LAST, Pushed, push
from proving import proves

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def at(time_us: int) -> datetime:
    return EPOCH + timedelta(microseconds=time_us)


@dataclass(frozen=True)
class Row:
    topic: str
    partition: int
    offset: int
    timestamp: datetime


JUDGE: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: lambda a, b: a == b,
    EqualNullSafe: lambda a, b: a == b,
    GreaterThan: lambda a, b: a > b,
    GreaterThanOrEqual: lambda a, b: a >= b,
    LessThan: lambda a, b: a < b,
    LessThanOrEqual: lambda a, b: a <= b,
    In: lambda a, b: a in b,
}


def judge(row: Row, each: Filter) -> bool:
    """What Spark would say of a row."""
    if isinstance(each, Not):
        return not judge(row, each.child)
    if isinstance(each, IsNull | IsNotNull):
        return isinstance(each, IsNotNull)
    value = getattr(row, each.attribute[0])  # type: ignore[attr-defined]
    return JUDGE[type(each)](value, each.value)  # type: ignore[attr-defined]


def scan(rows: list[Row], pushed: Pushed) -> list[Row]:
    """What is read: per partition from the first row of the time on, as a broker finds it, within the offsets."""
    found = []
    for place in sorted({(row.topic, row.partition) for row in rows}):
        mine = [row for row in rows if (row.topic, row.partition) == place]
        if not pushed.takes(*place):
            continue
        first = 0
        if pushed.from_ms is not None and pushed.from_ms > 0:
            late = [row.offset for row in mine if row.timestamp >= at(pushed.from_ms * 1000)]
            if not late:
                continue
            first = min(late)
        low, high = pushed.span(first, len(mine))
        found += [row for row in mine if low <= row.offset < high]
    return found


def some_filter(draw: random.Random) -> Filter:
    column = draw.choice(["topic", "partition", "offset", "timestamp"])
    values: dict[str, Callable[[], Any]] = {
        "topic": lambda: draw.choice(["a", "b", "ab", "z"]),
        "partition": lambda: draw.randrange(-1, 4),
        "offset": lambda: draw.randrange(-2, 14),
        "timestamp": lambda: at(draw.randrange(-2000, 8000)),
    }
    kind: Any = draw.choice([*JUDGE, IsNull, IsNotNull])
    if kind in (IsNull, IsNotNull):
        tested: Filter = kind((column,))
        return tested
    value = tuple(values[column]() for _ in range(draw.randrange(1, 3))) if kind is In else values[column]()
    compared: Filter = kind((column,), value)
    return Not(compared) if draw.random() < 0.2 else compared


@proves("S1")
def test_a_scan_with_any_filters_and_sparks_rest_give_exactly_what_matches(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(3000):
        rows = [
            Row(topic, partition, offset, at(1000 * draw.randrange(7)))
            for topic in ("a", "ab")
            for partition in range(draw.randrange(1, 3))
            for offset in range(draw.randrange(12))
        ]
        filters = [some_filter(draw) for _ in range(draw.randrange(1, 4))]
        pushed, left = push(filters)
        assert all(any(each is given for given in filters) for each in left)
        seen = [row for row in scan(rows, pushed) if all(judge(row, each) for each in left)]
        assert seen == [row for row in rows if all(judge(row, each) for each in filters)], (filters, pushed, left)


def test_ranges_of_offsets_and_places_are_taken_over_wholly() -> None:
    given = [GreaterThan(("offset",), 4), LessThanOrEqual(("offset",), 9), EqualTo(("partition",), 1)]
    pushed, left = push([*given, StringStartsWith(("topic",), "ord"), IsNotNull(("offset",))])
    assert left == []
    assert pushed.span(0, 100) == (5, 10)
    assert pushed.takes("orders", 1)
    assert not pushed.takes("orders", 0)
    assert not pushed.takes("payments", 1)


def test_of_times_only_a_lower_bound_is_taken_and_spark_looks_again() -> None:
    lower, upper = GreaterThan(("timestamp",), at(5_000)), LessThan(("timestamp",), at(9_000))
    pushed, left = push([lower, upper])
    assert left == [lower, upper]
    assert pushed == Pushed((), FIRST, LAST, 6)
    assert push([GreaterThanOrEqual(("timestamp",), at(5_001))])[0].from_ms == 6
    assert push([GreaterThanOrEqual(("timestamp",), at(5_000))])[0].from_ms == 5


@pytest.mark.parametrize(
    "other",
    [
        EqualTo(("value",), b"x"),
        IsNull(("key",)),
        StringContains(("key",), "x"),
        Not(EqualTo(("offset",), 5)),
        EqualTo(("headers", "key"), "x"),
        GreaterThan(("timestamp",), datetime(2020, 1, 1)),
        EqualTo(("offset",), 1.5),
    ],
)
def test_other_filters_are_left_to_spark(other: Filter) -> None:
    assert push([other]) == (Pushed(), [other])
