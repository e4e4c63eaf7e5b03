"""Report: rates, latencies and plots from trace records (`headrace.arrow.traces`).

Figures are over records: each has the latency of its row of the trace, which is that of the round it was sent in.
Percentiles lie between neighbours where they fall between two (as numpy's do). Rows that failed count as errors and
have no latency. Written to the folder `out`:

    report.md, report.html             the tables, and the plots by name
    rate.png                           records a second over time
    latency.png                        TP50, TP99, TP999 over time
    distribution.png                   latency by percentile
    figures.json                       the same numbers for programs
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F

from headrace.errors import OperatorError
from headrace.pipelines import plots
from headrace.pipelines.summary import Progress, Summary, Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

COLUMNS: Final = ("producer", "topic", "sent_at", "acknowledged_at", "records", "bytes", "error")
PERCENTILES: Final = {"tp50": 0.5, "tp99": 0.99, "tp999": 0.999}
CURVE: Final = (*(n / 100 for n in range(1, 99)), *(0.98 + n / 1000 for n in range(20)), 0.9995, 0.9999, 1.0)
POINTS_MAX: Final = 40
ROWS_MAX: Final = 100

FIGURES: Final = ("records", "seconds", "tps", "mb_per_s", "mean_ms", "tp50_ms", "tp99_ms", "tp999_ms", "errors")


@dataclass(frozen=True, slots=True)
class ReportOptions:
    traces: tuple[str, ...]
    out: str = "report"
    bucket_s: float | None = None
    """Width of a point in plots over time; chosen by the length of the run when not given."""


@dataclass(frozen=True, slots=True)
class Figures:
    """All that a report shows."""

    total: Mapping[str, Any]
    by_topic: Sequence[Mapping[str, Any]]
    by_producer: Sequence[Mapping[str, Any]]
    over_time: Sequence[Mapping[str, Any]]
    """`at_s` since the beginning, `tps`, `tp50_ms`, `tp99_ms`, `tp999_ms`, `errors`."""
    curve: Sequence[tuple[float, float]]
    """Percentile (0 to 1) and latency in ms."""


def run(spark: SparkSession, options: ReportOptions, progress: Progress) -> Summary:
    progress.say("reading traces")
    figures = measure(read_traces(spark, options.traces), options.bucket_s)
    progress.say("drawing")
    out = Path(options.out)
    tables = [
        Table("total", FIGURES, [figures.total]),
        Table("topics", ("topic", *FIGURES), figures.by_topic),
        Table("producers", ("producer", *FIGURES), figures.by_producer),
    ]
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write(out, figures, tables, plots.draw(out, figures.over_time, figures.curve))
    except OSError as error:
        raise OperatorError(f"cannot write the report to {out}: {error.strerror or error}") from None
    progress.done()
    return Summary("report", {"report": str(out / "report.html")}, tables)


def read_traces(spark: SparkSession, folders: Sequence[str]) -> DataFrame:
    for folder in folders:
        if not any(Path(folder).glob("*.parquet")):
            raise OperatorError(
                f"{folder} has no traces: no *.parquet files in it; `headrace load --traces` writes them"
            )
    rows = spark.read.option("pathGlobFilter", "*.parquet").parquet(*dict.fromkeys(folders))
    missing = [name for name in COLUMNS if name not in rows.columns]
    if missing:
        raise OperatorError(f"{', '.join(folders)} holds no traces: there is no column {missing[0]!r}")
    return rows.select(*COLUMNS)


def measure(traces: DataFrame, bucket_s: float | None = None) -> Figures:
    sent_us, done_us = F.unix_micros("sent_at"), F.unix_micros("acknowledged_at")
    rows = traces.select("*", sent_us.alias("sent_us"), done_us.alias("done_us"))
    good = F.col("error").isNull()
    rows = rows.select(
        "*",
        F.when(good, (F.col("done_us") - F.col("sent_us")) / 1000).alias("latency_ms"),
        F.when(good, F.col("records")).otherwise(0).alias("acknowledged"),
        F.when(good, F.col("bytes")).otherwise(0).alias("good_bytes"),
        F.when(good, 0).otherwise(F.col("records")).alias("failed"),
    )
    grouped = rows.groupingSets([[], ["topic"], ["producer"]], "topic", "producer").agg(
        F.min("sent_us").alias("first_us"), F.max("done_us").alias("last_us"), *_sums(), _percentiles(CURVE, "curve")
    )
    groups = [row.asDict() for row in grouped.collect()]
    whole = next((row for row in groups if row["topic"] is None and row["producer"] is None), None)
    if whole is None or whole["first_us"] is None:
        raise OperatorError("the traces hold no batches: nothing to report")
    # A group of one topic or producer has its name; what has neither is the total.
    topics = sorted((row for row in groups if row["topic"] is not None), key=lambda row: str(row["topic"]))
    producers = sorted((row for row in groups if row["producer"] is not None), key=lambda row: str(row["producer"]))
    return Figures(
        total=_figures(whole),
        by_topic=[{"topic": row["topic"], **_figures(row)} for row in topics],
        by_producer=[{"producer": row["producer"], **_figures(row)} for row in producers],
        over_time=_over_time(rows, whole["first_us"], whole["last_us"], bucket_s),
        curve=list(zip(CURVE, whole["curve"] or [], strict=False)),
    )


def _sums() -> list[Column]:
    mean = F.sum(F.col("latency_ms") * F.col("acknowledged")) / F.sum("acknowledged")
    return [
        F.sum("acknowledged").alias("records"),
        F.sum("good_bytes").alias("bytes"),
        F.sum("failed").alias("errors"),
        mean.alias("mean_ms"),
        _percentiles(tuple(PERCENTILES.values()), "tps_ms"),
    ]


def _percentiles(shares: Sequence[float], name: str) -> Column:
    """Exact, each batch weighing as much as it has records."""
    return F.percentile("latency_ms", list(shares), F.col("acknowledged")).alias(name)


def _latencies(row: Mapping[str, Any]) -> dict[str, float | None]:
    found = row["tps_ms"] or [None] * len(PERCENTILES)
    return {f"{name}_ms": _rounded(value) for name, value in zip(PERCENTILES, found, strict=True)}


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    seconds = max((row["last_us"] - row["first_us"]) / 1e6, 1e-6)
    return {
        "records": row["records"],
        "seconds": _rounded(seconds),
        "tps": _rounded(row["records"] / seconds),
        "mb_per_s": _rounded(row["bytes"] / seconds / 1e6),
        "mean_ms": _rounded(row["mean_ms"]),
        **_latencies(row),
        "errors": row["errors"],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _over_time(rows: DataFrame, first_us: int, last_us: int, bucket_s: float | None) -> list[dict[str, Any]]:
    """One row per stretch of time, those in which nothing happened too.

    A rest at the end that is shorter than half a stretch is left out: one batch in it would look like a peak.
    """
    span_s = max((last_us - first_us) / 1e6, 1e-6)
    width_s = max(bucket_s or _width_s(span_s), span_s / 10_000)
    bucket = F.floor((F.col("done_us") - F.lit(first_us)) / F.lit(width_s * 1e6)).cast("long")
    found = {row["bucket"]: row for row in rows.groupBy(bucket.alias("bucket")).agg(*_sums()).collect()}
    points = []
    for number in range(math.floor(span_s / width_s) + 1):
        row = found.get(number)
        covered_s = min(width_s, span_s - number * width_s)
        if number and covered_s < width_s / 2:
            continue
        points.append(
            {
                "at_s": _rounded(number * width_s),
                "tps": _rounded((row["records"] if row else 0) / max(covered_s, 1e-6)),
                **_latencies(row.asDict() if row else {"tps_ms": None}),
                "errors": row["errors"] if row else 0,
            }
        )
    return points


def _width_s(span_s: float) -> float:
    """A round width that gives at most POINTS_MAX points, and is not below a tenth of a second."""
    for width in (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600):
        if span_s / width <= POINTS_MAX:
            return width
    return span_s / POINTS_MAX


def _write(out: Path, figures: Figures, tables: Sequence[Table], pictures: Mapping[str, str]) -> None:
    note = "Rates are records a second; latencies are in milliseconds, over records; errors are records."
    lines = ["# Report", "", note, ""]
    page = ["<!doctype html>", "<meta charset='utf-8'>", "<title>Report</title>", _LOOK, "<h1>Report</h1>"]
    page.append(f"<p>{note}</p>")
    for table in tables:
        title, columns = table.title.capitalize(), table.columns
        cells = [[_cell(row[column]) for column in columns] for row in table.rows[:ROWS_MAX]]
        lines += [f"## {title}", "", _line(columns), _line(["---"] * len(columns)), *map(_line, cells), ""]
        page += [f"<h2>{title}</h2>", "<table>", _html_row(columns, "th"), *(_html_row(row, "td") for row in cells)]
        page.append("</table>")
    for title, name in pictures.items():
        lines += [f"## {title}", "", f"![{title}]({name})", ""]
        page += [f"<h2>{title}</h2>", f"<img src='{name}' alt='{title}'>"]
    (out / "report.md").write_text("\n".join(lines))
    (out / "report.html").write_text("\n".join(page) + "\n")
    numbers = {
        "total": figures.total,
        "topics": figures.by_topic,
        "producers": figures.by_producer,
        "over_time": figures.over_time,
    }
    (out / "figures.json").write_text(json.dumps(numbers, indent=1) + "\n")


_LOOK: Final = (
    "<style>body{font:15px sans-serif;margin:2em;max-width:1000px}table{border-collapse:collapse}"
    "th,td{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}img{max-width:100%}</style>"
)


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:,.1f}"
        case int():
            return f"{value:,}"
        case _:
            return str(value)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _html_row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
