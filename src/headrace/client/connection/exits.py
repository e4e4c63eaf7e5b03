"""A program that ends and leaves producers and consumers open: what is done for them, for a bounded time.

All of them begin before any is waited for, so that one that is stuck does not use up the others' time: listeners take
nothing new, consumers leave their groups, producers send what they hold, also what listeners sent at the last. On
asyncio nothing can be done without the loop: it is only told.

This runs at the interpreter's end, when all threads that are no daemons have ended: after the last line, after
`sys.exit`, after an error that nobody caught. It does not run after `os._exit` or a kill, nor in a forked child for
what its parent made. Children of `multiprocessing` that end by `os._exit` (fork, forkserver) have its finalizers
instead, which run when their function has returned and before their threads are waited for.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from time import monotonic
from typing import Protocol

from headrace.client.connection.reactor import WeakIdentitySet

EXIT_TIMEOUT_MS = 5000
LISTENERS_PART = 0.8
"""Of that time, for listeners to end; what is left is for leaving the groups and for what they sent."""

FINALIZER_PRIORITY = -100
"""After all others: the children of this child have ended then."""

log = logging.getLogger(__name__)


class OpenClient(Protocol):
    def at_exit(self, since: float) -> Iterator[None]:
        """End what is open, within its own time after `since`. In four steps, each made by all before the next one:
        begin; wait for listeners; begin what had to wait for them; wait for the rest.
        """
        ...


_consumers: set[OpenClient] = set()
"""Held here, because who forgets a consumer without closing it is still a member of its group."""
_others: WeakIdentitySet[OpenClient] = WeakIdentitySet()


_finalizers: list[object] = []
"""At most one, of this process."""


def consumer_opened(consumer: OpenClient) -> None:
    _consumers.add(consumer)
    _finalize()


def opened(client: OpenClient) -> None:
    """A producer, or whatever else its connections hold for as long as it is open."""
    _others.add(client)
    _finalize()


def closed(client: OpenClient) -> None:
    _consumers.discard(client)
    _others.discard(client)


def _at_exit() -> None:
    since = monotonic()
    leaving = [client.at_exit(since) for client in (*_others, *_consumers)]
    while leaving:
        leaving = [steps for steps in leaving if _goes_on(steps)]


def _goes_on(steps: Iterator[None]) -> bool:
    try:
        next(steps)
    except StopIteration:
        return False
    except BaseException:
        # Whatever it is, the others are still to be ended; a signal's handler may raise SystemExit here.
        log.exception("a producer or consumer could not be ended with the program")
        return False
    return True


def _finalize() -> None:
    """In a child of `multiprocessing` that runs nothing of `atexit`."""
    if "multiprocessing.process" not in sys.modules or _finalizers:
        return
    import multiprocessing
    from multiprocessing.util import Finalize

    if multiprocessing.parent_process() is None:
        return
    process = multiprocessing.current_process()
    # Which way this child was started is in its class; where that has none, it was the usual one.
    if (getattr(process, "_start_method", None) or multiprocessing.get_start_method()) != "spawn":
        _finalizers.append(Finalize(None, _at_exit, exitpriority=FINALIZER_PRIORITY))


def _after_fork() -> None:
    _consumers.clear()
    _others.clear()
    _finalizers.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
