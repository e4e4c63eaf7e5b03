"""The disk calls of an operation, one of which fails: what the walks over a store and over a broker share."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

NUMBERS = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES)


class DiskCalls:
    """For `VirtualDisk.trouble`. Counts calls by name; that of the number `nth` fails, and no other."""

    def __init__(self, nth: int = 0, number: int = 0) -> None:
        self.by_name: Counter[str] = Counter()
        self.failed = "no call"
        self._left = nth
        self._number = number

    def __call__(self, call: str, path: str) -> int:
        self.by_name[call] += 1
        self._left -= 1
        if self._left:
            return 0
        self.failed = f"{call} {path} {errno.errorcode[self._number]}"
        return self._number


class DiskWalk(Protocol):
    """An operation whose calls failed one by one: its calls by name, and the errors that were tried."""

    by_name: Counter[str]
    errors: Counter[str]


def figures(walks: Mapping[str, DiskWalk], failures: list[str]) -> dict[str, object]:
    """For docs/PROOF.md."""
    calls = sum((walk.by_name for walk in walks.values()), Counter[str]())
    errors = sum((walk.errors for walk in walks.values()), Counter[str]())
    each = {
        name.replace(" ", "_"): f"{walk.by_name.total()} calls, {walk.errors.total()} tries"
        for name, walk in walks.items()
    }
    return {
        "operations": len(walks),
        "disk_calls": f"{calls.total()}: {_listed(calls)}",
        "tries": f"{errors.total()}: {_listed(errors)}",
        "rules_broken": len(failures),
        **each,
    }


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
