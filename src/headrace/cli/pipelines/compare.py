"""`headrace pipeline compare`: two replicas' data folders, record by record; the exit code tells the outcome."""

from __future__ import annotations

import click

from headrace.cli.pipelines.options import progress, show, spark_options, spark_session


@click.command()
@click.argument("left", metavar="DIR")
@click.argument("right", metavar="DIR")
@click.option("--topic", metavar="NAME", help="Compare this topic only.")
@click.option("--show", "shown", default=20, show_default=True, metavar="N", help="Show so many differences.")
@spark_options
def compare(
    left: str, right: str, topic: str | None, shown: int, master: str, spark_conf: tuple[str, ...], as_json: bool
) -> None:
    """Name the records by which two data folders differ, without a broker.

    What only one has may be on its way, or deleted or compacted in the other. Exit code 1: different records at the
    same offset, which is never right.
    """
    with spark_session("compare", master, spark_conf) as spark:
        from headrace.pipelines import replicas

        summary = replicas.run(spark, left, right, {"topic": topic} if topic else {}, shown, progress())
    show(summary, as_json)
