"""Tables for people, aligned text for pipes, JSON for scripts: one set of rows for all three.

A table that is wider than the terminal would be folded in the middle of words and numbers: then each row is a card, of
one line for each column.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from textwrap import TextWrapper
from typing import Any, Final

import click

Row = Mapping[str, Any]

NOTHING = "-"
WIDTH_MAX: Final = 1 << 20
"""Of a table, to ask how wide it would like to be."""


def show_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def show_rows(rows: Sequence[Row], columns: Sequence[str], as_json: bool) -> None:
    """What a listing command found: as a table, or all of it as JSON."""
    if as_json:
        show_json(rows)
    else:
        show_table(rows, columns)


def show_table(
    rows: Sequence[Row], columns: Sequence[str], title: str | None = None, *, named_by_user: bool = False
) -> None:
    """Rows by column name. Numbers are set to the right; an empty cell is a dash, so that each line has all fields. Our
    own names are shown as words; those of a user as they were given."""
    cells = [[format_cell(row.get(column)) for column in columns] for row in rows]
    numeric = [any(_is_number(row.get(column)) for row in rows) for column in columns]
    if sys.stdout.isatty():
        names = columns if named_by_user else [column.replace("_", " ") for column in columns]
        _show_rich(cells, names, numeric, title)
    else:
        _show_plain(cells, columns if named_by_user else [column.upper() for column in columns], numeric)


def format_cell(value: object) -> str:
    match value:
        case None | "" | () | []:
            return NOTHING
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return printable(",".join(str(item) for item in value))
        case _:
            return printable(str(value))


def printable(text: str) -> str:
    """Text that others chose, as a client's id, without what would steer a terminal: that is shown escaped."""
    if text.isprintable():
        return text
    return "".join([mark if mark.isprintable() or mark == "\n" else repr(mark)[1:-1] for mark in text])


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def counted(count: int, noun: str) -> str:
    """`1 record`, `2 records`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def optional_bytes(count: int | None) -> str:
    """A dash where nobody has told."""
    return NOTHING if count is None else format_bytes(count)


def _show_rich(cells: list[list[str]], columns: Sequence[str], numeric: list[bool], title: str | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column, right in zip(columns, numeric, strict=True):
        table.add_column(escape(column), justify="right" if right else "left", overflow="fold")
    for line in cells:
        table.add_row(*map(escape, line))
    console = Console()
    needed = Measurement.get(console, console.options.update(max_width=WIDTH_MAX), table).maximum
    if needed <= console.width:
        console.print(table)
    elif max(map(len, _aligned(cells, columns, numeric))) <= console.width:
        _show_title(title)
        _show_plain(cells, columns, numeric)
    else:
        _show_cards(cells, columns, title, console.width)


def _show_cards(cells: list[list[str]], columns: Sequence[str], title: str | None, width: int) -> None:
    names = [column + ":" for column in columns]
    indent = max(map(len, names)) + 1
    # A word that is longer than the terminal is not broken: it can be copied as it is.
    fold = TextWrapper(max(width, 2 * indent), break_long_words=False, break_on_hyphens=False)
    fold.subsequent_indent = " " * indent
    _show_title(title)
    for nth, line in enumerate(cells):
        if nth:
            click.echo()
        for name, text in zip(names, line, strict=True):
            fold.initial_indent = name.ljust(indent)
            for piece in text.splitlines() or [text]:
                click.echo(fold.fill(piece))
                fold.initial_indent = fold.subsequent_indent


def _show_title(title: str | None) -> None:
    if title is not None:
        click.echo(title + "\n")


def _show_plain(cells: list[list[str]], columns: Sequence[str], numeric: list[bool]) -> None:
    for line in _aligned(cells, columns, numeric):
        click.echo(line)


def _aligned(cells: list[list[str]], columns: Sequence[str], numeric: list[bool]) -> list[str]:
    """A line for the names and one for each row."""
    lines = [columns, *cells]
    widths = [max(len(line[nth]) for line in lines) for nth in range(len(columns))]
    return [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    ]
