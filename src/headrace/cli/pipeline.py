"""`headrace pipeline`: programs over topics and archives, most of them on PySpark; each is imported when called."""

from __future__ import annotations

from typing import Final

import click

from headrace.cli.lazy_group import LazyGroup

PIPELINES: Final = {
    "archive": "Keep topics in a Delta or Iceberg table, or as Parquet files, each record once.",
    "audit": "Account for every acknowledged record: lost, duplicated, out of order, corrupted.",
    "compact": "Merge an archive's small files; keep the latest record per key.",
    "compare": "Name the records by which two replicas' data folders differ.",
    "index": "Index an archive by key, so that `headrace query` finds records in it.",
    "replay": "Write records of an archive, or rows of a table, to a topic, each once.",
    "report": "Rates, latencies and plots from trace records.",
    "run": "Run a job of your own: job.sql or job.py.",
}


@click.group(cls=LazyGroup, package="headrace.cli.pipelines", summaries=PIPELINES)
def pipeline() -> None:
    """Spark programs over topics and archives.

    --master chooses the engine: local[*] by default, spark://HOST:PORT and others are passed on.
    """
