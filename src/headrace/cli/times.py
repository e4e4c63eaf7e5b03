"""Points in time as people type them, and as tables show them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[smhdw])\s+ago")
EXPECTED: Final = "a time such as 2026-11-15T21:40:00+01:00, '10m ago' or @1763239200000 (milliseconds since 1970)"


def parse_time_ms(text: str, now_ms: int) -> int:
    """Milliseconds since 1970; ValueError says what would be right. A time without a zone is local."""
    given = text.strip()
    if given == "now":
        return now_ms
    if given.removeprefix("@").isdigit():
        return int(given.removeprefix("@"))
    if ago := _AGO.fullmatch(given):
        return now_ms - int(float(ago[1]) * _UNIT_MS[ago[2]])
    try:
        return int(datetime.fromisoformat(given).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not {EXPECTED}") from None


def format_time_ms(timestamp_ms: int) -> str:
    """ISO 8601 in UTC with milliseconds; a dash for no time."""
    if timestamp_ms < 0:
        return "-"
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(timestamp_ms)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{timestamp_ms % 1000:03}Z"
