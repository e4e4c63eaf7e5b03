"""Runs the user's own code (callbacks) on a thread of its own, one after the other and in order.

No call into the client runs a callback: it may take a lock that the caller holds, or as long as it likes. The thread
is started with the first callback, and ends when `end` was called and all have run. Only where no thread can be
started, as in an interpreter that ends (3.12), whoever waits for callbacks runs them, with no lock held; one that takes
long is then not bounded by the time of the wait, but Ctrl-C ends it.
"""

from __future__ import annotations

import logging
import math
import threading
from queue import Empty, SimpleQueue
from time import monotonic

from headrace.client.connection.reactor import Callback

log = logging.getLogger(__name__)


class CallbackThread:
    def __init__(self) -> None:
        self.used = False
        """There was a callback, ever."""
        self._queue: SimpleQueue[Callback | None] = SimpleQueue()
        self._guard = threading.Lock()
        self._turn = threading.Lock()
        """Whoever runs callbacks has it."""
        self._thread: threading.Thread | None = None
        self._last: threading.Thread | None = None
        self._running_in: threading.Thread | None = None
        self._stranded = False
        """What is in the queue waits for somebody who waits."""
        self._ended = False

    @property
    def is_here(self) -> bool:
        """This code runs in a callback."""
        return self._running_in is threading.current_thread()

    def submit(self, fn: Callback) -> None:
        self.used = True
        with self._guard:
            if self._thread is None:
                self._start()
            self._queue.put(fn)
            if self._ended and self._thread is not None:
                self._stop()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, args=(self._last,), name="headrace-callbacks", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._stranded = True
            return
        self._thread = self._last = thread
        self._stranded = False

    def wait(self, deadline: float) -> bool:
        """Until all that was submitted before has run; True at once in a callback, which cannot wait for itself."""
        if self.is_here or not self.used:
            return True
        done = threading.Lock()
        done.acquire()
        self.submit(done.release)
        if self._stranded:
            self._run_here(deadline)
        return done.acquire(timeout=_left_s(deadline))

    def end(self) -> None:
        """Let the thread end after what it has to run; what comes later is still run."""
        with self._guard:
            if not self._ended:
                self._ended = True
                if self._thread is not None:
                    self._stop()

    def join(self, timeout_s: float) -> None:
        """After `end`: until everything has run and the thread is gone."""
        if self.is_here:
            return
        if self._stranded:
            self._run_here(monotonic() + timeout_s)
        elif self._last is not None:
            self._last.join(timeout_s)

    def _stop(self) -> None:
        self._queue.put(None)
        self._thread = None

    def _run(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        with self._turn:
            self._running_in = threading.current_thread()
            while (fn := self._queue.get()) is not None:
                _run(fn)
                del fn
            self._running_in = None

    def _run_here(self, deadline: float) -> None:
        """In the place of the thread that could not be started, until the queue is empty or the time is over."""
        if self._last is not None:
            left_s = _left_s(deadline)
            self._last.join(None if left_s < 0 else left_s)
        if not self._turn.acquire(timeout=_left_s(deadline)):
            return
        try:
            self._running_in = threading.current_thread()
            while monotonic() < deadline:
                fn = self._queue.get_nowait()
                if fn is None:
                    # It is for a thread that was started after all.
                    self._queue.put(None)
                    return
                _run(fn)
        except Empty:
            return
        finally:
            self._running_in = None
            self._turn.release()


def _left_s(deadline: float) -> float:
    left_s = deadline - monotonic()
    return -1 if left_s == math.inf else min(max(0.0, left_s), threading.TIMEOUT_MAX)


def _run(fn: Callback) -> None:
    try:
        fn()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        # There is nobody else to hear it: not even SystemExit may keep the others from running.
        log.exception("a callback failed: %r", fn)
