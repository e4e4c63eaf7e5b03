"""What is asked of the first process of a container, where nothing else is process 1.

The kernel drops a signal to process 1 that has no handler, and gives it every process that has lost its parent, to be
waited for. Elsewhere nothing here does anything.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Final

FIRST: Final = 1
SIGNALLED: Final = 128


def take_signals() -> None:
    """End on a signal that comes before the loop has its own handlers, as any other process would."""
    if os.getpid() == FIRST:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(SIGNALLED + number)


def reap_orphans() -> None:
    """From now on; the loop lets nobody have this signal, so it is handled beside it."""
    if os.getpid() == FIRST:
        signal.signal(signal.SIGCHLD, _reap)


def _reap(_number: int, _frame: FrameType | None) -> None:
    """Who waits for a child of its own that is gone by then is told that it ended."""
    while True:
        try:
            pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
