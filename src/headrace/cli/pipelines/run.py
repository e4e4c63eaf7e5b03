"""`headrace pipeline run`: a job of the user's own."""

from __future__ import annotations

import os
from pathlib import Path

import click

from headrace.cli.options import pairs, with_bootstrap
from headrace.cli.pipelines.options import progress, show, spark_options, spark_session
from headrace.cli.sql import silence, sql_errors


@click.command()
@click.argument("job", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="JOB.sql|JOB.py")
@click.option("--follow", is_flag=True, help="Go on until ctrl-C or SIGTERM, instead of until all is read.")
@click.option(
    "--checkpoint",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where progress and state are kept; else .headrace/checkpoints/JOB beside the job's file.",
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A value for ${NAME} in the job; repeat.")
@click.option(
    "--accept-change",
    is_flag=True,
    help="Go on with the checkpoint although the job was changed; begin although a table has rows already.",
)
@click.option(
    "--trigger", default=1.0, show_default=True, metavar="SECONDS", help="With --follow: time between batches."
)
@with_bootstrap
@spark_options
def run(
    job: Path,
    follow: bool,
    checkpoint: Path | None,
    settings: tuple[str, ...],
    accept_change: bool,
    trigger: float,
    bootstrap: str,
    master: str,
    spark_conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run a job: topics, through SQL or DataFrames, to topics and Delta tables.

    A SQL job is Spark SQL where every topic is a view, with JSON fields as columns and
    _key, _partition, _offset, _timestamp, _headers and _value beside them:

    \b
    create topic view orders (id string, city string, amount double);   -- else guessed from a sample
    insert into topic `revenue-per-minute`
      select window.start as minute, city as _key, sum(amount) as revenue
      from stream orders watermark _timestamp delay of interval 10 seconds
      group by window(_timestamp, '1 minute'), city;
    insert into table './tables/big_orders' partitioned by (city)
      select id, city, amount from stream orders where amount > ${least:100};

    "from stream NAME" reads a topic record by record, "from NAME" as it is when a batch runs.
    Columns become fields of a JSON value; _key, _headers, _timestamp and _partition are the
    record's own, and _value is a value as it is. "options (mode = 'update')" after the topic's
    name sends every change of an aggregate; without it only what is final goes out.

    \b
    A Python job is a function:
    def job(topics):
        orders = topics.read_stream("orders", "id string, city string, amount double")
        topics.write(orders.where("amount > 100"), "big-orders")
        topics.write_table(orders.groupBy(...), "./tables/x", partition_by=["city"])

    A run reads what the topics have now and ends; the next one goes on there. After a crash
    the last batch is run again: tables take it once (exactly once), topics may get some
    records twice (at least once). Paths count from the job's folder.
    """
    from headrace.pipelines import run as pipeline

    options = pipeline.JobOptions(
        job, bootstrap, checkpoint, pairs(settings, "--set"), follow, trigger, accept_change
    )  # fmt: skip
    local = (f"spark.sql.shuffle.partitions={os.cpu_count() or 1}",) if master.startswith("local") else ()
    with spark_session("run", master, (*local, *spark_conf)) as spark, sql_errors():
        silence()
        summary = pipeline.run(spark, options, progress())
    show(summary, as_json)
