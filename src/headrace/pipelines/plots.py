"""The pictures of a report, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

SIZE_INCHES: Final = (9.0, 4.0)
DOTS_PER_INCH: Final = 110
LINES: Final = {"tp50_ms": "TP50", "tp99_ms": "TP99", "tp999_ms": "TP999"}

mpl.use("Agg")


def draw(folder: Path, over_time: Sequence[Mapping[str, Any]], curve: Sequence[tuple[float, float]]) -> dict[str, str]:
    """Title to file name, of what was drawn into the folder."""
    pictures = {"Rate": "rate.png", "Latency": "latency.png", "Distribution": "distribution.png"}
    at_s = [point["at_s"] for point in over_time]
    _rate(at_s, over_time).savefig(folder / pictures["Rate"], dpi=DOTS_PER_INCH)
    _latency(at_s, over_time).savefig(folder / pictures["Latency"], dpi=DOTS_PER_INCH)
    _distribution(curve).savefig(folder / pictures["Distribution"], dpi=DOTS_PER_INCH)
    return pictures


def _axes(x: str, y: str) -> tuple[Any, Any]:
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _rate(at_s: Sequence[float], over_time: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = _axes("seconds", "records a second")
    axes.plot(
        at_s, [point["tps"] for point in over_time], drawstyle="steps-post", color="tab:blue", label="acknowledged"
    )
    failed = [(at, 0) for at, point in zip(at_s, over_time, strict=True) if point["errors"]]
    if failed:
        axes.plot(*zip(*failed, strict=True), "x", color="tab:red", label="errors", clip_on=False)
        axes.legend()
    axes.set_ylim(bottom=0)
    return figure


def _latency(at_s: Sequence[float], over_time: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = _axes("seconds", "latency, ms")
    for name, label in LINES.items():
        values = [np.nan if point[name] is None else max(point[name], 1e-3) for point in over_time]
        axes.plot(at_s, values, label=label, marker=".", markersize=3)
    axes.set_yscale("log")
    axes.legend()
    return figure


def _distribution(curve: Sequence[tuple[float, float]]) -> Any:
    """The scale stretches the tail: 90, 99, 99.9 % are equally far apart."""
    figure, axes = _axes("percentile", "latency, ms")
    nines = [-np.log10(max(1 - share, 1e-5)) for share, _ in curve]
    axes.plot(nines, [max(value, 1e-3) for _, value in curve], color="tab:blue")
    axes.set_xticks([0, -np.log10(0.5), 1, 2, 3, 4], ["0", "50", "90", "99", "99.9", "99.99"])
    axes.set_yscale("log")
    return figure
