"""The engine's lock, which holds off Ctrl-C: no step under it is ever left half done.

Python runs signal handlers in the main thread, between any two of its instructions, and theirs may raise. While the
main thread has the lock, the handlers of the signals in HELD_OFF are exchanged for one that takes note; they run, and
raise, as soon as the lock is given back. A wait keeps the handlers exchanged also while it sleeps: `rouse` ends it.

To exchange them takes two calls of the kernel, so it is undone at the end of a turn or wait and not each time that the
lock is given back. In between the one that takes note runs them at once.
"""

from __future__ import annotations

import os
import threading
from _signal import getsignal, signal  # type: ignore[import-not-found]
from _thread import RLock, get_ident
from collections.abc import Callable
from signal import SIGALRM, SIGINT, SIGTERM
from types import FrameType
from typing import Any, Final

# `_signal` is `signal` without its enums, which take longer than to exchange a handler.
HELD_OFF: Final = (int(SIGINT), int(SIGTERM), int(SIGALRM))


_Handler = Callable[[int, FrameType | None], Any]


class _Shield:
    """Only the main thread touches it."""

    __slots__ = ("depth", "last", "main", "noted", "rouse")

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        self.depth = 0
        self.last: dict[int, _Noting] = {}
        self.noted: list[tuple[_Handler, int, FrameType | None]] = []
        self.rouse: Callable[[], object] | None = None

    def raise_up(self) -> None:
        try:
            for signum in HELD_OFF:
                handler = getsignal(signum)
                if callable(handler) and type(handler) is not _Noting:
                    noting = self.last.get(signum)
                    if noting is None or noting.handler is not handler:
                        noting = self.last[signum] = _Noting(handler)
                    signal(signum, noting)
            self.depth = 1
        except ValueError:
            # An interpreter whose main thread handles no signals needs no shield.
            self.main = None

    def take_down(self) -> None:
        self.depth = 0
        try:
            for signum in HELD_OFF:
                noting = getsignal(signum)
                if type(noting) is _Noting:
                    signal(signum, noting.handler)
        finally:
            if self.noted:
                self._pass_on()

    def _pass_on(self) -> None:
        while self.noted:
            handler, signum, frame = self.noted.pop(0)
            try:
                handler(signum, frame)
            except BaseException:
                self._pass_on()
                raise


_shield: Final = _Shield()


class _Noting:
    """In the place of one handler, which a program may keep and put back as if it were its own."""

    __slots__ = ("handler",)

    def __init__(self, handler: _Handler) -> None:
        self.handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if not _shield.depth:
            self.handler(signum, frame)
            return
        _shield.noted.append((self.handler, signum, frame))
        if _shield.rouse is not None:
            _shield.rouse()


class EngineLock(RLock):  # type: ignore[misc]
    """May be taken again by who has it. Who gives it up to sleep may leave word: the next one to take it runs that."""

    word: Callable[[], None] | None = None

    def __enter__(self) -> bool:  # type: ignore[override]
        if get_ident() == _shield.main:
            if _shield.depth:
                _shield.depth += 1
            else:
                _shield.raise_up()
        self.acquire()
        if self.word is not None:
            word, self.word = self.word, None
            try:
                word()
            except BaseException:
                self.__exit__()
                raise
        return True

    def __exit__(self, *_: object) -> None:
        self.release()
        if get_ident() == _shield.main:
            _shield.depth -= 1
            if _shield.noted and not _shield.depth:
                _shield.take_down()

    def leave(self) -> None:
        """As `__exit__`, and gives the handlers their places back."""
        self.release()
        if get_ident() == _shield.main:
            if _shield.depth > 1:
                _shield.depth -= 1
            else:
                _shield.take_down()

    @property
    def is_interrupted(self) -> bool:
        """A signal waits for this thread to give back the lock."""
        return bool(_shield.noted) and get_ident() == _shield.main and _shield.depth == 1

    def give_up(self, rouse: Callable[[], object], word: Callable[[], None] | None = None) -> None:
        """For a sleep, which `rouse` ends; look at `is_interrupted` before it."""
        self.word = word
        if get_ident() == _shield.main:
            _shield.rouse = rouse
        self.release()

    def take_back(self) -> bool:
        """True if the word that was left has not been run; it is taken back too."""
        self.acquire()
        if get_ident() == _shield.main:
            _shield.rouse = None
        alone, self.word = self.word is not None, None
        return alone


def _after_fork() -> None:
    """The thread that forked is the main thread of the child."""
    _shield.main = get_ident()
    _shield.rouse = None
    _shield.noted.clear()
    if _shield.depth:
        _shield.take_down()


os.register_at_fork(after_in_child=_after_fork)
