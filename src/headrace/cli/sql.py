"""`headrace sql`: topics as tables."""

from __future__ import annotations

import csv
import json
import logging
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from headrace.cli.options import pairs, with_bootstrap
from headrace.cli.output import show_table
from headrace.cli.pipelines.options import OWN_ERROR, cause_of, spark_options, spark_session
from headrace.errors import OperatorError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headrace.pipelines.views import Archived

TABLE_ROWS: Final = 1000
CELL_WIDTH: Final = 60
DEAD_LETTERS: Final = "dead_letters"


@click.command()
@click.argument("statements", required=False, metavar="[SQL]")
@click.option("--file", "file", type=click.File(), help="Read the statements from a file; - is standard input.")
@click.option(
    "--schema", "schemas", multiple=True, metavar='TOPIC="a int, b string"', help="Fields of a topic; repeat."
)
@click.option("--sample", default=1000, show_default=True, type=click.IntRange(1), help="Records to guess fields from.")
@click.option("--limit", type=click.IntRange(0), help="Rows to show; 0 is all, as for --json and --csv.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with a header.")
@click.option("--explain", is_flag=True, help="Show Spark's plan instead of the result.")
@click.option("--archive", metavar="DIR", help="Also this archive, as archive.TOPIC and archive.dead_letters.")
@click.option("--history", metavar="DIR", help="Topics with what this archive has of them, as one table each.")
@spark_options
@with_bootstrap
def sql(
    statements: str | None,
    file: TextIO | None,
    schemas: tuple[str, ...],
    sample: int,
    limit: int | None,
    as_csv: bool,
    explain: bool,
    archive: str | None,
    history: str | None,
    bootstrap: str,
    master: str,
    spark_conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Query topics with Spark SQL.

    Every topic is a view by its name. Fields of JSON values are columns: guessed from the
    topic's first and last records, or given with --schema. Every view also has _key, _partition,
    _offset, _timestamp, _headers and _value. Values that do not fit have nulls; _value shows them.

    \b
    headrace sql 'select city, sum(amount) from orders group by city'
    headrace sql 'select * from `orders.eu-west` where _timestamp > now() - interval 1 hour'
    headrace sql 'show tables; describe orders'
    headrace sql --json 'select _offset, _value from orders where _partition = 0 limit 5'

    Names with dots or dashes are quoted with backticks; put the statement in single quotes then.
    Several statements are separated by semicolons. --json prints one object per line.
    """
    text = file.read() if file else statements
    if not text or (file and statements):
        raise click.UsageError("give a statement, or --file")
    if as_json and as_csv:
        raise click.UsageError("--json and --csv do not go together")
    given = pairs(schemas, "--schema")
    shown = TABLE_ROWS if limit is None and not (as_json or as_csv) else limit or 0
    from headrace.spark.java import LATE_OPTIMISING

    with tempfile.TemporaryDirectory(prefix="headrace-sql-") as folder:
        own_conf = ("spark.sql.globalTempDatabase=archive", f"spark.sql.warehouse.dir={folder}")
        with spark_session("sql", master, (*own_conf, *spark_conf), LATE_OPTIMISING) as spark, sql_errors():
            silence()
            from headrace.pipelines.statements import split
            from headrace.pipelines.views import TopicView, Views
            from headrace.spark.screen import waiting

            views = Views(
                spark,
                bootstrap,
                declared={topic: TopicView(schema) for topic, schema in given.items()},
                sample_records=sample,
                archived=archived_topics(spark, archive) if archive else None,
                history=history,
                told=_tell,
                drops=False,
            )
            for statement in split(text):
                with waiting(f"looking at what the statement names, at {bootstrap}"):
                    rows = views.sql(statement)
                if explain:
                    rows.explain("formatted")
                elif rows.columns:
                    show_rows(rows, shown, as_json=as_json, as_csv=as_csv)


def show_rows(rows: DataFrame, limit: int, *, as_json: bool = False, as_csv: bool = False) -> None:
    """A table, JSON lines or CSV; `limit` 0 is all rows."""
    if as_json:
        from pyspark.sql import functions as F

        lines = rows.select(F.to_json(F.struct("*"), {"ignoreNullFields": "false"}))
        for (line,) in (lines.limit(limit) if limit else lines).toLocalIterator():
            click.echo(line)
    elif as_csv:
        to = csv.writer(sys.stdout, lineterminator="\n")
        to.writerow(rows.columns)
        for row in (rows.limit(limit) if limit else rows).toLocalIterator():
            to.writerow(["" if value is None else cell(value) for value in row])
    else:
        from headrace.spark.screen import waiting

        with waiting("running the statement"):
            taken = rows.take(limit + 1) if limit else rows.collect()
        names = unique(rows.columns)
        cut = [dict(zip(names, (shorten(value) for value in row), strict=True)) for row in taken]
        show_table(cut[:limit] if limit else cut, names, named_by_user=True)
        if limit and len(cut) > limit:
            click.echo(f"the first {limit} rows; --limit 0 shows all", err=True)


def cell(value: Any) -> Any:
    """A value as text, nested ones as JSON; numbers stay numbers, so that they are set to the right."""
    from pyspark.sql import Row

    match value:
        case bool() | int() | float() | str():
            return value
        case bytes() | bytearray():
            return value.decode(errors="backslashreplace")
        case Row():
            return json.dumps(value.asDict(recursive=True), default=_plain, ensure_ascii=False)
        case list() | dict():
            return json.dumps(value, default=_plain, ensure_ascii=False)
        case _:
            return str(value)


def _plain(value: Any) -> Any:
    from pyspark.sql import Row

    return value.asDict(recursive=True) if isinstance(value, Row) else str(cell(value))


def shorten(value: Any) -> Any:
    if value is None:
        return None
    shown = cell(value)
    if not isinstance(shown, str):
        return shown
    line = re.sub(r"\s+", " ", shown)
    return line if len(line) <= CELL_WIDTH else line[: CELL_WIDTH - 1] + "…"


def unique(names: Sequence[str]) -> list[str]:
    """`select a, a` has two columns of one name; the second is shown as a_2."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return found


@contextmanager
def sql_errors() -> Iterator[None]:
    """Spark's own words about a statement, with the place in it; our own words where the cause is ours."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException, PythonException

    from headrace.pipelines.views import words

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        text = str(error)
        ours = any(OWN_ERROR.match(line.strip()) for line in text.splitlines())
        raise OperatorError(cause_of(text) if ours or isinstance(error, PythonException) else words(error)) from error


def silence() -> None:
    """What is wrong with a statement is told once, by the command; PySpark would log it again with its stack."""
    logging.getLogger("SQLQueryContextLogger").disabled = True


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        from headrace.spark.screen import CLEAR_LINE

        click.echo(f"{CLEAR_LINE}{text}", err=True)


def archived_topics(spark: SparkSession, folder: str) -> Archived:
    """The topics of an archive; its dead letters become a view of their own."""
    from pyspark.sql import functions as F

    from headrace.arrow.locations import ObjectPath, location
    from headrace.pipelines import archive_tables
    from headrace.pipelines.views import columns_of
    from headrace.spark.screen import waiting

    where = location(folder)
    with waiting(f"looking at the archive {folder}"):
        if isinstance(where, ObjectPath):
            where.check()
        records = where / "records"
        if not records.is_dir():
            raise OperatorError(f"{folder} is not an archive: it has no folder records")
        dead = archive_tables.frame(spark, where, DEAD_LETTERS)
        if dead is not None and not (records / f"topic={DEAD_LETTERS}").exists():
            view = columns_of(dead, None, ("topic", "reason", "archived_at"))
            view.createOrReplaceGlobalTempView(DEAD_LETTERS)
        kept = archive_tables.frame(spark, where, "records")
        rows = spark.read.parquet(str(records)) if kept is None else kept

    def of_topic(topic: str) -> DataFrame | None:
        found = rows.where(F.col("topic") == topic)
        return None if found.isEmpty() else found

    return of_topic
