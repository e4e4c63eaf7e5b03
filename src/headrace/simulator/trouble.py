"""Errors of a simulated disk, as its calls meet them (`VirtualDisk.trouble`)."""

from __future__ import annotations

import errno
import random
from typing import Final

NUMBERS: Final = (errno.EIO, errno.EIO, errno.EMFILE, errno.ENOSPC, errno.EACCES)
SHORT: Final = frozenset({"open", "list"})
"""Calls that take a descriptor."""


class FailingCall:
    """One call fails, the n-th from now on, and with it every later one of the same path."""

    def __init__(self, nth: int, number: int) -> None:
        self._left = nth
        self._number = number
        self._path: str | None = None

    def __call__(self, call: str, path: str) -> int:
        if self._path is None:
            self._left -= 1
            if self._left > 0:
                return 0
            self._path = path
        return self._number if path == self._path else 0


class TooFewDescriptors:
    """A share of what needs a descriptor gets none."""

    def __init__(self, chance: random.Random, share: float) -> None:
        self._random = chance
        self._share = share

    def __call__(self, call: str, path: str) -> int:
        return errno.EMFILE if call in SHORT and self._random.random() < self._share else 0
