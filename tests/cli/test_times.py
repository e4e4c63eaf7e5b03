"""Times as people type them."""

import time

import pytest

from headrace.cli.times import format_time_ms, parse_time_ms

NOW_MS = 1_800_000_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", NOW_MS),
        ("1763239200000", 1763239200000),
        ("@5", 5),
        ("10m ago", NOW_MS - 600_000),
        ("1.5 h ago", NOW_MS - 5_400_000),
        ("250ms ago", NOW_MS - 250),
        ("2d ago", NOW_MS - 172_800_000),
        ("2001-09-09T01:46:40Z", 1_000_000_000_000),
        ("2001-09-09T03:46:40.125+02:00", 1_000_000_000_125),
    ],
)
def test_each_way_of_giving_a_time(text: str, expected: int) -> None:
    assert parse_time_ms(text, NOW_MS) == expected


def test_a_time_without_a_zone_is_local() -> None:
    local = time.mktime((2026, 11, 15, 12, 0, 0, 0, 0, -1))
    assert parse_time_ms("2026-11-15 12:00", NOW_MS) == int(local * 1000)


@pytest.mark.parametrize("text", ["", "yesterday", "10m", "-5", "10 y ago", "2026-13-01"])
def test_what_is_not_a_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="10m ago"):
        parse_time_ms(text, NOW_MS)


def test_times_are_shown_in_utc_with_milliseconds() -> None:
    assert format_time_ms(1_000_000_000_007) == "2001-09-09T01:46:40.007Z"
    assert format_time_ms(-1) == "-"
    assert format_time_ms(2**62) == str(2**62)
