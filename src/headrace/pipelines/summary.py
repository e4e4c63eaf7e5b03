"""What every pipeline shows: one line of progress while it runs, and a summary at the end.

A pipeline gets a `Progress` from its caller and answers a `Summary`; the command line decides how it is printed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

PAUSE_S: Final = 0.2
CLEAR_LINE: Final = "\r\x1b[2K"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by column name, in the order of `columns`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Summary:
    """`facts` are single values by name; `ok` false makes the command fail after it has shown everything."""

    title: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    ok: bool = True

    def as_json(self) -> dict[str, Any]:
        """One object: the facts, each table as a list of rows by its title, and `ok`."""
        rows = {table.title.replace(" ", "_"): [dict(row) for row in table.rows] for table in self.tables}
        return {"pipeline": self.title, "ok": self.ok, **self.facts, **rows}


class Progress:
    """One line that replaces itself on a terminal; nothing where nobody looks."""

    def __init__(self, to: TextIO | None = None) -> None:
        self._to = to if to is not None and to.isatty() else None
        self._shown = float("-inf")
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Show a line in place of the last one; lines that come too fast are left out."""
        now = time.monotonic()
        if self._to is not None and now - self._shown >= PAUSE_S:
            self._shown = now
            self._to.write(f"{CLEAR_LINE}{text}")
            self._to.flush()

    def done(self) -> None:
        """Clear the line, before a summary or an error is printed."""
        if self._to is not None and self._shown > float("-inf"):
            self._to.write(CLEAR_LINE)
            self._to.flush()


def rate(count: int, elapsed_s: float) -> str:
    """`12,345/s`."""
    return f"{count / max(elapsed_s, 1e-9):,.0f}/s"
