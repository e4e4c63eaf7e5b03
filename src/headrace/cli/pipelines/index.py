"""`headrace pipeline index`: the key index of an archive, made or brought up to date."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.cli.options import archive_option
from headrace.cli.pipelines.options import progress, show, spark_options, spark_session


@click.command()
@archive_option
@click.option("--rebuild", is_flag=True, help="Index everything again, whatever is indexed already.")
@spark_options
def index(archive: Path, rebuild: bool, master: str, spark_conf: tuple[str, ...], as_json: bool) -> None:
    """Index an archive by key, so that `headrace query` finds records in it without a search.

    Indexes what was archived since the last run. A run may be killed, and run again.
    """
    from headrace.arrow.archive import open_records

    open_records(archive)
    with spark_session("index", master, spark_conf) as spark:
        from headrace.pipelines import index as program

        summary = program.run(spark, program.IndexOptions(archive, rebuild), progress())
    show(summary, as_json)
