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
    def __init__(self) -> None:
        self._refs: list[weakref.ref[Kept]] = []
        self._cleared_at = 16

    def add(self, thing: Kept) -> None:
        refs = self._refs
        if len(refs) >= self._cleared_at:
            refs[:] = [ref for ref in refs if ref() is not None]
            self._cleared_at = max(16, 2 * len(refs))
        refs.append(weakref.ref(thing))

    def discard(self, thing: Kept) -> None:
        self._refs[:] = [ref for ref in self._refs if ref() is not thing]

    def clear(self) -> None:
        self._refs.clear()

    def __iter__(self) -> Iterator[Kept]:
        return iter([thing for ref in list(self._refs) if (thing := ref()) is not None])
