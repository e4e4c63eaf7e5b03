"""`headrace pipeline replay`: records of an archive, or rows of a table, into a topic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from headrace.cli.completers import topic_names
from headrace.cli.options import LOCATION, json_option, time_ms, with_bootstrap
from headrace.cli.pipelines.options import progress, show

if TYPE_CHECKING:
    from headrace.pipelines.replay import ReplayOptions


@click.command()
@click.option("--archive", type=LOCATION, metavar="DIR", help="The archive: a folder, or s3://BUCKET/PREFIX.")
@click.option("--table", type=click.Path(path_type=Path), metavar="PATH", help="Or a Delta or Parquet table.")
@click.option("--topic", default="", metavar="NAME", help="The topic as it was archived.")
@click.option(
    "--to", default="", metavar="NAME", shell_complete=topic_names, help="The topic to write to, else --topic."
)
@click.option(
    "--columns",
    metavar="FIELD=COLUMN,...",
    help="Of a table: what is key, value, timestamp, headers, partition. value=* is all columns as JSON. "
    "[default: columns of these names]",
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
    help="Of an archive: each record to the partition that it was in, or where its key says.",
)
@click.option("--dead-letters", is_flag=True, help="Only records that could not be decoded when they were archived.")
@click.option("--name", default="", metavar="NAME", help="Of this replay; another one begins anew.")
@with_bootstrap
@json_option
def replay(
    archive: Path | None,
    table: Path | None,
    topic: str,
    to: str,
    columns: str | None,
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
    """Write records of an archive, or rows of a table, to a topic, each once.

    Records of an archive have key, value, headers and timestamp as they were,
    and keep the order of their partition; rows of a Delta or Parquet table are
    read in the order of its files. A replay that was interrupted, or whose
    process died, goes on where it ended when the same command is run again, and
    a replay that is done finds nothing more to do; --name begins another one. A
    Delta table is read to the end at the version that it had when the replay
    began; files of Parquet must not change. Needs no Spark.

    \b
    headrace pipeline replay --archive ./archive --topic orders --to orders-again
    headrace pipeline replay --archive ./archive --topic orders --to fixes --from 2h --key customer-7
    headrace pipeline replay --table ./sales --to sales --columns 'key=customer,value=*,timestamp=sold_at'
    """
    from headrace.pipelines import replay as pipeline

    from_ms = None if from_ is None else time_ms(from_, "--from")
    until_ms = None if until is None else time_ms(until, "--until")
    wanted = None if key is None else key.encode()
    if (archive is None) == (table is None):
        raise click.UsageError("Give one of --archive and --table.")
    options: ReplayOptions
    if archive is not None:
        from headrace.pipelines.replay_archive import ArchiveReplay

        if not topic:
            raise click.UsageError("--archive needs --topic: the topic as it was archived.")
        if columns is not None:
            raise click.UsageError("--columns is for --table: records of an archive have their columns.")
        chosen = (from_ms, until_ms, wanted, where, rate, partition, dead_letters, name, (from_, until))
        options = ArchiveReplay(archive, bootstrap, topic, to, *chosen)
    else:
        from headrace.arrow.record_columns import parse
        from headrace.pipelines.replay_table import TableReplay

        assert table is not None, "one of the two was given"
        if not (to or topic) or (to and topic):
            raise click.UsageError("--table needs --to: the topic to write to.")
        if dead_letters or partition == "key":
            raise click.UsageError("--dead-letters and --partition are for --archive; see --columns partition=COLUMN.")
        mapping = {} if columns is None else parse(columns)
        given = (from_ms, until_ms, wanted, where, rate, name, (from_, until))
        options = TableReplay(table, bootstrap, to or topic, mapping, *given)
    show(pipeline.run(options, progress()), as_json)
