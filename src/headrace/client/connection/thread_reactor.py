"""A reactor that the calling threads drive, with one thread in the background for when they are away.

One caller at a time drives: it sleeps in epoll without the lock and handles what is ready under it. Others that wait
stand by at a gate of their own. After every handling those are let go whose `done` holds; a driver that leaves hands
over to one that stands by. All of that is decided under the lock, so no wake-up is lost:

    nobody drives and some stand by  ->  one of them has been called, and looks again under the lock
    somebody drives and a `done` became true under the lock  ->  the one waiting for it has been called

A `done` that becomes true otherwise needs a `wake`.

The background thread keeps out of the way (it would fight for the interpreter lock): while a caller drives, or was
here less than AWAY_S ago, it only looks in now and then for what was left undone. Otherwise it polls, and any caller
that comes simply drives: what the poll brings the background thread is then left to that caller.

The user's code runs on a third thread, never in one that drives.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import select
import socket
import threading
from _signal import getsignal, signal  # type: ignore[import-not-found]
from _thread import RLock, get_ident
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from signal import SIGALRM, SIGINT, SIGTERM
from time import monotonic
from types import FrameType
from typing import Any, Final

from headrace.client.connection.callbacks import CallbackThread
from headrace.client.connection.reactor import Callback, WeakIdentitySet
from headrace.client.errors import CalledWithin, EngineClosed, ForkedEngine

AWAY_S: Final = 0.005
DOZE_S: Final = 0.01
PARK_MAX_S: Final = 0.05
SLEEP_MAX_S: Final = 3600.0  # epoll counts milliseconds in an int
EVENTS_MAX: Final = 64
JOIN_S: Final = 5.0  # the user's code may take as long as it likes
CANCELLED_TIMERS_KEPT: Final = 64
# `_signal` is `signal` without its enums, which take longer than to exchange a handler.
DEFERRED_SIGNALS: Final = (int(SIGINT), int(SIGTERM), int(SIGALRM))

_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT
_READ_MASK: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
_WRITE_MASK: Final = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR

_Handler = Callable[[int, FrameType | None], Any]

log = logging.getLogger(__name__)


class HeapTimer:
    __slots__ = ("_timers", "fn")

    def __init__(self, timers: Timers, fn: Callback) -> None:
        self._timers = timers
        self.fn: Callback | None = fn

    def cancel(self) -> None:
        if self.fn is not None:
            self.fn = None
            self._timers.cancelled += 1


class Timers:
    """What is due when: a heap, in which cancelled timers stay until they are due or too many.

    `next_at` is when there is something to take, or earlier: never later.
    """

    def __init__(self) -> None:
        self.next_at = math.inf
        self.cancelled = 0
        self._heap: list[tuple[float, int, HeapTimer]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, when: float, fn: Callback) -> HeapTimer:
        timer = HeapTimer(self, fn)
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, timer))
        if self.cancelled > CANCELLED_TIMERS_KEPT and 2 * self.cancelled > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].fn is not None]
            heapq.heapify(self._heap)
            self.cancelled = 0
        self.next_at = self._heap[0][0]
        return timer

    def take(self, now: float) -> Callback | None:
        """What is due by now, the earliest first; None if nothing is."""
        fn = None
        while fn is None and self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            fn, timer.fn = timer.fn, None
            if fn is None:
                self.cancelled -= 1
        self.next_at = self._heap[0][0] if self._heap else math.inf
        return fn


class _SignalDeferral:
    """The handlers of the main thread's signals, exchanged while it has the lock. Only the main thread touches it."""

    __slots__ = ("deferred", "depth", "last", "main", "rouse")

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        self.depth = 0
        self.last: dict[int, _DeferredHandler] = {}
        self.deferred: list[tuple[_Handler, int, FrameType | None]] = []
        self.rouse: Callable[[], object] | None = None

    def begin(self) -> None:
        try:
            for signum in DEFERRED_SIGNALS:
                handler = getsignal(signum)
                if callable(handler) and type(handler) is not _DeferredHandler:
                    deferring = self.last.get(signum)
                    if deferring is None or deferring.handler is not handler:
                        deferring = self.last[signum] = _DeferredHandler(handler)
                    signal(signum, deferring)
            self.depth = 1
        except ValueError:
            # An interpreter whose main thread handles no signals has nothing to defer.
            self.main = None

    def end(self) -> None:
        self.depth = 0
        try:
            for signum in DEFERRED_SIGNALS:
                deferring = getsignal(signum)
                if type(deferring) is _DeferredHandler:
                    signal(signum, deferring.handler)
        finally:
            if self.deferred:
                self._run_deferred()

    def _run_deferred(self) -> None:
        while self.deferred:
            handler, signum, frame = self.deferred.pop(0)
            try:
                handler(signum, frame)
            except BaseException:
                self._run_deferred()
                raise


