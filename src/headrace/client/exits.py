"""A program that ends and leaves producers and consumers open: what is done for them, for a bounded time.

Consumers leave their groups, then producers send what they hold. On asyncio neither can be done without the loop: it is
only told. This runs at the interpreter's end, when all threads
that are no daemons have ended: after the last line, after `sys.exit`, after an error that nobody caught. It does not
run after `os._exit` or a kill, nor in a forked child for what its parent made.
"""

from __future__ import annotations

import atexit
import os
from time import monotonic
from typing import Protocol

from headrace.client.remembered import Remembered

EXIT_TIMEOUT_MS = 5000


class Leaver(Protocol):
    def at_exit(self, since: float) -> None:
        """End what is open. It raises nothing, and waits no longer than its own time after `since`."""
        ...


_consumers: set[Leaver] = set()
"""Held here, because who forgets a consumer without closing it is still a member of its group."""
_others: Remembered[Leaver] = Remembered()


def consumer_opened(consumer: Leaver) -> None:
    _consumers.add(consumer)


def opened(leaver: Leaver) -> None:
    """A producer, or whatever else its network holds for as long as it is open."""
    _others.add(leaver)


def closed(leaver: Leaver) -> None:
    _consumers.discard(leaver)
    _others.discard(leaver)


def _at_exit() -> None:
    since = monotonic()
    for leaver in (*_consumers, *_others):
        leaver.at_exit(since)


def _after_fork() -> None:
    _consumers.clear()
    _others.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
