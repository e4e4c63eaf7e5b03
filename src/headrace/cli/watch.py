"""`--watch`: a command that shows something shows it again and again, until ctrl-C.

On a terminal each round is drawn over the one before, cut to the terminal's height. Elsewhere each has a line with the
time above it; JSON has none, so that the documents follow one another. An error after the first round is shown, and
the next round tries again: one watches a cluster while its brokers come and go.
"""

from __future__ import annotations

import functools
import io
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, TypeVar

import click

from headrace.cli import EXIT_TERMINATED
from headrace.cli.options import Duration
from headrace.cli.signals import Terminated, terminable
from headrace.cli.times import format_time_ms
from headrace.errors import HeadraceError

F = TypeVar("F", bound=Callable[..., Any])

EVERY: Final = "2s"

_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_LINE_END: Final = "\x1b[K"
_BELOW: Final = "\x1b[J"


def watch_option(command: F) -> F:
    """--watch [SECONDS]: call the command again and again. It stands above what connects, which happens each time."""

    @click.option(
        "--watch",
        "every_ms",
        is_flag=False,
        flag_value=EVERY,
        type=Duration("s"),
        metavar="[SECONDS]",
        help="Show it again every 2 seconds, or as often as you say, until ctrl-C; put it last.",
    )
    @functools.wraps(command)
    def watched(*args: Any, every_ms: int | None, **kwargs: Any) -> Any:
        show = functools.partial(command, *args, **kwargs)
        if every_ms is None:
            return show()
        if sys.stdout.isatty():
            try:
                with terminable(), alternate_screen():
                    return _redraw(show, every_ms / 1000)
            except Terminated:
                return EXIT_TERMINATED
        return _repeat(show, every_ms / 1000, separated=not kwargs.get("as_json"))

    return watched  # type: ignore[return-value]


@contextmanager
def alternate_screen() -> Iterator[None]:
    """What was on the terminal before is there again afterwards."""
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def draw(page: str, head: str) -> None:
    """Lines over those of the last time, as many as the terminal has room for."""
    columns, rows = shutil.get_terminal_size()
    lines = [head[:columns], "", *page.rstrip("\n").split("\n")]
    if len(lines) > rows:
        lines = [*lines[: rows - 1], f"... {len(lines) - rows + 1} lines more"]
    # Each line is cleared behind its end, not the screen before: so nothing flickers.
    sys.stdout.write(_HOME + f"{_LINE_END}\n".join(lines) + _LINE_END + _BELOW)
    sys.stdout.flush()


def page_of(show: Callable[[], object]) -> str:
    """What it prints, as for a terminal."""
    page = _Page()
    before, sys.stdout = sys.stdout, page
    try:
        show()
    finally:
        sys.stdout = before
    return page.text()


def separator() -> None:
    """A line with the time, above what is printed next."""
    click.echo(f"--- {format_time_ms(int(time.time() * 1000))}")


class _Page(io.TextIOWrapper):
    """Standard output of one round on a terminal."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        self.seek(0)
        return self.read()


def _redraw(show: Callable[[], Any], every_s: float) -> None:
    first = True
    command = " ".join(sys.argv[1:])
    while True:
        try:
            page = page_of(show)
        except HeadraceError as error:
            if first:
                raise
            page = f"headrace: {error}\n"
        first = False
        draw(page, f"every {every_s:g} s: headrace {command}  {datetime.now():%H:%M:%S}  (ctrl-C ends it)")
        time.sleep(every_s)


def _repeat(show: Callable[[], Any], every_s: float, *, separated: bool) -> None:
    first = True
    while True:
        if separated:
            separator()
        try:
            show()
        except HeadraceError as error:
            if first:
                raise
            click.echo(f"headrace: {error}", err=True)
        first = False
        sys.stdout.flush()
        time.sleep(every_s)
