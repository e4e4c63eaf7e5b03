"""How far a stream is, told when its batch is complete, and what a batch had, in Spark's report and for Prometheus."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from brokers import Broker, wait_for
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.groups import Commit, commit_offsets, fetch_commits
from headrace.errors import OperatorError
from headrace.metrics import exposition
from headrace.spark import options, query_listener, query_metrics
from headrace.spark.group_commits import GroupCommits
from headrace.spark.progress import Position, ends_report
from headrace.spark.query_metrics import PartitionBatch, Totals
from headrace.spark.stream import StreamReader
from proving import proves
from spark.confluent_rows import create_topic, numbered, send

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEADLINE_S = 300
QUERY = "6f1c1bfe-0000-4000-8000-000000000001"


def report(start: object, end: object, ends: object, *, rows: int = 0, ran: bool = True) -> dict[str, Any]:
    """As Spark has it of a query with one source."""
    offsets = {"startOffset": start, "endOffset": end, "latestOffset": ends}
    return {
        "id": QUERY,
        "name": "copy",
        "numInputRows": rows,
        "batchDuration": 250,
        "durationMs": {"addBatch": 200} if ran else {"latestOffset": 2},
        "sources": [{**offsets, "numInputRows": rows}],
        "sink": {"numOutputRows": rows},
    }


BEGIN = Position({("orders", 0): 10, ("orders", 1): 5}, {"orders": "id"})
END = Position({("orders", 0): 30, ("orders", 1): 5}, {"orders": "id"})
ENDS = Position({("orders", 0): 42, ("orders", 1): 5}, {"orders": "id"})
REPORT = ends_report(ENDS, BEGIN, END, {("orders", 0): 100.0}, "a-group", "127.0.0.1:9092")


@pytest.mark.parametrize("form", [json.dumps, lambda offset: offset], ids=["text", "read"])
def test_a_report_tells_offsets_bytes_and_lag_of_each_partition(form: Any) -> None:
    told = report(form(BEGIN.to_json()), form(END.to_json()), form(REPORT), rows=19)
    (source,) = query_metrics.sources(told)
    assert (source.group_id, source.bootstrap, source.rows) == ("a-group", "127.0.0.1:9092", 19)
    assert source.reached == END
    assert source.partitions == (
        PartitionBatch("orders", 0, 30, offsets=20, bytes=2000, lag=12),
        PartitionBatch("orders", 1, 5, offsets=0, bytes=0, lag=0),
    )
    assert (source.bytes, source.lag) == (2000, 12)
    assert query_metrics.author(told) == f"spark query {QUERY} copy"


@pytest.mark.parametrize("ends", ["None", None, "{}", '{"orders": {"0": 3}}', "3"])
def test_a_report_of_another_source_or_of_a_batch_run_again_tells_nothing(ends: object) -> None:
    assert query_metrics.sources(report("None", '{"orders": {"0": 3}}', ends)) == []


def test_what_stands_beside_the_ends_is_no_topic() -> None:
    assert Position.from_json(REPORT) == ENDS


def test_batches_are_added_up_for_prometheus_until_the_query_ends() -> None:
    totals = Totals()
    for _ in range(2):
        totals.add(report(BEGIN.to_json(), END.to_json(), REPORT, rows=19))
    totals.add(report(END.to_json(), END.to_json(), "None", ran=False))
    said = exposition(totals.samples())
    query, place = f'query="{QUERY}",name="copy"', f'query="{QUERY}",group="a-group",topic="orders",partition="0"'
    for line in (
        f"headrace_spark_batches_total{{{query}}} 2",
        f"headrace_spark_input_rows_total{{{query}}} 38",
        f"headrace_spark_output_rows_total{{{query}}} 38",
        f"headrace_spark_batch_seconds{{{query}}} 0.25",
        f"headrace_spark_offsets_total{{{place}}} 40",
        f"headrace_spark_bytes_total{{{place}}} 4000",
        f"headrace_spark_lag{{{place}}} 12",
        "# TYPE headrace_spark_lag gauge",
    ):
        assert line in said.splitlines()
    totals.forget(QUERY)
    assert exposition(totals.samples()) == ""


def test_metrics_are_served_where_the_session_is_told() -> None:
    server = query_listener.serve("127.0.0.1:0", lambda: "a 1\n")
    try:
        at = f"http://127.0.0.1:{server.server_address[1]}"
        with urlopen(f"{at}/metrics", timeout=10) as answer:
            assert (answer.read(), answer.headers["Content-Type"]) == (
                b"a 1\n",
                "text/plain; version=0.0.4; charset=utf-8",
            )
        with pytest.raises(HTTPError, match="404"):
            urlopen(at, timeout=10)
        taken = f"127.0.0.1:{server.server_address[1]}"
        with pytest.raises(OperatorError, match=f"spark.headrace.metrics.address={taken} cannot be served"):
            query_listener.serve(taken, str)
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(OperatorError, match=r"write such as 127\.0\.0\.1:9464"):
        query_listener.serve("nowhere", str)


def test_the_newest_progress_is_committed_and_none_of_a_topic_that_was_made_anew(broker: Broker) -> None:
    topic = create_topic(broker)
    send(broker, topic, numbered(5))
    commits = GroupCommits()
    for at in range(6):
        commits.put(broker.bootstrap, f"of-{topic}", Position({(topic, 0): at}), f"spark query {QUERY}")
    commits.put(broker.bootstrap, f"not-of-{topic}", Position({(topic, 0): 1}, {topic: "of another topic"}), "")
    assert commits.wait(DEADLINE_S)
    with Cluster(broker.bootstrap) as cluster:
        (found,) = fetch_commits(cluster, f"of-{topic}").values()
        assert (found.offset, found.metadata) == (5, f"spark query {QUERY}")
        assert fetch_commits(cluster, f"not-of-{topic}") == {}


def test_who_plans_the_next_batch_keeps_the_name_of_the_query(broker: Broker) -> None:
    topic = create_topic(broker)
    send(broker, topic, numbered(5))
    given = {"bootstrap": broker.bootstrap, "subscribe": topic, "startingOffsets": "earliest"}
    reader = StreamReader(options.parse({**given, "kafka.group.id": f"of-{topic}"}, streaming=True))
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    with Cluster(broker.bootstrap) as cluster:
        commit_offsets(cluster, f"of-{topic}", {(topic, 0): 2}, metadata=f"spark query {QUERY} copy")
        reader.latestOffset(end, ReadAllAvailable())
        (found,) = fetch_commits(cluster, f"of-{topic}").values()
    assert (found.offset, found.metadata) == (5, f"spark query {QUERY} copy")


def described(broker: Broker, group: str) -> list[str]:
    """What a person sees."""
    command = [sys.executable, "-m", "headrace.cli.main", "group", "describe", group, "--bootstrap", broker.bootstrap]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout.splitlines()


@proves("S2")
def test_progress_is_committed_and_counted_when_a_batch_is_complete(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    """The next batch is an hour away, so nobody plans it."""
    topic, out = create_topic(broker, partitions=2), create_topic(broker)
    send(broker, topic, numbered(100))
    read = spark.readStream.format("headrace").option("bootstrap", broker.bootstrap).option("subscribe", topic)
    read = read.option("kafka.group.id", f"of-{topic}").option("maxOffsetsPerTrigger", 60)
    write = read.option("startingOffsets", "earliest").load().select("value").writeStream.format("headrace")
    write = write.option("bootstrap", broker.bootstrap).option("topic", out).queryName(f"copy-{topic}")
    query = write.option("checkpointLocation", str(tmp_path / "c")).trigger(processingTime="1 hour").start()
    try:
        last = wait_for("a batch", lambda: query.lastProgress, DEADLINE_S)
        with Cluster(broker.bootstrap) as cluster:

            def commits_of_batch() -> list[Commit]:
                found = list(fetch_commits(cluster, f"of-{topic}").values())
                return found if sum(each.offset for each in found) == 60 else []

            done = wait_for("its commit", commits_of_batch, DEADLINE_S)
        assert {each.metadata for each in done} == {f"spark query {query.id} copy-{topic}"}
        head, author, *_ = described(broker, f"of-{topic}")
        assert head.endswith("lag 40")
        assert author == f"committed by spark query {query.id} copy-{topic}"

        (source,) = query_metrics.sources(last)
        assert (source.group_id, source.rows, source.lag) == (f"of-{topic}", 60, 40)
        assert sum(each.offsets for each in source.partitions) == 60
        assert 60 <= source.bytes <= 60 * 100
        assert last["sink"]["numOutputRows"] == 60
        served = wait_for("the count", lambda: [s for s in query_metrics.totals.samples() if str(query.id) in s.labels])
        assert {s.value for s in served if s.family is query_metrics.ROWS_IN} == {60}
        assert sum(s.value for s in served if s.family is query_metrics.LAG) == 40
    finally:
        query.stop()
