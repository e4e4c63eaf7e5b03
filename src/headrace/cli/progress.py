"""How far a long piece of work has come: one line on standard error that is drawn over, on a terminal alone.

The line appears after a second, so that what is quick shows none, and is gone when the work is done.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final, Self

import click

FIRST_SECONDS: Final = 1.0
EVERY_SECONDS: Final = 0.2
BAR_WIDTH: Final = 20


class Progress:
    """Use as a context manager. `total` may be unknown."""

    def __init__(self, what: str, total: int | None = None, *, shown: bool = True) -> None:
        self.done = 0
        self._what = what
        self._total = total
        self._began = time.monotonic()
        self._due = self._began + FIRST_SECONDS
        self._shown = shown and sys.stderr.isatty()
        self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.hide()

    def advance(self, count: int, note: str = "") -> None:
        """So many more are done; the note is shown behind."""
        self.done += count
        now = time.monotonic()
        if not self._shown or now < self._due:
            return
        self._due = now + EVERY_SECONDS
        self._drawn = True
        click.echo(f"\r\x1b[K{self._line(now)}{', ' if note else ''}{note}", nl=False, err=True)

    def advance_of(self, count: int, total: int) -> None:
        """As `advance`, where the total is known only now."""
        self._total = total
        self.advance(count)

    def hide(self) -> None:
        """Make room for a line of output; the next `advance` that is due draws it again."""
        if self._drawn:
            self._drawn = False
            click.echo("\r\x1b[K", nl=False, err=True)

    def _line(self, now: float) -> str:
        rate = self.done / (now - self._began)
        if not self._total:
            return f"{self.done:,} {self._what}, {rate:,.0f} a second"
        part = min(1.0, self.done / self._total)
        bar = "#" * int(part * BAR_WIDTH)
        left = f", {(self._total - self.done) / rate:,.0f} s left" if rate and part < 1 else ""
        return f"[{bar:-<{BAR_WIDTH}}] {part:4.0%} of {self._total:,} {self._what}{left}"
