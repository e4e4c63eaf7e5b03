"""Options that all pipeline commands share, the session they ask for, and how their summaries are shown."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.cli import EXIT_FAILED
from headrace.cli.options import json_option, pairs
from headrace.cli.output import show_json, show_table
from headrace.errors import OperatorError
from headrace.pipelines.summary import Progress, Summary

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

F = TypeVar("F", bound=Callable[..., Any])

# How the last line of a traceback gives an error of ours.
OWN_ERROR = re.compile(r"^headrace\.[\w.]+: ")


def spark_options(command: F) -> F:
    """--master, --spark-conf and --json, as `master`, `spark_conf` and `as_json`."""
    command = json_option(command)
    command = click.option(
        "--spark-conf", multiple=True, metavar="NAME=VALUE", help="A setting of the Spark session; repeat."
    )(command)
    return click.option(
        "--master",
        default="local[*]",
        show_default=True,
        metavar="URL",
        help="The engine: local[N], spark://HOST:PORT, ...",
    )(command)


@contextmanager
def spark_session(
    name: str, master: str, spark_conf: tuple[str, ...], java_options: str = ""
) -> Iterator[SparkSession]:
    """A quiet session for one command. What goes wrong is told once, as one line, by the command: Spark would log it
    several times, with its stack, unless `spark.log.level` is given."""
    from headrace.spark import session
    from headrace.spark.connect import SCHEME

    if master.startswith(SCHEME):
        raise click.UsageError(f"--master {master} is a Spark Connect server; commands need a driver of their own")
    conf = {"spark.log.level": "OFF", **pairs(spark_conf, "--spark-conf")}
    with readable_errors():
        spark = session.start(f"headrace {name}", master, conf, java_options=java_options)
        spark.sparkContext.setLogLevel(conf["spark.log.level"])
        try:
            yield spark
        finally:
            spark.stop()


@contextmanager
def readable_errors() -> Iterator[None]:
    """Spark's exceptions as one OperatorError each, with the line that says what went wrong."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise OperatorError(cause_of(str(error))) from error


def cause_of(text: str) -> str:
    """The most telling line of an exception from Spark: our own error within it, else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if OWN_ERROR.match(line)]
    if ours:
        return OWN_ERROR.sub("", ours[-1])
    python = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception")) and ": " in line]
    return (python[-1] if python else lines[0]) if lines else "Spark failed without a message"


def progress() -> Progress:
    return Progress(sys.stderr)


def show(summary: Summary, as_json: bool) -> None:
    """Print the summary; one that is not ok ends the command with exit code 1."""
    if as_json:
        show_json(summary.as_json())
    else:
        for table in summary.tables:
            show_table(table.rows, table.columns, table.title)
            click.echo()
        for name, value in summary.facts.items():
            click.echo(f"{name.replace('_', ' ')}: {value}")
    if not summary.ok:
        raise click.exceptions.Exit(EXIT_FAILED)
