"""Topics as SQL views: columns from JSON, statements, and what is said when they are wrong."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from brokers import DIES_WITH_PARENT, Broker
from headrace.cli.main import main
from headrace.cli.sql import show_rows
from headrace.errors import HeadraceError, OperatorError
from headrace.pipelines import archive
from headrace.pipelines.statements import split, substitute
from headrace.pipelines.views import TopicView, Views, words
from json_topics import create, fill, new_name
from proving import proves

COMMAND_DEADLINE_S = 300
SMALL = ("--master", "local[1]", "--spark-conf", "spark.driver.memory=512m")


@pytest.fixture
def views(spark: SparkSession, broker: Broker) -> Iterator[Views]:
    made = Views(spark, broker.bootstrap)
    yield made
    made.close()


def rows(views: Views, sql: str) -> list[Any]:
    (statement,) = split(sql)
    return [tuple(row) for row in views.sql(statement).collect()]


def refused(views: Views, sql: str) -> str:
    with pytest.raises(OperatorError) as caught:
        rows(views, sql)
    return str(caught.value)


@proves("S10")
def test_json_fields_are_columns_joined_over_two_topics(views: Views, broker: Broker) -> None:
    orders, customers = new_name("orders"), new_name("customers")
    create(broker.bootstrap, orders, 3)
    create(broker.bootstrap, customers)
    fill(broker.bootstrap, customers, [{"id": n, "home": {"city": "Oslo" if n % 2 else "Bern"}} for n in range(4)])
    fill(
        broker.bootstrap,
        orders,
        [
            {"order": n, "customer": n % 4, "amount": n if n % 2 else n + 0.5, "lines": [{"sku": "a"}]}
            for n in range(40)
        ],
        key="order",
    )
    found = rows(
        views,
        f"select c.home.city, count(*), sum(o.amount), min(o._key), max(o.lines[0].sku), max(o._partition) > 0 "
        f"from {orders} o join {customers} c on o.customer = c.id group by 1 order by 1",
    )
    assert found == [("Bern", 20, 390.0, "0", "a", True), ("Oslo", 20, 400.0, "1", "a", True)]
    types = {name: kind for name, kind, _ in rows(views, f"describe {orders}")}
    assert types["amount"] == "double"
    assert types["lines"] == "array<struct<sku:string>>"
    assert list(types)[-6:] == ["_key", "_partition", "_offset", "_timestamp", "_headers", "_value"]


@proves("S10")
def test_values_that_do_not_fit_have_nulls_and_are_shown_as_they_came(views: Views, broker: Broker) -> None:
    topic = new_name("mixed")
    create(broker.bootstrap, topic)
    fill(
        broker.bootstrap,
        topic,
        [{"id": 1, "at": "x"}, {"id": 2, "_key": "own"}, b"not json", b"\xff\xfe", None, {"id": 3, "ID": 9}],
        headers=[("trace", b"t1")],
    )
    assert rows(views, f"select id, at, __key, _key from {topic} where id is not null order by _offset") == [
        (1, "x", None, None),
        (2, None, "own", None),
        (3, None, None, None),
    ]
    odd = rows(
        views, f"select _offset, _value is null, cast(_value as binary) from {topic} where id is null order by 1"
    )
    assert [(at, null, bytes(value or b"")) for at, null, value in odd] == [
        (2, False, b"not json"),
        (3, False, b"\xff\xfe"),
        (4, True, b""),
    ]
    assert rows(views, f"select _headers[0].key, _headers[0].value from {topic} limit 1") == [("trace", "t1")]


@proves("S10")
def test_a_given_schema_is_taken_instead_of_a_sample(spark: SparkSession, broker: Broker) -> None:
    topic = new_name("typed")
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, [{"at": "2026-01-02T03:04:05Z", "amount": "1.50", "other": 1}])
    views = Views(
        spark, broker.bootstrap, declared={topic: TopicView("at timestamp, amount decimal(9,2), missing string")}
    )
    ((year, amount, missing),) = rows(views, f"select year(at), amount, missing from {topic}")
    assert (year, str(amount), missing) == (2026, "1.50", None)
    views.close()
    wrong = Views(spark, broker.bootstrap, declared={topic: TopicView("at timestmp")})
    assert "schema given for topic" in refused(wrong, f"select * from {topic}")


@proves("S10")
def test_text_topics_and_empty_topics_have_the_record_columns(views: Views, broker: Broker) -> None:
    lines, empty = new_name("lines"), new_name("empty")
    create(broker.bootstrap, lines)
    create(broker.bootstrap, empty)
    fill(broker.bootstrap, lines, [b"hello", b"world", {"a": 1}])
    assert rows(views, f"select _value, _partition from {lines} where _offset >= 1") == [("world", 0), ('{"a": 1}', 0)]
    assert rows(views, f"select * from {empty}") == []


@proves("S10")
def test_only_the_topics_that_a_statement_names_are_looked_at(spark: SparkSession, broker: Broker) -> None:
    named, other, dotted = new_name("named"), new_name("other"), new_name("eu") + ".west-1"
    for topic in (named, other, dotted):
        create(broker.bootstrap, topic)
        fill(broker.bootstrap, topic, [{"id": 7}])
    said: list[str] = []
    views = Views(spark, broker.bootstrap, told=said.append)
    assert rows(views, f"with a as (select * from {named}) select (select max(id) from `{dotted}`), id from a") == [
        (7, 7)
    ]
    assert sorted(views.sampled) == sorted([named, dotted])
    assert len(said) == 2
    listed = {name: kind for name, kind, _ in rows(views, "show tables")}
    assert {named, other, dotted} <= set(listed)
    assert [name for name, *_ in rows(views, f"show tables like '{other}*'")] == [other]
    views.close()
    assert all(table.name not in (named, dotted) for table in spark.catalog.listTables())


@proves("S10")
def test_wrong_statements_are_told_without_stack_traces(views: Views, broker: Broker) -> None:
    topic, dotted = new_name("clicks"), new_name("eu") + ".clicks"
    create(broker.bootstrap, topic)
    create(broker.bootstrap, dotted)
    fill(broker.bootstrap, topic, [{"page": "/"}])
    near = refused(views, f"select * from {topic}x")
    assert f"no topic or view '{topic}x'" in near
    assert f"did you mean {topic}" in near
    assert f"`{dotted}`" in refused(views, f"select * from {dotted}")
    assert "--archive" in refused(views, "select * from archive.orders")
    for sql, condition, place in (
        (f"select pge from {topic}", "UNRESOLVED_COLUMN", "pos 7"),
        (f"select * frm {topic}", "PARSE_SYNTAX_ERROR", "pos 13"),
    ):
        with pytest.raises(AnalysisException) as caught:
            rows(views, sql)
        said = words(caught.value)
        assert condition in said
        assert place in said
        assert "\tat " not in said
        assert "Project" not in said


def test_topics_that_differ_only_in_case_are_refused(views: Views, broker: Broker) -> None:
    lower = new_name("case")
    for topic in (lower, lower.upper()):
        create(broker.bootstrap, topic)
    assert "differ only in case" in refused(views, f"select * from {lower}")


def test_no_broker_is_told_at_once(spark: SparkSession) -> None:
    with pytest.raises(HeadraceError, match=r"127\.0\.0\.1:1"):
        rows(Views(spark, "127.0.0.1:1"), "select * from orders")


@proves("S10")
def test_results_as_table_json_and_csv(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    frame = spark.sql("select 1 as a, 'x y' as b, named_struct('c', array(1, 2)) as s, cast(null as int) as n, 2 as a")
    show_rows(frame, 10)
    assert capsys.readouterr().out.split() == [
        "a",
        "b",
        "s",
        "n",
        "a_2",
        "1",
        "x",
        "y",
        '{"c":',
        "[1,",
        "2]}",
        "-",
        "2",
    ]
    show_rows(frame.drop("a"), 0, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"b": "x y", "s": {"c": [1, 2]}, "n": None}
    show_rows(frame.drop("a"), 0, as_csv=True)
    assert capsys.readouterr().out == 'b,s,n\nx y,"{""c"": [1, 2]}",\n'
    show_rows(spark.range(5), 2)
    shown = capsys.readouterr()
    assert shown.out.split() == ["id", "0", "1"]
    assert "--limit 0" in shown.err


@proves("S10")
def test_a_plan_is_shown_instead_of_rows(
    spark: SparkSession, broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = new_name("planned")
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, [{"n": 987654321987}])  # no number of an expression in a plan
    monkeypatch.setattr("headrace.cli.sql.spark_session", lambda *_: contextlib.nullcontext(spark))
    monkeypatch.setattr("headrace.cli.sql.silence", lambda: None)
    told = ["sql", "--explain", f"select sum(n) from {topic}", "--bootstrap", broker.bootstrap]
    assert main(told) == 0
    out = capsys.readouterr().out
    assert "== Physical Plan ==" in out
    assert "headrace" in out
    assert "987654321987" not in out
    spark.catalog.dropTempView(topic)


def test_statements_end_at_semicolons_that_are_no_part_of_strings_names_or_comments() -> None:
    text = "select ';' -- a;b\n;\n ; select `a;``b`, \"x;\" /* ; */ from stream t, STREAM(`u-v`) ;-- end"
    first, second = split(text)
    assert (first.fingerprint, first.line) == ("select ';'", 1)
    assert second.line == 3
    assert second.streamed() == {"t", "u-v"}
    assert second.tokens[1].name == "a;`b"
    assert substitute("${a} ${b:two words} $c", {"a": "1"}) == "1 two words $c"
    with pytest.raises(OperatorError, match="--set c=VALUE"):
        substitute("${c}", {})


@proves("S10")
def test_the_command_answers_lines_for_scripts_and_one_message_for_people(
    spark: SparkSession, broker: Broker, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From a topic, and from an archive that keeps columns instead of values."""
    topic, folder = new_name("cli") + "-dashed", tmp_path_factory.mktemp("archive")
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, [{"n": 1}, {"n": 2, "_key": 7}, b"no JSON"])
    schema = {"decode": "json", "schema": "n bigint, _key int", "drop_value": True}
    archive.run(spark, archive.ArchiveOptions(folder, broker.bootstrap, (topic,), group=topic, **schema))  # type: ignore[arg-type]
    query = tmp_path / "q.sql"
    query.write_text(
        f"create temporary view twice as select 2 * n as n from `{topic}`;\nselect sum(n) as s from twice;\n"
        f"select n, __key, _offset, _value from archive.`{topic}` order by n;\n"
        f"select topic, reason, _offset, _value from archive.dead_letters; boo"
    )
    command = ["sql", "--json", "--archive", str(folder), "--file", str(query)]
    done = subprocess.run(
        [*DIES_WITH_PARENT, sys.executable, "-m", "headrace.cli.main", *command, *SMALL],
        env={**os.environ, "HEADRACE_BOOTSTRAP": broker.bootstrap},
        cwd=tmp_path, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"s": 6},
        {"n": 1, "__key": None, "_offset": 0, "_value": None},
        {"n": 2, "__key": 7, "_offset": 1, "_value": None},
        {"topic": topic, "reason": "the value is not JSON", "_offset": 2, "_value": "no JSON"},
    ], done.stderr
    assert done.stderr.startswith("headrace: [PARSE_SYNTAX_ERROR]")
    assert "at org.apache" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.sql"]
