"""The engine's lock, which holds off Ctrl-C: no step under it is ever left half done.

Python runs signal handlers in the main thread, between any two of its instructions, and theirs may raise. While the
main thread has the lock, the handlers of the signals in HELD_OFF are exchanged for one that takes note; they run, and
raise, as soon as the lock is given back. A wait keeps the handlers exchanged also while it sleeps: `rouse` ends it.
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


class _Shield:
    """Only the main thread touches it."""

    __slots__ = ("_exchanged", "depth", "main", "noted", "rouse")

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        self.depth = 0
        self.noted: list[tuple[int, FrameType | None]] = []
        self.rouse: Callable[[], object] | None = None
        self._exchanged: list[tuple[int, Any]] = []

    def raise_up(self) -> None:
        exchanged: list[tuple[int, Any]] = []
        try:
            for signum in HELD_OFF:
                handler = getsignal(signum)
                if callable(handler) and handler is not _note:
                    exchanged.append((signum, handler))
                    signal(signum, _note)
        except ValueError:
            # An interpreter whose main thread handles no signals needs no shield.
            self.main = None
            return
        except BaseException:
            self._exchanged = exchanged
            self.take_down()
            raise
        self._exchanged = exchanged
        self.depth = 1

    def take_down(self) -> None:
        exchanged = self._exchanged
        self.depth = 0
        raised: BaseException | None = None
        while True:
            try:
                for signum, handler in exchanged:
                    if getsignal(signum) is _note:
                        signal(signum, handler)
                break
            except BaseException as interruption:  # noqa: BLE001 - passed on when all handlers are back
                raised = interruption
        if self.noted:
            self._pass_on(dict(exchanged))
        if raised is not None:
            raise raised

    def _pass_on(self, handlers: dict[int, Any]) -> None:
        noted, self.noted = self.noted, []
        while noted:
            signum, frame = noted.pop(0)
            try:
                if signum in handlers:
                    handlers[signum](signum, frame)
            except BaseException:
                self.noted = noted
                self._pass_on(handlers)
                raise


_shield: Final = _Shield()


def _note(signum: int, frame: FrameType | None) -> None:
    _shield.noted.append((signum, frame))
    if _shield.rouse is not None:
        _shield.rouse()


class EngineLock(RLock):  # type: ignore[misc]
    """May be taken again by who has it."""

    def __enter__(self) -> bool:  # type: ignore[override]
        if get_ident() == _shield.main:
            if _shield.depth:
                _shield.depth += 1
            else:
                _shield.raise_up()
        return self.acquire()

    def __exit__(self, *_: object) -> None:
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

    def give_up(self, rouse: Callable[[], object]) -> None:
        """For a sleep, which `rouse` ends; look at `is_interrupted` before it."""
        if get_ident() == _shield.main:
            _shield.rouse = rouse
        self.release()

    def take_back(self) -> None:
        self.acquire()
        if get_ident() == _shield.main:
            _shield.rouse = None


def _after_fork() -> None:
    """The thread that forked is the main thread of the child."""
    _shield.main = get_ident()
    _shield.rouse = None
    _shield.noted.clear()
    if _shield.depth:
        _shield.take_down()


os.register_at_fork(after_in_child=_after_fork)
