"""Source text of a compiled codec, with the field that each of its lines is about.

A codec is straight-line code without bookkeeping: when one of its lines raises, the number of that line says
which field was being read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

from headrace.wire.schema import Field


class Source:
    """Lines under construction; `depth` is the indentation of the next one."""

    def __init__(self, head: str) -> None:
        self._lines = [head]
        self._fields = [""]
        self.depth = 1
        self._names = 0

    def line(self, text: str, path: str) -> None:
        self._lines.append("    " * self.depth + text)
        self._fields.append(path)

    def name(self, prefix: str) -> str:
        """A local variable that no other part of the source uses."""
        self._names += 1
        return f"{prefix}{self._names}"

    def compile(self, title: str, names: dict[str, Any]) -> Callable[..., Any]:
        """Run the source, which is one function called `codec`, with `names` as its globals."""
        exec(compile("\n".join(self._lines), f"<{title}>", "exec"), names)
        return cast(Callable[..., Any], names["codec"])

    def field_at(self, traceback: TracebackType | None) -> str:
        """The field that the function was at when an exception passed through it."""
        line = traceback.tb_lineno if traceback is not None else 1
        return self._fields[line - 1] or "body"


def join(path: str, field: Field) -> str:
    """The path of a field inside the struct at `path`."""
    return f"{path}.{field.name}" if path else field.name
