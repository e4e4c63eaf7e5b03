"""`headrace top`: brokers, topics and groups, and what goes through them, live in the terminal."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any, Final

import click

from headrace.cli import EXIT_TERMINATED
from headrace.cli.activity import Activity, BrokerActivity, Look, compare, look
from headrace.cli.options import Duration, json_option, with_connect
from headrace.cli.output import format_bytes, optional_bytes, show_json, show_table
from headrace.cli.signals import Terminated, terminable
from headrace.cli.watch import alternate_screen, draw, page_of, separator
from headrace.errors import HeadraceError

TABLE_LINES: Final = 5
"""Of a table beside its rows: its head, a rule, and what is around it."""
LEAST_ROWS: Final = 2
LEAST_NAME_CHARS: Final = 12
NUMBERS_CHARS: Final = 66
"""What the other columns of a table take."""


@click.command()
@click.option("--every", "every_ms", type=Duration("s"), default="2s", show_default=True, help="How often to look.")
@click.option("--once", is_flag=True, help="Look twice, that long apart, print it and end.")
@click.option("--internal", is_flag=True, help="Also topics that brokers keep for themselves.")
@json_option
@with_connect
def top(connect: Callable[..., Any], every_ms: int, once: bool, internal: bool, as_json: bool) -> int:
    """Show brokers, topics and groups, and what goes in and out, until q or ctrl-C.

    in/s are records by the ends of logs, bytes/s those by which leaders' logs grow,
    out/s records that groups commit: who reads without a group is not counted.
    Partitions are behind while not all replicas are in sync. A group's lag is
    that in the partitions of which it has committed something.
    """
    look_now = partial(look, connect, internal=internal)
    every_s = every_ms / 1000
    if once:
        before = look_now()
        time.sleep(every_s)
        _print(compare(before, look_now()), as_json)
    elif as_json or not sys.stdout.isatty():
        _repeat(look_now, every_s, as_json)
    else:
        try:
            with terminable(), alternate_screen(), _keys() as pressed:
                _live(look_now, every_s, pressed)
        except Terminated:
            return EXIT_TERMINATED
    return 0


def _repeat(look_now: Callable[[], Look], every_s: float, as_json: bool) -> None:
    before = look_now()
    while True:
        time.sleep(every_s)
        now = look_now()
        if not as_json:
            separator()
        _print(compare(before, now), as_json)
        sys.stdout.flush()
        before = now


def _live(look_now: Callable[[], Look], every_s: float, pressed: Callable[[float], str]) -> None:
    before: Look | None = None
    while True:
        trouble = ""
        try:
            now = look_now()
        except HeadraceError as error:
            if before is None:
                raise
            now, trouble = before, f"headrace: {error}"
        activity = compare(before, now)
        page = page_of(lambda activity=activity: _show(activity, _room(activity), _name_chars()))  # type: ignore[misc]
        head = f"headrace top, every {every_s:g} s, {datetime.now():%H:%M:%S}  (q ends it)"
        draw(f"{trouble}\n{page}" if trouble else page, head)
        before = now
        if pressed(every_s).lower() == "q":
            return


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Waits so many seconds for a key, and gives it, or nothing; keys are not echoed meanwhile."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        return (
            os.read(descriptor, 1).decode(errors="replace") if select.select([descriptor], [], [], seconds)[0] else ""
        )

    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _room(activity: Activity) -> tuple[int, int, int]:
    """Rows for each table, so that all three are on the screen."""
    left = max(3 * LEAST_ROWS, shutil.get_terminal_size().lines - 2 - 3 * TABLE_LINES)
    brokers, topics, groups = share(left, [len(activity.brokers), len(activity.topics), len(activity.groups)])
    return brokers, topics, groups


def share(rows: int, needs: Sequence[int]) -> list[int]:
    """So many rows for each: who needs less than its share leaves the rest to the others."""
    given = [0] * len(needs)
    for place, which in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        given[which] = min(needs[which], rows // (len(needs) - place))
        rows -= given[which]
    return given


def _print(activity: Activity, as_json: bool) -> None:
    if as_json:
        show_json(activity.as_json())
    else:
        _show(activity, (len(activity.brokers), len(activity.topics), len(activity.groups)))


def _show(activity: Activity, room: tuple[int, int, int], name_chars: int = sys.maxsize) -> None:
    """So many rows of each table, with names cut to so many characters."""
    brokers = [
        {
            "broker": row.broker,
            "address": _address(row),
            "controller": row.controller,
            "leads": row.leads,
            "stored": optional_bytes(row.stored_bytes),
            "in/s": _whole(row.records_in_per_s),
            "bytes/s": _bytes(row.bytes_in_per_s),
        }
        for row in activity.brokers
    ]
    topics = [
        {
            "topic": _cut(row.topic, name_chars),
            "parts": row.partitions,
            "behind": row.not_in_sync,
            "stored": format_bytes(row.stored_bytes),
            "in/s": _whole(row.records_in_per_s),
            "bytes/s": _bytes(row.bytes_in_per_s),
            "out/s": _whole(row.records_out_per_s),
        }
        for row in activity.topics
    ]
    groups = [
        {
            "group": _cut(row.group, name_chars),
            "state": row.state,
            "parts": row.partitions,
            "lag": row.lag,
            "out/s": _whole(row.records_out_per_s),
        }
        for row in activity.groups
    ]
    columns = ("broker", "address", "controller", "leads", "stored", "in/s", "bytes/s")
    _table(brokers, columns, room[0])
    more = ("topic", "parts", "behind", "stored", "in/s", "bytes/s", "out/s")
    _table(topics, more, room[1])
    _table(groups, ("group", "state", "parts", "lag", "out/s"), room[2])


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str], room: int) -> None:
    show_table(rows[:room], columns)
    click.echo(f"... {len(rows) - room} more" if len(rows) > room else "")


def _address(row: BrokerActivity) -> str:
    if row.address is None:
        return "down"
    return row.address if row.answers else f"{row.address} does not answer"


def _name_chars() -> int:
    """So many that a table is not wider than the terminal: then its rows would be cards, and few fit."""
    return max(LEAST_NAME_CHARS, shutil.get_terminal_size().columns - NUMBERS_CHARS)


def _cut(name: str, chars: int) -> str:
    return name if len(name) <= chars else f"{name[: chars - 1]}…"


def _whole(rate: float | None) -> int | None:
    return None if rate is None else round(rate)


def _bytes(rate: float | None) -> str | None:
    return None if rate is None else format_bytes(round(rate))
