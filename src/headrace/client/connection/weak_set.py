"""A set of objects that does not keep them, and runs no code when they go.

A `WeakSet` runs Python code whenever one of its objects is collected, in whatever thread and line that happens. An
exception that a signal's handler raises there, as Ctrl-C does, is thrown away by the interpreter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class Remembered(Generic[Kept]):
    """Things that are equal to nothing but themselves. Any thread may use it: each change is a single step."""

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
