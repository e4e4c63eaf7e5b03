"""Times as people type them."""

import time

import pytest

from headrace.cli.times import format_time_ms, parse_time_ms
from proving import proves

NOW_MS = 1_800_000_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", NOW_MS),
        ("1763239200000", 1763239200000),
        ("1763239200", 1763239200000),
        ("@1763239200000", 1763239200000),
        ("@1763239200", 1763239200000),
        ("@1763239200.25", 1763239200250),
        ("@0", 0),
        ("@5", 5000),
        ("1h", NOW_MS - 3_600_000),
        ("1h30m", NOW_MS - 5_400_000),
        ("1 day ago", NOW_MS - 86_400_000),
        ("1 Day 2 hours ago", NOW_MS - 93_600_000),
        ("90 min", NOW_MS - 5_400_000),
        ("10m ago", NOW_MS - 600_000),
        ("1.5 h ago", NOW_MS - 5_400_000),
        ("250ms ago", NOW_MS - 250),
        ("2d ago", NOW_MS - 172_800_000),
        ("2001-09-09T01:46:40Z", 1_000_000_000_000),
        ("2001-09-09T03:46:40.125+02:00", 1_000_000_000_125),
    ],
)
@proves("U1")
def test_each_way_of_giving_a_time(text: str, expected: int) -> None:
    assert parse_time_ms(text, NOW_MS) == expected


def test_a_time_without_a_zone_is_local() -> None:
    local = time.mktime((2026, 11, 15, 12, 0, 0, 0, 0, -1))
    assert parse_time_ms("2026-11-15 12:00", NOW_MS) == int(local * 1000)


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
@proves("U1")
def test_days_begin_at_midnight_where_the_person_is(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        today = time.mktime((*time.localtime(NOW_MS / 1000)[:3], 0, 0, 0, 0, 0, -1)) * 1000
        assert parse_time_ms("today", NOW_MS) == today
        assert parse_time_ms("yesterday", NOW_MS) == today - 86_400_000
        assert parse_time_ms("yesterday 08:30", NOW_MS) == today - 86_400_000 + 8.5 * 3_600_000
        midnight = time.mktime((2026, 11, 17, 0, 0, 0, 0, 0, -1)) * 1000
        assert parse_time_ms("2026-11-17", NOW_MS) == parse_time_ms("20261117", NOW_MS) == midnight
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "text", ["", "tomorrow", "10", "10 ago", "5m5", "-5", "10 y ago", "2026-13-01", "yesterday noon", "9" * 400 + "d"]
)
def test_what_is_not_a_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"2 days ago|neither seconds"):
        parse_time_ms(text, NOW_MS)


@pytest.mark.parametrize("digits", ["176323920000", "17632392000000", "1763239200000000"])
@proves("U1")
def test_a_number_that_is_neither_seconds_nor_milliseconds_is_refused(digits: str) -> None:
    for text in (digits, "@" + digits):
        with pytest.raises(ValueError, match=r"neither seconds since 1970 .* nor milliseconds"):
            parse_time_ms(text, NOW_MS)


def test_no_time_is_before_1970() -> None:
    """Negative times have meanings of their own in the protocol: -1 is the end of a log."""
    assert parse_time_ms("1960-01-01", NOW_MS) == parse_time_ms("9000 weeks ago", NOW_MS) == 0


def test_times_are_shown_in_utc_with_milliseconds() -> None:
    assert format_time_ms(1_000_000_000_007) == "2001-09-09T01:46:40.007Z"
    assert format_time_ms(-1) == "-"
    assert format_time_ms(2**62) == str(2**62)
