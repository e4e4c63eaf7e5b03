"""What `layouts.py` prints: one row per cell with the layouts side by side, and the aims against the measured.

MB are 10^6 bytes of message values; processor time is the broker's, its sync process included, never the client's.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

from report import table

PARTITIONED = "partitioned"
SHARED = "shared"
LAYOUTS = (PARTITIONED, SHARED)
MANY_TOPICS = 256
MANY_TIMES = 4.0
ONE_TOPIC_TIMES = 0.9
COLD_TIMES = 3.0


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    durability: str
    load: str
    message_bytes: int
    topics: int

    def __str__(self) -> str:
        return f"{self.topics}x{self.message_bytes} {self.durability} {self.load}"


@dataclass(frozen=True, slots=True)
class Figures:
    """One layout in one cell, of one turn or the medians of several. With consumers, a message counts when it has
    come out again."""

    messages: float
    msg_per_s: float
    mb_per_s: float
    cpu_s_per_million: float
    p50_ms: float
    """From the sending of a request to its answer, while the window is full: mostly waiting in line."""
    p99_ms: float
    client_cpu_percent: float
    """Of one core; a load that needs much of it measures itself."""
    others_cpu_percent: float
    """Of one core, used by neither broker nor client."""


@dataclass(frozen=True, slots=True)
class ColdFigures:
    """One topic among many, read from its beginning when nothing of it is in memory."""

    topic_mb: float
    seconds: float
    mb_per_s: float
    cpu_s: float
    disk_mb: float
    """Read from the disk for it."""


Row = dict[str, list[Figures] | None]
"""Every turn by layout; None once a record was lost, doubled, changed or refused there."""
Taken = dict[Cell, Row]
ColdTaken = dict[str, list[ColdFigures] | None]

F = TypeVar("F", Figures, ColdFigures)


def median_of(rounds: Sequence[F]) -> F:
    kind = type(rounds[0])
    return kind(**{each.name: statistics.median(getattr(r, each.name) for r in rounds) for each in fields(kind)})


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def add(taken: Taken, cell: Cell, row: Row) -> None:
    """The turns of one more round."""
    before = taken.get(cell)
    if before is None:
        taken[cell] = row
        return
    for layout, figures in row.items():
        known = before[layout]
        before[layout] = None if known is None or figures is None else known + figures


def times(row: Row, name: str) -> float | None:
    """Shared over partitioned, turn by turn: neighbours in time had the same machine."""
    first, second = row.get(PARTITIONED), row.get(SHARED)
    if not first or not second:
        return None
    pairs = [(float(getattr(a, name)), float(getattr(b, name))) for a, b in zip(first, second, strict=True)]
    return statistics.median(b / a for a, b in pairs)


def _times(row: Row, name: str) -> str:
    found = times(row, name)
    return "-" if found is None else f"{found:.2f}"


def cell_table(taken: Taken) -> str:
    shown = [layout for layout in LAYOUTS if any(layout in row for row in taken.values())]
    parts = (("msg_per_s", "msg/s"), ("mb_per_s", "MB/s"), ("cpu_s_per_million", "CPU-s/M"), ("p99_ms", "p99 ms"))
    head = ["durability", "load", "bytes", "topics"]
    for name, title in parts:
        head += [f"{title} {layout}" for layout in shown]
        head += ["times"] if name in ("msg_per_s", "cpu_s_per_million") else []
    head += ["client %", "others %"]
    rows = []
    for cell in sorted(taken):
        row = taken[cell]
        middle = {layout: median_of(turns) if turns else None for layout, turns in row.items()}
        line = [cell.durability, cell.load, f"{cell.message_bytes:,}", f"{cell.topics:,}"]
        for name, _ in parts:
            for layout in shown:
                figures = middle.get(layout)
                line.append(_number(getattr(figures, name)) if figures else "INVALID")
            line += [_times(row, name)] if name in ("msg_per_s", "cpu_s_per_million") else []
        for name in ("client_cpu_percent", "others_cpu_percent"):
            line.append("/".join(f"{getattr(each, name):.0f}" if each else "-" for each in middle.values()))
        rows.append(line)
    return table(head, rows)


def cold_table(cold: ColdTaken) -> str:
    rows = []
    for layout, samples in cold.items():
        if not samples:
            rows.append([layout, *["INVALID"] * 6])
            continue
        middle = median_of(samples)
        slowest_s = max(each.seconds for each in samples)
        values = (middle.topic_mb, middle.seconds * 1000, slowest_s * 1000, middle.mb_per_s, middle.cpu_s * 1000)
        rows.append([layout, *(_number(value) for value in (*values, middle.disk_mb))])
    return table(["layout", "topic MB", "ms", "slowest ms", "MB/s", "CPU ms", "MB from disk"], rows)


def cold_times(cold: ColdTaken) -> float | None:
    """How many times as long shared takes for a megabyte."""
    first, second = cold.get(PARTITIONED), cold.get(SHARED)
    return median_of(first).mb_per_s / median_of(second).mb_per_s if first and second else None


def aims_table(taken: Taken, cold: ColdTaken) -> str:
    """Aim against measured; a missed one is a line to explain, never a failed run."""
    rows = []

    def row(what: str, aim: str, measured: float | None, reached: bool) -> None:
        verdict = "not measured" if measured is None else "reached" if reached else "MISSED"
        rows.append([what, aim, "-" if measured is None else f"{measured:.2f}x", verdict])

    for topics, least, durabilities in ((MANY_TOPICS, MANY_TIMES, ("disk",)), (1, ONE_TOPIC_TIMES, ("disk", "os"))):
        for cell in sorted(taken):
            if cell.topics != topics or cell.durability not in durabilities:
                continue
            found = times(taken[cell], "msg_per_s")
            what = f"msg/s, {topics} topic(s), {cell.message_bytes:,} B, {cell.durability}, {cell.load}"
            row(what, f">= {least:g}x", found, found is not None and found >= least)
    found = cold_times(cold)
    what = f"time of a cold read of one topic among {MANY_TOPICS}"
    row(what, f"<= {COLD_TIMES:g}x", found, found is not None and found <= COLD_TIMES)
    return table(["shared against partitioned", "aim", "measured", "verdict"], rows)


def as_json(taken: Taken, cold: ColdTaken) -> dict[str, object]:
    """Every turn; the medians are for the reader to take again, with the spread in sight."""
    return {
        "cells": [
            {**asdict(cell), "layout": layout, "valid": bool(turns), "turns": [asdict(f) for f in turns or ()]}
            for cell, row in sorted(taken.items())
            for layout, turns in row.items()
        ],
        "cold": {layout: [asdict(sample) for sample in samples or ()] for layout, samples in cold.items()},
    }
