"""Runs the user's own code (callbacks) on a thread of its own, one after the other and in order.

No call into the client runs a callback: it may take a lock that the caller holds, or as long as it likes. The thread
is started with the first callback, and ends when `end` was called and everything was told. Only where an interpreter
that ends starts no thread any more (3.12), callbacks that are the first run at once.
"""

from __future__ import annotations

import logging
import math
import threading
from queue import SimpleQueue
from time import monotonic

from headrace.client.engine.reactor import Callback
from headrace.records.building import SentBatch

log = logging.getLogger(__name__)


class Teller:
    def __init__(self) -> None:
        self._queue: SimpleQueue[Callback | None] = SimpleQueue()
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._last: threading.Thread | None = None
        self._telling: threading.Thread | None = None
        self._ended = False

    @property
    def is_here(self) -> bool:
        """This code runs in a callback."""
        return self._telling is threading.current_thread()

    def tell(self, fn: Callback) -> None:
        with self._guard:
            if self._thread is None:
                self._start()
            if self._thread is not None:
                self._queue.put(fn)
                if self._ended:
                    self._stop()
                return
        while not _told(fn):
            pass

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, args=(self._last,), name="headrace-callbacks", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return
        self._thread = self._last = thread

    def wait(self, deadline: float) -> bool:
        """Until all that was left to tell before is told; True at once in a callback, which cannot wait for itself."""
        if self.is_here or self._last is None:
            return True
        told = threading.Lock()
        told.acquire()
        self.tell(told.release)
        left_s = deadline - monotonic()
        return told.acquire(timeout=-1 if left_s == math.inf else min(max(0.0, left_s), threading.TIMEOUT_MAX))

    def end(self) -> None:
        """Let the thread end after what it has to tell; what comes later is still told."""
        with self._guard:
            if not self._ended:
                self._ended = True
                if self._thread is not None:
                    self._stop()

    def join(self, timeout_s: float) -> None:
        """After `end`: until the thread is gone."""
        if self._last is not None and not self.is_here:
            self._last.join(timeout_s)

    def _stop(self) -> None:
        self._queue.put(None)
        self._thread = None

    def _run(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        self._telling = threading.current_thread()
        while (fn := self._queue.get()) is not None:
            while not _told(fn):
                pass
            del fn


def _told(fn: Callback) -> bool:
    """Run it; False if one of several callbacks failed in a way that left the others out."""
    try:
        fn()
    except BaseException:
        # There is nobody else to hear it: not even SystemExit may keep the others from being told.
        log.exception("a callback failed: %r", fn)
        batch = getattr(fn, "__self__", None)
        return not (isinstance(batch, SentBatch) and batch.callbacks)
    return True
