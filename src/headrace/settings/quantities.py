"""Durations and sizes as people write them, and back: `7d`, `1h30m`, `500ms`; `1GiB`, `64MB`, `512k`. Numbers as times.

A duration has ms, s, m (or min), h, d, w, larger units first. In sizes KiB, MiB, GiB and TiB are powers of 1024, kB,
MB, GB and TB powers of 1000, and a letter alone (k, m, g, t, large or small) a power of 1024, as of `dd` and `ls -h`.
`mb` is refused, because it is read in both ways. What has no unit is in the unit of whoever asks.

Times since 1970 are seconds, as date(1) has them, or with thirteen digits milliseconds, as Kafka's tools print them: as
seconds they would be a year that no clock shows. What is neither is refused, because a wrong unit goes to the beginning
or the end of a log without a word.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

DURATION_FORMS: Final = "7d, 1h30m, 10s or 500ms"
SIZE_FORMS: Final = "1GiB (1024 MiB), 64MB (64,000,000) or 512k (512 KiB)"

SECONDS_DIGITS_MAX: Final = 11
MS_DIGITS: Final = 13
UNIT_MS: Final = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_DURATION_WORDS: Final = {
    word + plural: unit
    for unit, words in {"w": "week", "d": "day", "h": "hr hour", "m": "min minute", "s": "sec second"}.items()
    for word in words.split()
    for plural in ("", "s")
}
_UNIT_BYTES: Final = (
    {"B": 1}
    | {letter + "iB": 1 << 10 * nth for nth, letter in enumerate("KMGT", 1)}
    | {letter + "B": 1000**nth for nth, letter in enumerate("kMGT", 1)}
    | {"KB": 1000}
    | {letter: 1 << 10 * nth for nth, pair in enumerate(("kK", "mM", "gG", "tT"), 1) for letter in pair}
)
_AMOUNT: Final = r"([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([A-Za-z]+)"
_PARTS_SHOWN: Final = 2
_COUNT_SHOWN: Final = 10_000


def parse_duration_ms(text: str, bare: str | None = "ms") -> int:
    """Whole milliseconds; `bare` is the unit of a number that has none. ValueError if it is no duration."""
    given = text.strip()
    if bare is not None and re.fullmatch(r"[0-9]{1,20}(?:\.[0-9]{1,9})?", given):
        given += bare
    total, smaller_than = Fraction(0), max(UNIT_MS.values()) + 1
    for amount, word in _amounts(given):
        unit_ms = UNIT_MS.get(_DURATION_WORDS.get(word, word), 0)
        if not 0 < unit_ms < smaller_than:
            raise ValueError(f"{text!r} is not a duration")
        total, smaller_than = total + amount * unit_ms, unit_ms
    return _whole(total, text)


def parse_size(text: str) -> int:
    """Whole bytes; ValueError if it is no size."""
    given = text.strip()
    if re.fullmatch(r"[0-9]{1,20}", given):
        return int(given)
    amounts = _amounts(given)
    if len(amounts) != 1 or amounts[0][1] not in _UNIT_BYTES:
        raise ValueError(f"{text!r} is not a size")
    return _whole(amounts[0][0] * _UNIT_BYTES[amounts[0][1]], text)


def parse_epoch_ms(text: str) -> int:
    """Milliseconds since 1970 of seconds, with a fraction or without, or of 13 digits; ValueError if it is neither."""
    given = re.fullmatch(r"([0-9]+)(\.[0-9]+)?", text, re.ASCII)
    if given and len(given[1]) <= SECONDS_DIGITS_MAX:
        return round(float(text) * 1000)
    if given and len(given[1]) == MS_DIGITS and given[2] is None:
        return int(text)
    forms_taken = f"seconds since 1970 (up to {SECONDS_DIGITS_MAX} digits) nor milliseconds ({MS_DIGITS})"
    raise ValueError(f"{text[:40]!r} is neither {forms_taken}")


def parse_quantity(text: str, unit: str) -> int:
    """A number of the unit, `ms` or `bytes`; ValueError if it is none."""
    return parse_duration_ms(text) if unit == "ms" else parse_size(text)


def forms(unit: str) -> str:
    """How else than as a number a quantity can be written; empty if in no other way."""
    return {"ms": DURATION_FORMS, "bytes": SIZE_FORMS}.get(unit, "")


def friendly(value: int, unit: str) -> str:
    """The number as people write it; empty if that is no shorter."""
    if unit not in ("ms", "bytes") or value < (1000 if unit == "ms" else 1024):
        return ""
    return _friendly_ms(value) if unit == "ms" else _friendly_bytes(value)


def _amounts(text: str) -> list[tuple[Fraction, str]]:
    if not re.fullmatch(rf"{_AMOUNT}(?:\s*{_AMOUNT})*", text):
        raise ValueError(f"{text!r} has no unit that is known")
    return [(Fraction(amount), unit) for amount, unit in re.findall(_AMOUNT, text)]


def _whole(value: Fraction, text: str) -> int:
    if value.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def _friendly_ms(value: int) -> str:
    parts = []
    for unit, unit_ms in UNIT_MS.items():
        if unit == "w":  # 7d and 30d are said more often
            continue
        count, value = divmod(value, unit_ms)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) if len(parts) <= _PARTS_SHOWN else ""


def _friendly_bytes(value: int) -> str:
    said = []
    for unit in ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "kB"):
        count = Fraction(value, _UNIT_BYTES[unit])
        if 1 <= count < _COUNT_SHOWN and (count * 2).denominator == 1:
            said.append(f"{float(count):g}{unit}")
    return min(said, key=len, default="")
