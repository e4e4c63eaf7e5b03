"""What a run prints: the machine, a table per kind of figure, and Headrace's reach against its targets.

MB and GB are 10^6 and 10^9 bytes of payload; processor time is the broker's, children included, never the client's.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    message_bytes: int
    partitions: int

    def __str__(self) -> str:
        return f"{self.message_bytes}x{self.partitions}"


@dataclass(frozen=True, slots=True)
class Figures:
    """One contestant's figures in one cell, of one round or the medians of several."""

    produce_msg_per_s: float
    produce_mb_per_s: float
    produce_cpu_s_per_million: float
    produce_cpu_s_per_gb: float
    sync_p50_us: float
    sync_p99_us: float
    sync_p999_us: float
    pipelined_p50_us: float
    pipelined_p99_us: float
    pipelined_p999_us: float
    pipelined_per_s: float
    pipelined_cpu_us: float
    fetch_msg_per_s: float
    fetch_mb_per_s: float
    fetch_gb_per_cpu_s: float
    memory_mb: float
    others_cpu_percent: float
    """Share of the machine that neither the broker nor its client used: the higher, the less the figures are worth."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """What is known of a contestant that took part."""

    name: str
    version: str
    settings: str
    start_s: float
    start_cpu_s: float
    idle_mb: float
    idle_shared_once_mb: float
    idle_cpu_percent: float


def median_of(rounds: Sequence[Figures]) -> Figures:
    return Figures(**{f.name: statistics.median(getattr(r, f.name) for r in rounds) for f in fields(Figures)})


def machine() -> dict[str, str]:
    """Where the figures were taken."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "processor": f"{os.cpu_count()} x {model}",
        "memory": f"{memory_gb:.0f} GB",
        "kernel": platform.release(),
        "load before": f"{os.getloadavg()[0]:.2f}",
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads as plain text too."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join((line(head), rule, *(line(row) for row in rows)))


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _fine(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


Column = tuple[str, Callable[[Figures], str]]
THROUGHPUT: tuple[Column, ...] = (
    ("msg/s", lambda f: _whole(f.produce_msg_per_s)),
    ("MB/s", lambda f: _whole(f.produce_mb_per_s)),
    ("CPU-s/M msg", lambda f: _fine(f.produce_cpu_s_per_million)),
    ("CPU-s/GB", lambda f: _fine(f.produce_cpu_s_per_gb)),
    ("fetch msg/s", lambda f: _whole(f.fetch_msg_per_s)),
    ("fetch MB/s", lambda f: _whole(f.fetch_mb_per_s)),
    ("fetch GB/CPU-s", lambda f: _fine(f.fetch_gb_per_cpu_s)),
    ("memory MB", lambda f: _whole(f.memory_mb)),
    ("others' CPU %", lambda f: _whole(f.others_cpu_percent)),
)
LATENCY: tuple[Column, ...] = (
    ("sync p50 us", lambda f: _whole(f.sync_p50_us)),
    ("p99", lambda f: _whole(f.sync_p99_us)),
    ("p99.9", lambda f: _whole(f.sync_p999_us)),
    ("pipelined p50 us", lambda f: _whole(f.pipelined_p50_us)),
    ("p99", lambda f: _whole(f.pipelined_p99_us)),
    ("p99.9", lambda f: _whole(f.pipelined_p999_us)),
    ("pipelined/s", lambda f: _whole(f.pipelined_per_s)),
    ("CPU us/request", lambda f: _fine(f.pipelined_cpu_us)),
)

Results = Mapping[Cell, Mapping[str, Figures | None]]
"""Medians by cell and contestant; None marks a cell in which a record was lost, doubled or refused."""


def cell_table(results: Results, columns: Sequence[Column]) -> str:
    rows = []
    for cell in sorted(results):
        for name, figures in results[cell].items():
            values = [show(figures) if figures else "INVALID" for _, show in columns]
            rows.append([name, _whole(cell.message_bytes), str(cell.partitions), *values])
    return table(["contestant", "bytes", "partitions", *(title for title, _ in columns)], rows)


def entrant_table(entrants: Sequence[Entrant]) -> str:
    rows = [
        [
            e.name,
            f"{e.start_s:.2f}",
            f"{e.start_cpu_s:.2f}",
            _whole(e.idle_mb),
            _whole(e.idle_shared_once_mb),
            f"{e.idle_cpu_percent:.1f}",
        ]
        for e in entrants
    ]
    return table(["contestant", "start s", "start CPU-s", "idle RSS MB", "idle PSS MB", "idle CPU %"], rows)


def reach_table(results: Results, entrant: Entrant) -> str:
    """Target against measured; a missed target is a line to explain, never a failed run."""
    rows = []

    def row(what: str, target: float, measured: float | None, unit: str, at_most: bool = True) -> None:
        sign = "<=" if at_most else ">="
        if measured is None:
            verdict, shown = "not measured", "-"
        else:
            verdict = "reached" if (measured <= target) == at_most or measured == target else "MISSED"
            shown = f"{measured:.3g} {unit}"
        rows.append([what, f"{sign} {target:g} {unit}", shown, verdict])

    def figure(cell: Cell, read: Callable[[Figures], float]) -> float | None:
        figures = results.get(cell, {}).get(entrant.name)
        return read(figures) if figures else None

    for partitions, target in ((1, 0.15), (256, 0.6)):
        measured = figure(Cell(100, partitions), lambda f: f.produce_cpu_s_per_million)
        row(f"broker CPU per million 100 B messages, {partitions} partition(s)", target, measured, "s")
    row("CPU per pipelined one-message request", 12, figure(Cell(100, 1), lambda f: f.pipelined_cpu_us), "us")
    fetched = figure(Cell(10240, 1), lambda f: f.fetch_gb_per_cpu_s)
    row("fetch of 10 KB messages", 2, fetched, "GB/CPU-s", at_most=False)
    row("idle memory", 70, entrant.idle_mb, "MB")
    row("start", 0.7, entrant.start_s, "s")
    return table(["reach", "target", "measured", "verdict"], rows)


def as_json(taken: Mapping[Cell, Mapping[str, Sequence[Figures] | None]]) -> list[dict[str, object]]:
    """Every round of every cell; the median is for the reader to take again, with the spread in sight."""
    return [
        {**asdict(cell), "contestant": name, "valid": bool(rounds), "rounds": [asdict(f) for f in rounds or ()]}
        for cell, row in sorted(taken.items())
        for name, rounds in row.items()
    ]