_deferral: Final = _SignalDeferral()


class _DeferredHandler:
    """In the place of one handler, which a program may keep and put back as if it were its own."""

    __slots__ = ("handler",)

    def __init__(self, handler: _Handler) -> None:
        self.handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if not _deferral.depth:
            self.handler(signum, frame)
            return
        _deferral.deferred.append((self.handler, signum, frame))
        if _deferral.rouse is not None:
            _deferral.rouse()


class ReactorLock(RLock):  # type: ignore[misc]
    """A reactor's lock, which holds off Ctrl-C: no step under it is ever left half done.

    It may be taken again by who has it. Who gives it up to sleep may leave `on_next_acquire`: the next one to
    take it runs that.

    Python runs signal handlers in the main thread, between any two of its instructions, and theirs may raise. While
    the main thread has the lock, the handlers of the signals in DEFERRED_SIGNALS are exchanged for one that takes note;
    they run, and raise, as soon as the lock is given back. A wait keeps the handlers exchanged also while it sleeps:
    `rouse` ends it.

    To exchange them takes two calls of the kernel, so it is undone at the end of a turn or wait and not each time that
    the lock is given back. In between the one that takes note runs them at once.
    """

    on_next_acquire: Callable[[], None] | None = None

    def __enter__(self) -> bool:  # type: ignore[override]
        if get_ident() == _deferral.main:
            if _deferral.depth:
                _deferral.depth += 1
            else:
                _deferral.begin()
        self.acquire()
        if self.on_next_acquire is not None:
            try:
                self.run_left()
            except BaseException:
                self.__exit__()
                raise
        return True

    def __exit__(self, *_: object) -> None:
        self.release()
        if get_ident() == _deferral.main:
            _deferral.depth -= 1
            if _deferral.deferred and not _deferral.depth:
                _deferral.end()

    def run_left(self) -> None:
        """Run what was left for the next one to take the lock, if anything was."""
        on_next_acquire, self.on_next_acquire = self.on_next_acquire, None
        if on_next_acquire is not None:
            on_next_acquire()

    def leave(self) -> None:
        """As `__exit__`, and gives the handlers their places back."""
        self.release()
        if get_ident() == _deferral.main:
            if _deferral.depth > 1:
                _deferral.depth -= 1
            else:
                _deferral.end()

    @property
    def is_interrupted(self) -> bool:
        """A signal waits for this thread to give back the lock."""
        return bool(_deferral.deferred) and get_ident() == _deferral.main and _deferral.depth == 1

    def give_up(self, rouse: Callable[[], object], on_next_acquire: Callable[[], None] | None = None) -> None:
        """For a sleep, which `rouse` ends; look at `is_interrupted` before it."""
        self.on_next_acquire = on_next_acquire
        if get_ident() == _deferral.main:
            _deferral.rouse = rouse
        self.release()

    def take_back(self) -> bool:
        """True if `on_next_acquire` has not been run; it is taken back too."""
        self.acquire()
        if get_ident() == _deferral.main:
            _deferral.rouse = None
        alone, self.on_next_acquire = self.on_next_acquire is not None, None
        return alone


class _StandBy:
    """A thread that waits while another drives."""

    __slots__ = ("called", "done", "gate")

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done
        self.called = False
        self.gate = threading.Lock()
        self.gate.acquire()

    def call(self) -> None:
        if not self.called:
            self.called = True
            # Two may have come here at once: a signal's handler does not have the lock.
            with suppress(RuntimeError):
                self.gate.release()


