"""`headrace pipeline report`: rates, latencies and plots from trace records."""

from __future__ import annotations

import click

from headrace.cli.pipelines.options import progress, show, spark_options, spark_session


@click.command()
@click.option("--traces", multiple=True, required=True, metavar="DIR", help="Trace records of `headrace load`; repeat.")
@click.option("--out", default="report", show_default=True, metavar="DIR", help="Where the report and its plots go.")
@click.option("--bucket", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="Width of a point in plots.")
@spark_options
def report(
    traces: tuple[str, ...], out: str, bucket: float | None, master: str, spark_conf: tuple[str, ...], as_json: bool
) -> None:
    """Rates, latencies (mean, TP50, TP99, TP999) and plots, in total and per topic and producer."""
    with spark_session("report", master, spark_conf) as spark:
        from headrace.pipelines.report import ReportOptions, run

        summary = run(spark, ReportOptions(traces, out, bucket), progress())
    show(summary, as_json)
