"""One thing that was looked at: how it is, and what to do where it is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    """One word or two: port, disk, setting."""
    says: str
    advice: str = ""


def ok(what: str, says: str) -> Finding:
    return Finding(Level.OK, what, says)


def warn(what: str, says: str, advice: str) -> Finding:
    return Finding(Level.WARN, what, says, advice)


def fail(what: str, says: str, advice: str) -> Finding:
    return Finding(Level.FAIL, what, says, advice)