def _never() -> bool:
    return False


class ThreadReactor:
    def __init__(self) -> None:
        self.lock = ReactorLock()
        self._owned: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[Callback, Callback | None]] = {}
        self._timers = Timers()
        self._soon: deque[Callback] = deque()
        self._callbacks = CallbackThread()
        self.running = False  # the thread that has the lock is at work: code that comes in between leaves things to it
        self._driver: Callable[[], bool] | None = None  # what the caller that drives waits for
        self._asleep_until = -math.inf  # of the caller that drives, while it polls
        self._standing_by: list[_StandBy] = []
        self._visits = 0
        self._left_at = -math.inf
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, _IN)
        # The background thread has a bell of its own, so that no caller can take away the ring meant for it.
        self._background_bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._background_polls = False
        self._background_due = -math.inf  # when it looks in again, while it keeps out of the way
        self._thread: threading.Thread | None = None
        self._closed = False
        _reactors.add(self)

    now = staticmethod(monotonic)

    def call_at(self, when: float, fn: Callback) -> HeapTimer:
        with self.lock:
            timer = self._timers.add(when, fn)
            if when < self._asleep_until:
                self.wake()
            self._stir()
        return timer

    def call_soon(self, fn: Callback) -> None:
        self._soon.append(fn)
        self._stir()

    def run_callback(self, fn: Callback) -> None:
        with self.lock:
            self._callbacks.submit(fn)

    def wait_callbacks(self, deadline: float) -> bool:
        """Wait until all callbacks that were left to `run_callback` before have run; True if they have. A callback does
        not wait for itself.
        """
        assert not self._owned(), "wait_callbacks is for threads that do not hold the lock"
        return not self._callbacks.used or self._callbacks.wait(deadline)

    def post(self, fn: Callback) -> None:
        with self.lock:
            self._soon.append(fn)
            self._stir()
        self.wake()

    def watch(self, sock: socket.socket, on_readable: Callback, on_writable: Callback | None) -> None:
        fd = sock.fileno()
        mask = _IN if on_writable is None else _IN | _OUT
        if fd in self._watched:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)
        self._watched[fd] = (on_readable, on_writable)
        self._stir()

    def unwatch(self, sock: socket.socket) -> None:
        fd = sock.fileno()
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def wake(self) -> None:
        """From any thread: whoever drives looks again at what everyone waits for."""
        with self.lock:
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def turn(self, timeout_s: float = 0.0) -> bool:
        """Drive one turn if nobody else does; what is ready to be written is written in any case. True if it drove."""
        self.lock.__enter__()
        try:
            if self.running:
                return False
            self._check_open()
            if self._driver is not None:
                if self._soon:
                    self._work(())
                return False
            if self._background_polls:
                self._stop_background_poll()
            if timeout_s > 0:
                self._drive(_never, monotonic() + timeout_s)
            else:
                if self._soon:
                    self._run_soon()
                self._work(self._epoll.poll(0, EVENTS_MAX))
            return True
        finally:
            self.leave()

    def wait(self, done: Callable[[], bool], deadline: float) -> bool:
        """Drive, or stand by while another does, until `done()` or the deadline (of `now()`); True if done.

        `done` is cheap, does not raise, and is asked under the lock by any thread.
        """
        self.check_outside()
        lock = self.lock
        while True:
            lock.__enter__()
            try:
                self._visits += 1
                while not lock.is_interrupted:
                    if not self._closed and self._soon:
                        self._work(())
                    if done():
                        return True
                    self._check_open()
                    if monotonic() >= deadline:
                        return False
                    if self._driver is None:
                        if self._background_polls:
                            self._stop_background_poll()
                        self._drive(done, deadline)
                    else:
                        self._stand_by(done, deadline)
            finally:
                # A signal's handler runs here, and may raise; otherwise the wait goes on.
                self.leave()

    def check_outside(self) -> None:
        """A signal's handler or a finalizer runs in the thread that it interrupts, and cannot wait for that one."""
        if self._owned():
            raise CalledWithin

    @property
    def is_quiet(self) -> bool:
        """Nobody drives, nobody stands by, and nothing is to be done."""
        return not (self._driver or self.running or self._soon or self._standing_by or self._closed)

    def doze(self, fd: int, done: Callable[[], bool], on_next_acquire: Callback) -> bool:
        """For a caller that found it quiet, and has the lock once: sleep. True if just `fd` is readable, and
        nobody else had the lock. Otherwise what came is handled as in any turn, after `on_next_acquire`, which whoever
        took the lock first has run.
        """
        if self._background_polls:
            self._stop_background_poll()
        now = monotonic()
        until = now + DOZE_S
        until = min(until, self._timers.next_at)
        self._driver, self._asleep_until = done, until
        self._visits += 1
        just_this = False
        lock = self.lock
        self.running = False
        lock.give_up(self._ring, on_next_acquire)
        try:
            events = self._epoll.poll(0 if until < now or lock.is_interrupted else until - now, EVENTS_MAX)
            just_this = events == [(fd, _IN)]
        finally:
            alone = lock.take_back()
            self._driver, self._asleep_until = None, -math.inf
            if alone and not just_this:
                on_next_acquire()
        if alone and just_this:
            self.running = True
            return True
        self._work(events)
        return False

    def close(self) -> None:
        """End the threads; whoever waits hears EngineClosed, and the user's code all that it is to hear.

        Sockets are their owners' to close before.
        """
        with self.lock:
            if self._closed:
                return
            if self._soon and not self.running:
                self._work(())
            self.wake()
            os.eventfd_write(self._background_bell, 1)
            self._closed = True
            for waiter in self._standing_by:
                waiter.call()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread() and not self._owned():
            thread.join(JOIN_S)
        self.lock.__enter__()
        try:
            self._dispose()
            self._callbacks.end()
        finally:
            self.lock.leave()
        if not self._owned():
            self._callbacks.join(JOIN_S)

    def _dispose(self) -> None:
        """The last one out closes the descriptors: none may be polled while it is closed."""
        behind = self._thread is not None and self._thread.is_alive() and self._thread is not threading.current_thread()
        if self._closed and not self._epoll.closed and not behind and self._driver is None:
            self._epoll.close()
            os.close(self._bell)
            os.close(self._background_bell)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the client is closed; make a new one")

    def _stir(self) -> None:
        """See to it that somebody will do what was just left for later. The caller holds the lock."""
        if self._background_polls and not self.running:
            # A caller is here, and will most likely make a turn itself before the background thread looks again.
            self._left_at = monotonic()
            self._stop_background_poll()
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        self._check_open()
        self._thread = threading.Thread(target=self._background, name="headrace", daemon=True)
        self._thread.start()

    def _stop_background_poll(self) -> None:
        self._background_polls = False
        os.eventfd_write(self._background_bell, 1)

    def _drive(self, done: Callable[[], bool], deadline: float) -> None:
        """One turn that may sleep; the lock is held once, and is not while it sleeps."""
        self._driver = done
        try:
            if self._soon:
                self._run_soon()
                if done():
                    return
            until = min(deadline, self._timers.next_at)
            sleep_s = until - monotonic()
            if sleep_s <= 0:
                events = self._epoll.poll(0, EVENTS_MAX)
            else:
                self._asleep_until = until
                self.lock.give_up(self._ring)
                try:
                    events = self._epoll.poll(0 if self.lock.is_interrupted else min(sleep_s, SLEEP_MAX_S), EVENTS_MAX)
                finally:
                    self.lock.take_back()
                self._asleep_until = -math.inf
            self._work(events)
        finally:
            self._driver = None
            self._asleep_until = -math.inf

    def _stand_by(self, done: Callable[[], bool], deadline: float) -> None:
        waiter = _StandBy(done)
        self._standing_by.append(waiter)
        self.lock.give_up(waiter.call)
        try:
            if not self.lock.is_interrupted:
                waiter.gate.acquire(timeout=min(max(0.0, deadline - monotonic()), threading.TIMEOUT_MAX))
        finally:
            self.lock.take_back()
            self._standing_by.remove(waiter)

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def leave(self) -> None:
        """A caller goes: another that stands by drives from now on."""
        self._left_at = monotonic()
        if self._standing_by and self._driver is None:
            self._standing_by[0].call()
        if self._background_due - self._left_at > 2 * AWAY_S and not self._closed:
            self._background_due = self._left_at
            os.eventfd_write(self._background_bell, 1)
        if self._closed:
            self._dispose()
        self.lock.leave()

    def _work(self, events: Iterable[tuple[int, int]]) -> None:
        """Handle what is ready and due, then let those go who have what they wait for."""
        self.running = True
        try:
            for fd, mask in events:
                if fd == self._bell:
                    _drain(fd)
                    continue
                if mask & _READ_MASK and (watched := self._watched.get(fd)) is not None:
                    self._run(watched[0])
                if mask & _WRITE_MASK and (watched := self._watched.get(fd)) is not None and watched[1] is not None:
                    self._run(watched[1])
            if self._timers.next_at <= (now := monotonic()):
                while (due := self._timers.take(now)) is not None:
                    self._run(due)
            if self._soon:
                self._run_soon()
        finally:
            self.running = False
            for waiter in self._standing_by:
                if waiter.done():
                    waiter.call()
            if self._asleep_until > -math.inf and self._driver is not None and self._driver():
                self.wake()

    def _run_soon(self) -> None:
        outer, self.running = self.running, True
        try:
            while self._soon:
                self._run(self._soon.popleft())
        finally:
            self.running = outer

    def _run(self, fn: Callback) -> None:
        try:
            fn()
        except Exception:
            log.exception("a fault in the client: %r raised", fn)

    def _background(self) -> None:
        both, alone = select.poll(), select.poll()
        both.register(self._epoll.fileno(), select.POLLIN)
        both.register(self._background_bell, select.POLLIN)
        alone.register(self._background_bell, select.POLLIN)
        visits, park_s = -1, AWAY_S
        while True:
            # To look in is not to take the lock: what was left for that is for who does something.
            self.lock.acquire()
            try:
                self._background_polls = False
                if self._closed:
                    self._dispose()
                    break
                _drain(self._background_bell)
                now = monotonic()
                away = self._driver is None and now - self._left_at >= AWAY_S
                if away:
                    self._work(self._epoll.poll(0, EVENTS_MAX))
                    until = self._timers.next_at
                elif self._soon:
                    # Left before `on_next_acquire` was, by code that interrupted who sleeps now.
                    self._run(self.lock.run_left)
                    self._work(())
                if away:
                    self._background_polls = True
                else:
                    same = self._driver is not None and visits == self._visits
                    park_s = min(2 * park_s, PARK_MAX_S) if same else AWAY_S
                    visits = self._visits
                    self._background_due = until = now + park_s
            finally:
                self.lock.release()
            sleep_s = min(max(0.0, until - monotonic()), SLEEP_MAX_S)
            (both if away else alone).poll(math.ceil(sleep_s * 1000))
            self._background_due = -math.inf


def _drain(fd: int) -> None:
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return


class _ForkedReactor:
    """What a reactor, and its lock, become in a forked child, which has the parent's sockets but not its threads."""

    def __getattr__(self, name: str) -> Any:
        raise ForkedEngine

    def __enter__(self) -> None:
        raise ForkedEngine

    def __exit__(self, *_: object) -> None:
        return


_reactors: WeakIdentitySet[Any] = WeakIdentitySet()


def _after_fork() -> None:
    for reactor in _reactors:
        # Who kept the lock itself must get past it to be told; the thread that held it is not in this process.
        reactor.lock._at_fork_reinit()
        reactor.lock.on_next_acquire = None
        vars(reactor).clear()
        reactor.__class__ = _ForkedReactor
        reactor.lock = _ForkedReactor()
    _reactors.clear()
    # The thread that forked is the main thread of the child.
    _deferral.main = get_ident()
    _deferral.rouse = None
    _deferral.deferred.clear()
    if _deferral.depth:
        _deferral.end()


os.register_at_fork(after_in_child=_after_fork)
