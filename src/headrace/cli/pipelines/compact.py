"""`headrace pipeline compact`: small files of an archive merged, and the latest record per key."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.cli.options import archive_option, time_ms
from headrace.cli.pipelines.options import progress, show, spark_options, spark_session
from headrace.cli.times import EXPECTED


@click.command()
@archive_option
@click.option("--topic", "topics", multiple=True, help="Only this topic; repeat.  [default: all]")
@click.option("--target-mb", type=click.IntRange(1), default=128, show_default=True, help="Size of merged files.")
@click.option("--older-than", metavar="TIME", help=f"Only files written before {EXPECTED}.")
@click.option(
    "--vacuum", "vacuum_hours", type=click.IntRange(0), metavar="HOURS",
    help="Remove files that were replaced so many hours ago; from 24 on also what killed runs have left.",
)  # fmt: skip
@click.option("--latest", is_flag=True, help="Write the latest record of each key to DIR/latest instead.")
@spark_options
def compact(
    archive: Path,
    topics: tuple[str, ...],
    target_mb: int,
    older_than: str | None,
    vacuum_hours: int | None,
    latest: bool,
    master: str,
    spark_conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Merge the small files of an archive, or keep the latest record of each key.

    Archiving may go on meanwhile. A run may be killed, and run again.
    """
    from headrace.arrow.archive import open_records

    if latest and (older_than is not None or vacuum_hours is not None):
        raise click.UsageError("--latest takes neither --older-than nor --vacuum")
    older_than_ms = None if older_than is None else time_ms(older_than, "--older-than")
    open_records(archive)
    with spark_session("compact", master, spark_conf) as spark:
        if latest:
            from headrace.pipelines import latest as latest_program

            summary = latest_program.run(spark, latest_program.LatestOptions(archive, topics), progress())
        else:
            from headrace.pipelines import compact as program

            options = program.CompactOptions(archive, topics, target_mb << 20, older_than_ms, vacuum_hours)
            summary = program.run(spark, options, progress())
    show(summary, as_json)
