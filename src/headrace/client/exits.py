"""A program that ends and leaves producers and consumers open: what is done for them, for a bounded time.

Consumers leave their groups, then producers send what they hold. This runs at the interpreter's end, when all threads
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
_producers: Remembered[Leaver] = Remembered()


def consumer_opened(consumer: Leaver) -> None:
    _consumers.add(consumer)


def producer_opened(producer: Leaver) -> None:
    """It is held by its network for as long as it is open."""
    _producers.add(producer)


def closed(leaver: Leaver) -> None:
    _consumers.discard(leaver)
    _producers.discard(leaver)


def _at_exit() -> None:
    since = monotonic()
    for leaver in (*_consumers, *_producers):
        leaver.at_exit(since)


def _after_fork() -> None:
    _consumers.clear()
    _producers.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
