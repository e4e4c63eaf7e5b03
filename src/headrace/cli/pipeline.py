"""`headrace pipeline`: PySpark programs over topics and archives, each a subcommand imported when called."""

from __future__ import annotations

import importlib
from typing import Final

import click

# Name and one line for the help; the command is `NAME` in `headrace.cli.pipelines.NAME`.
PIPELINES: Final = {
    "archive": "Keep topics in a Delta table or as Parquet files, each record once.",
    "audit": "Account for every acknowledged record: lost, duplicated, out of order, corrupted.",
    "compact": "Merge an archive's small files; keep the latest record per key.",
    "compare": "Name the records by which two replicas' data folders differ.",
    "index": "Index an archive by key, so that `headrace query` finds records in it.",
    "report": "Rates, latencies and plots from trace records.",
    "run": "Run a job of your own: job.sql or job.py.",
}


class PipelineGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(PIPELINES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in PIPELINES:
            return None
        command: click.Command = getattr(importlib.import_module(f"headrace.cli.pipelines.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(PIPELINES.items()))


@click.group(cls=PipelineGroup)
def pipeline() -> None:
    """Spark programs over topics and archives.

    --master chooses the engine: local[*] by default, spark://HOST:PORT and others are passed on.
    """
