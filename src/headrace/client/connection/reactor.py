"""What the cores of the client run on: time, sockets that are ready, and a lock; and what all of them need with it.

A core is callback code. All its callbacks run with `lock` held, none of them blocks, and none calls `turn` or `wait`.
An application thread takes the lock to change a core's state. What it leaves for later with `call_soon` or `call_at`
is done by whoever drives next, so that on threads it then makes a turn itself, waits, or calls `wake`.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

Callback = Callable[[], None]
Kept = TypeVar("Kept")


class Timer(Protocol):
    def cancel(self) -> object: ...


class Reactor(Protocol):
    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while callbacks run; may be taken again by who has it."""
        ...

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    def call_at(self, when: float, fn: Callback) -> Timer: ...

    def call_soon(self, fn: Callback) -> None:
        """At the end of this turn, or of the next one; this is how writes are gathered. The caller holds the lock."""
        ...

    def run_callback(self, fn: Callback) -> None:
        """For the user's own code: run outside the lock and outside every call into the client, one at a time and in
        order; on threads by a thread of its own."""
        ...

    def post(self, fn: Callback) -> None:
        """From any thread, without the lock: run `fn` under it soon, by whoever drives."""
        ...

    def watch(self, sock: socket.socket, on_readable: Callback, on_writable: Callback | None) -> None:
        """Call whenever the socket is ready; call again to change. Both may be called without need."""
        ...

    def unwatch(self, sock: socket.socket) -> None:
        """Before the socket is closed."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Backoff:
    """How long to wait before what failed is tried again: first `first_s`, then twice as long each time to `most_s`."""

    first_s: float = 0.02
    most_s: float = 1.0
    next_s: float = field(init=False)
    """The wait that is next."""

    def __post_init__(self) -> None:
        self.next_s = self.first_s

    def take(self) -> float:
        """The wait before the next try, which is then used up."""
        wait_s = self.next_s
        self.next_s = min(max(self.first_s, 2 * wait_s), self.most_s)
        return wait_s

    def reset(self) -> None:
        """It did not fail, or what made it fail has changed."""
        self.next_s = self.first_s


class WeakIdentitySet(Generic[Kept]):
    """A set of objects that does not keep them, and runs no code when they go.

    A `WeakSet` runs Python code whenever one of its objects is collected, in whatever thread and line that happens. An
    exception that a signal's handler raises there, as Ctrl-C does, is thrown away by the interpreter.

    For things that are equal to nothing but themselves. Any thread may use it: each change is a single step.
    """

    def __init__(self) -> None:
        self._refs: dict[weakref.ref[Kept], None] = {}
        self._cleared_at = 16

    def add(self, thing: Kept) -> None:
        refs = self._refs
        if len(refs) >= self._cleared_at:
            for ref in list(refs):
                if ref() is None:
                    refs.pop(ref, None)
            self._cleared_at = max(16, 2 * len(refs))
        refs[weakref.ref(thing)] = None

    def discard(self, thing: Kept) -> None:
        self._refs.pop(weakref.ref(thing), None)

    def clear(self) -> None:
        self._refs.clear()

    def __iter__(self) -> Iterator[Kept]:
        return iter([thing for ref in list(self._refs) if (thing := ref()) is not None])
