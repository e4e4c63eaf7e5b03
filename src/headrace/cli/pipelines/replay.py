"""`headrace pipeline replay`: records of an archive back into a topic."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from headrace.cli.completers import topic_names
from headrace.cli.options import json_option, time_ms, with_bootstrap
from headrace.cli.pipelines.options import progress, show


@click.command()
@click.option("--archive", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The archive's folder.")
@click.option("--topic", required=True, metavar="NAME", help="The topic as it was archived.")
@click.option(
    "--to", default="", metavar="NAME", shell_complete=topic_names, help="The topic to write to, else --topic."
)
@click.option("--from", "from_", metavar="TIME", help="Records not before: 2026-11-18T12:00, 2h, @SECONDS.")
@click.option("--until", metavar="TIME", help="Records before.")
@click.option("--key", metavar="TEXT", help="Records with this key.")
@click.option("--where", metavar="SQL", help="""Records of which this is true: 'amount > 5 and "partition" = 0'.""")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), metavar="N", help="At most N records a second.")
@click.option(
    "--partition",
    type=click.Choice(["keep", "key"]),
    default="keep",
    show_default=True,
    help="Each record to the partition that it was in, or where its key says.",
)
@click.option("--dead-letters", is_flag=True, help="Only records that could not be decoded when they were archived.")
@click.option("--name", default="", metavar="NAME", help="Of this replay; another one begins anew.")
@with_bootstrap
@json_option
def replay(
    archive: Path,
    topic: str,
    to: str,
    from_: str | None,
    until: str | None,
    key: str | None,
    where: str | None,
    rate: float | None,
    partition: Literal["keep", "key"],
    dead_letters: bool,
    name: str,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Write records of an archive to a topic, each once, with key, value, headers and timestamp.

    Records of a partition keep their order. A replay that was interrupted, or
    whose process died, goes on where it ended when the same command is run
    again, and a replay that is done finds nothing more to do; --name begins
    another one. Needs no Spark.

    \b
    headrace pipeline replay --archive ./archive --topic orders --to orders-again
    headrace pipeline replay --archive ./archive --topic orders --to fixes --from 2h --key customer-7
    """
    from headrace.pipelines import replay as pipeline

    options = pipeline.ReplayOptions(
        archive,
        bootstrap,
        topic,
        to,
        None if from_ is None else time_ms(from_, "--from"),
        None if until is None else time_ms(until, "--until"),
        None if key is None else key.encode(),
        where,
        rate,
        partition,
        dead_letters,
        name,
    )
    show(pipeline.run(options, progress()), as_json)
