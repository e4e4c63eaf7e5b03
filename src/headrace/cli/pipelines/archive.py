"""`headrace pipeline archive`: keep topics in a Delta or Iceberg table, or as Parquet files."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.cli.completers import topic_names
from headrace.cli.options import LOCATION, with_bootstrap
from headrace.cli.pipelines.options import progress, readable_errors, show, spark_options, spark_session


@click.command()
@click.option(
    "--topic", "topics", multiple=True, metavar="NAME", shell_complete=topic_names, help="A topic to archive; repeat."
)
@click.option("--pattern", default="", metavar="REGEX", help="Topics whose whole name matches, new ones too.")
@click.option("--to", required=True, type=LOCATION, metavar="DIR", help="The archive: a folder, or s3://BUCKET/PREFIX.")
@click.option(
    "--format", "kind", type=click.Choice(["delta", "iceberg", "parquet"]), default="delta", show_default=True
)
@click.option("--catalog", metavar="URI", help="With --format iceberg: a REST catalog.  [default: DIR/catalog.db]")
@click.option("--namespace", metavar="NAME", help="With --format iceberg: of the tables.  [default: archive]")
@click.option("--follow", is_flag=True, help="Go on until ctrl-C or SIGTERM, instead of until all is archived.")
@click.option(
    "--decode", type=click.Choice(["json"]), help="Values as columns; those that do not fit to dead_letters/."
)
@click.option("--schema", metavar="DDL", help="Of the values, such as 'user string, amount double'; else by a sample.")
@click.option("--drop-value", is_flag=True, help="With --decode: keep the columns only, not the value as it came.")
@click.option("--group", default="headrace-archive", show_default=True, help="Consumer group told what is archived.")
@click.option("--max-offsets-per-trigger", type=click.IntRange(1), default=2_000_000, show_default=True, metavar="N")
@click.option(
    "--trigger", default=1.0, show_default=True, metavar="SECONDS", help="With --follow: time between batches."
)
@click.option("--starting", type=click.Choice(["earliest", "latest"]), default="earliest", show_default=True)
@click.option("--accept-loss", is_flag=True, help="Go on over offsets that were deleted before they were archived.")
@click.option("--merge", is_flag=True, help="Merge small files meanwhile, by their size.")
@click.option(
    "--target-mb", type=click.IntRange(1), metavar="N", help="With --merge: size of merged files.  [default: 128]"
)
@click.option(
    "--vacuum", "vacuum_hours", type=click.IntRange(1), metavar="HOURS",
    help="With --merge: remove files that were merged so long ago; no reader may take longer.  [default: 24]",
)  # fmt: skip
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), metavar="DIR",
    help="Where Spark notes its progress.  [default: in the archive; for s3:// in .headrace/checkpoints]",
)  # fmt: skip
@with_bootstrap
@spark_options
def archive(
    topics: tuple[str, ...],
    pattern: str,
    to: Path,
    kind: str,
    catalog: str | None,
    namespace: str | None,
    follow: bool,
    decode: str | None,
    schema: str | None,
    drop_value: bool,
    group: str,
    max_offsets_per_trigger: int,
    trigger: float,
    starting: str,
    accept_loss: bool,
    merge: bool,
    target_mb: int | None,
    vacuum_hours: int | None,
    checkpoint: Path | None,
    bootstrap: str,
    master: str,
    spark_conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Keep topics in an archive, each record once.

    A run goes on where the last one ended, however that ended. Records are in
    DIR/records, by topic and date; --starting counts only for partitions that
    the archive has nothing of.

    The group's offsets are what a broker may delete by (topic setting
    retention.archived, for the one group in broker setting archive.group), so
    archives that share topics each need a --group of their own.
    """
    if bool(topics) == bool(pattern):
        raise click.UsageError("give --topic (one or more), or --pattern")
    if (schema is not None or drop_value) and decode is None:
        raise click.UsageError("--schema and --drop-value need --decode json")
    if decode and kind == "parquet":
        raise click.UsageError("--decode needs --format delta or iceberg, which have a table for dead letters")
    if (catalog is not None or namespace is not None) and kind != "iceberg":
        raise click.UsageError("--catalog and --namespace need --format iceberg")
    if catalog is not None and not catalog.startswith(("http://", "https://")):
        raise click.BadParameter("write http://HOST:PORT of a REST catalog", param_hint="--catalog")
    if not merge and (target_mb is not None or vacuum_hours is not None):
        raise click.UsageError("--target-mb and --vacuum need --merge; `headrace pipeline compact` merges once")
    if merge and kind != "delta":
        raise click.UsageError(
            "--merge needs --format delta: Spark keeps a log of the Parquet files that it has written"
        )
    from headrace.arrow.iceberg import NAMESPACE, Where
    from headrace.pipelines import archive as pipeline
    from headrace.pipelines.small_files import MergeOptions

    merging = MergeOptions((target_mb or 128) << 20, vacuum_hours or 24) if merge else None
    where = Where(catalog or "", namespace or NAMESPACE) if catalog or namespace else None
    options = pipeline.ArchiveOptions(
        to, bootstrap, topics, pattern, kind, follow, decode, schema, drop_value, group, max_offsets_per_trigger,
        trigger, starting, accept_loss, merging, checkpoint, where,
    )  # fmt: skip
    with readable_errors():
        pipeline.check(options)
        with spark_session("archive", master, spark_conf) as spark:
            summary = pipeline.run(spark, options, progress())
    show(summary, as_json)
