"""Tables for people, aligned text for pipes, JSON for scripts: one set of rows for all three."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

Row = Mapping[str, Any]

NOTHING = "-"


def show_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def show_rows(rows: Sequence[Row], columns: Sequence[str], as_json: bool) -> None:
    """What a listing command found: as a table, or all of it as JSON."""
    if as_json:
        show_json(rows)
    else:
        show_table(rows, columns)


def show_table(rows: Sequence[Row], columns: Sequence[str], title: str | None = None) -> None:
    """Rows by column name. Numbers are set to the right; an empty cell is a dash, so that each line has all fields."""
    cells = [[format_cell(row.get(column)) for column in columns] for row in rows]
    numeric = [any(_is_number(row.get(column)) for row in rows) for column in columns]
    if sys.stdout.isatty():
        _show_rich(cells, columns, numeric, title)
    else:
        _show_plain(cells, columns, numeric)


def format_cell(value: object) -> str:
    match value:
        case None | "" | () | []:
            return NOTHING
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return ",".join(str(item) for item in value)
        case _:
            return str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column, right in zip(columns, numeric, strict=True):
        table.add_column(column.replace("_", " "), justify="right" if right else "left", overflow="fold")
    for line in cells:
        table.add_row(*map(escape, line))
    Console().print(table)


def _show_plain(cells: list[list[str]], columns: Sequence[str], numeric: list[bool]) -> None:
    lines = [[column.upper() for column in columns], *cells]
    widths = [max(len(line[nth]) for line in lines) for nth in range(len(columns))]
    for line in lines:
        fields = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        click.echo("  ".join(fields).rstrip())
