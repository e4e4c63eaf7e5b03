"""`headrace pipeline audit`: ledgers against topics, data folders and an archive; the exit code tells the outcome."""

from __future__ import annotations

import click

from headrace.cli.options import context_option, plain_bootstrap
from headrace.cli.pipelines.options import progress, show, spark_options, spark_session
from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.contexts import KEY_BY_NAME


@click.command()
@click.option(
    "--ledger", "ledgers", multiple=True, required=True, metavar="DIR", help="Ledger of acknowledged records; repeat."
)
@click.option("--topics", metavar="NAME,...", help="Audit these topics only; else all that the ledgers name.")
@click.option(
    "--bootstrap",
    envvar=KEY_BY_NAME["bootstrap"].variable,
    metavar="HOST:PORT,...",
    help=f"Look into the topics of this cluster; the context's, or {DEFAULT_BOOTSTRAP}, when no other store is given.",
)
@context_option
@click.option("--data", multiple=True, metavar="DIR", help="Look into this data folder, without a broker; repeat.")
@click.option("--archive", metavar="DIR", help="Look into this archive.")
@click.option(
    "--archive-group",
    default="headrace-archive",
    show_default=True,
    metavar="GROUP",
    help="Whose committed offsets say how far the archive is.",
)
@click.option(
    "--copy",
    "copies",
    multiple=True,
    metavar="TOPIC=OTHER",
    help="Look into OTHER for what was made of each record of TOPIC, by a sink or a replay; repeat.",
)
@click.option("--key", metavar="SQL", help="Of a copy, if not the record's: upper(cast(key as string)).")
@click.option("--value", metavar="SQL", help="Of a copy, if not the record's.")
@click.option("--headers", metavar="SQL", help="Of a copy, if not the record's.")
@click.option("--where", metavar="SQL", help="Of which records there is a copy: timestamp >= '2026-11-18'.")
@click.option("--dead-letters", is_flag=True, help="Copies are of those that the archive could not decode.")
@click.option(
    "--isolation",
    type=click.Choice(["committed", "uncommitted"]),
    default="committed",
    show_default=True,
    help="Look into topics as readers of committed records, or with all that others may see.",
)
@click.option("--show", "shown", default=20, show_default=True, metavar="N", help="Show so many findings.")
@click.option(
    "--findings", metavar="FILE", help="Write the findings there, up to a million of each store: .parquet or .jsonl."
)
@spark_options
def audit(
    ledgers: tuple[str, ...],
    topics: str | None,
    bootstrap: str | None,
    context: str | None,
    data: tuple[str, ...],
    archive: str | None,
    archive_group: str,
    copies: tuple[str, ...],
    key: str | None,
    value: str | None,
    headers: str | None,
    where: str | None,
    dead_letters: bool,
    isolation: str,
    shown: int,
    findings: str | None,
    master: str,
    spark_conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Account for every acknowledged record: lost, duplicated, out of order, corrupted.

    Exit code 0: all agree. 1: there are findings.
    """
    if findings is not None and not findings.endswith((".parquet", ".jsonl")):
        raise click.BadParameter("write a name that ends in .parquet or .jsonl", param_hint="--findings")
    pairs = tuple((source, target) for source, _, target in (each.partition("=") for each in copies))
    if not all(source and target for source, target in pairs):
        raise click.BadParameter("write TOPIC=OTHER", param_hint="--copy")
    if not pairs and (key or value or headers or where or dead_letters):
        raise click.UsageError("--key, --value, --headers, --where and --dead-letters say how a --copy was made")
    if bootstrap or context or pairs or not (data or archive):
        bootstrap = plain_bootstrap(bootstrap, context)
    with spark_session("audit", master, spark_conf) as spark:
        from headrace.pipelines.audit import AuditOptions, run
        from headrace.pipelines.copies import Making

        options = AuditOptions(
            ledgers=ledgers,
            bootstrap=bootstrap,
            topics=tuple(dict.fromkeys(name.strip() for name in (topics or "").split(",") if name.strip())),
            data=data,
            archive=archive,
            archive_group=archive_group,
            copies=pairs,
            making=Making(key, value, headers, where, dead_letters),
            isolation=isolation,
            shown=shown,
            findings=findings,
        )
        summary = run(spark, options, progress())
    show(summary, as_json)
