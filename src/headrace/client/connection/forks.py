"""A forked child has its parent's sockets and locks, but not its threads: what was made before refuses to be used."""

from __future__ import annotations

import os
from typing import Any

from headrace.client.connection.errors import ForkedEngine
from headrace.client.connection.weak_set import Remembered


class _Refusing:
    """What a reactor, and its lock, become in the child."""

    def __getattr__(self, name: str) -> Any:
        raise ForkedEngine

    def __enter__(self) -> None:
        raise ForkedEngine

    def __exit__(self, *_: object) -> None:
        return


_left_behind: Remembered[Any] = Remembered()


def stays_with_parent(reactor: Any) -> None:
    """Refuse everything asked of the reactor in a child. It has a `lock`, and no slots."""
    _left_behind.add(reactor)


def _after_fork() -> None:
    for reactor in _left_behind:
        # Who kept the lock itself must get past it to be told; the thread that held it is not in this process.
        reactor.lock._at_fork_reinit()
        reactor.lock.word = None
        vars(reactor).clear()
        reactor.__class__ = _Refusing
        reactor.lock = _Refusing()
    _left_behind.clear()


os.register_at_fork(after_in_child=_after_fork)
