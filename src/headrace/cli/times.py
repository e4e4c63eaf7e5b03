"""Points in time as people type them, and as tables show them.

`now`, `today`, `yesterday` (its midnight, or `yesterday 08:30`), how long ago (`1h30m`, `2 days ago`), a date, an ISO
time, or seconds since 1970 behind an @, as date(1) has it; thirteen digits are milliseconds. What has no zone is local.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from datetime import time as time_of_day
from typing import Final

from headrace.settings.quantities import parse_duration_ms, parse_epoch_ms

_EPOCH: Final = re.compile(r"@([0-9]+(?:\.[0-9]+)?)|([0-9]{10}|[0-9]{12,})", re.ASCII)
"""Without an @ only what is no date: 20261115 is one."""
_DAYS_BACK: Final = {"today": 0, "yesterday": 1}

EXPECTED: Final = (
    "a time such as yesterday, '2 days ago', 1h30m (ago), 2026-11-15, 2026-11-15T21:40:00+01:00 or "
    "@1763239200 (seconds since 1970; 13 digits are milliseconds)"
)


def parse_time_ms(text: str, now_ms: int) -> int:
    """Milliseconds since 1970, never before; ValueError says what would be right. A time without a zone is local."""
    given = text.strip().lower()
    if given == "now":
        return now_ms
    if epoch := _EPOCH.fullmatch(given):
        return parse_epoch_ms(epoch[1] or epoch[2])
    try:
        if (ago_ms := _ago(given)) is not None:
            return max(0, now_ms - ago_ms)
        return max(0, round(_moment(given, now_ms).timestamp() * 1000))
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not {EXPECTED}") from None


def _ago(given: str) -> int | None:
    """The milliseconds of `90m`, `1h30m` or `2 days ago`; None for what is none."""
    try:
        return parse_duration_ms(re.sub(r"\s+ago$", "", given), bare=None)
    except ValueError:
        return None


def _moment(given: str, now_ms: int) -> datetime:
    word, _, rest = given.partition(" ")
    if word not in _DAYS_BACK:
        return datetime.fromisoformat(given.upper())
    day = datetime.fromtimestamp(now_ms / 1000).date() - timedelta(days=_DAYS_BACK[word])
    return datetime.combine(day, time_of_day.fromisoformat(rest.strip()) if rest else time_of_day.min)


def format_time_ms(timestamp_ms: int) -> str:
    """ISO 8601 in UTC with milliseconds; a dash for no time."""
    if timestamp_ms < 0:
        return "-"
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(timestamp_ms)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{timestamp_ms % 1000:03}Z"


def format_duration_ms(duration_ms: int) -> str:
    """Its two largest units: `820ms`, `3.2s`, `4m10s`, `2h5m`, `3d4h`."""
    if duration_ms < 1000:
        return f"{duration_ms}ms"
    seconds = duration_ms // 1000
    if seconds < 60:
        return f"{duration_ms // 100 / 10:g}s"
    for unit_s, unit, part_s, part in ((86_400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= unit_s:
            rest = seconds % unit_s // part_s
            return f"{seconds // unit_s}{unit}" + (f"{rest}{part}" if rest else "")
    raise AssertionError
