"""Topics as a stream: every record once over limits, restarts and new partitions; losses told; progress as a group."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable

from brokers import Broker, wait_for
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import create_partitions, delete_records
from headrace.client.errors import Refusal
from headrace.errors import ErrorCode
from headrace.spark import options, progress, split_reader
from headrace.spark.options import Topics
from headrace.spark.plan import Split
from headrace.spark.stream import StreamReader
from proving import proves
from spark.confluent_rows import CODECS, create_topic, delete_topic, numbered, odd_records, rows_in, rows_of, send

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

DEADLINE_S = 300


class Copy:
    """A query that copies topics into a folder of Parquet files, and can be run again and again."""

    def __init__(self, spark: SparkSession, broker: Broker, folder: Path, **given: object) -> None:
        self.spark = spark
        self.broker = broker
        self.folder = folder
        self.options = {"startingOffsets": "earliest", "includeHeaders": "true"}
        self.options |= {name: str(value) for name, value in given.items()}

    def start(self, given: dict[str, object] | None = None, *, available_now: bool = True) -> StreamingQuery:
        named = self.options | {name: str(value) for name, value in (given or {}).items()}
        read = self.spark.readStream.format("headrace").option("kafka.bootstrap.servers", self.broker.bootstrap)
        write = read.options(**named).load().writeStream.format("parquet").option("path", str(self.folder / "rows"))
        write = write.option("checkpointLocation", str(self.folder / "checkpoint"))
        return (
            write.trigger(availableNow=True) if available_now else write.trigger(processingTime="0 seconds")
        ).start()

    def run(self, **given: object) -> list[Any]:
        """All that is available now; the progress of the batches that had rows."""
        query = self.start(given)
        assert query.awaitTermination(DEADLINE_S)
        return [each for each in query.recentProgress if each["numInputRows"]]

    def fails(self, **given: object) -> str:
        query = self.start(given)
        with pytest.raises(StreamingQueryException) as error:
            query.awaitTermination(DEADLINE_S)
        return str(error.value)

    def rows(self) -> list[Any]:
        return rows_in(self.spark.read.parquet(str(self.folder / "rows")))


def offsets(rows: list[Any]) -> list[tuple[int, int]]:
    return [(row[1], row[2]) for row in rows]


def lag(broker: Broker, group: str) -> int:
    """What a person sees."""
    command = [sys.executable, "-m", "headrace.cli.main", "group", "describe", group, "--bootstrap", broker.bootstrap]
    said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    return int(said.splitlines()[0].rpartition("lag ")[2])


@proves("S2")
def test_every_record_once_over_limits_restarts_and_new_partitions(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    topic = create_topic(broker, partitions=2)
    copy = Copy(spark, broker, tmp_path, subscribe=topic, maxOffsetsPerTrigger=100)
    copy.options["kafka.group.id"] = f"copy-of-{topic}"
    for codec in ("none", "zstd"):
        send(broker, topic, numbered(125, headers=[("h", b"1")]), **{"compression.type": codec})
    batches = copy.run()
    assert [each["numInputRows"] for each in batches] == [100, 100, 50]
    assert copy.rows() == rows_of(broker, topic)
    assert lag(broker, f"copy-of-{topic}") == 0

    with Cluster(broker.bootstrap) as cluster:
        create_partitions(cluster, topic, 4)
    send(broker, topic, [{"value": b"new", "partition": n % 4} for n in range(40)])
    assert lag(broker, f"copy-of-{topic}") == 20, "the group has seen two partitions"
    assert [each["numInputRows"] for each in copy.run(minPartitions=6)] == [40]
    assert copy.rows() == rows_of(broker, topic)
    assert lag(broker, f"copy-of-{topic}") == 0
    assert copy.run() == []


@proves("S2")
def test_a_stream_has_the_rows_of_another_client_over_all_codecs(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    topic = create_topic(broker, partitions=3)
    for codec in CODECS:
        records = [*odd_records(), *numbered(20, headers=[("codec", codec.encode())])]
        send(broker, topic, records, **{"compression.type": codec})
    copy = Copy(spark, broker, tmp_path, subscribe=topic)
    copy.run()
    expected = rows_of(broker, topic)
    assert len(expected) == 27 * len(CODECS)
    assert copy.rows() == expected


@proves("S2")
def test_a_running_query_takes_up_new_topics_and_shows_how_far_it_is(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    prefix = create_topic(broker)
    send(broker, create_topic(broker, 1, f"{prefix}.a"), numbered(10))
    copy = Copy(spark, broker, tmp_path, subscribePattern=f"{prefix}[.].*", groupIdPrefix=prefix)
    query = copy.start(available_now=False)
    try:
        wait_for("the first topic", lambda: len(parquet_rows(copy)) == 10, DEADLINE_S)
        send(broker, create_topic(broker, 2, f"{prefix}.b"), numbered(20))
        wait_for("the second topic", lambda: len(parquet_rows(copy)) == 30, DEADLINE_S)
        last = wait_for("progress", lambda: query.lastProgress)
        assert progress.Position.from_json(last["sources"][0]["endOffset"]).ids
        assert f"{prefix}.a" in progress.Position.from_json(last["sources"][0]["latestOffset"]).ids
    finally:
        query.stop()
    assert copy.rows() == rows_of(broker, f"{prefix}.a", f"{prefix}.b")
    group = progress.default_group_id(Topics(pattern=f"{prefix}[.].*"), prefix)
    assert progress.commit_last(query, broker.bootstrap, group)
    assert lag(broker, group) == 0


def parquet_rows(copy: Copy) -> list[Any]:
    try:
        return copy.rows()
    except PySparkException:
        return []


@proves("S2")
def test_a_topic_made_anew_is_noticed_after_a_restart(
    spark: SparkSession, broker: Broker, tmp_path: Path, driver_log: Path
) -> None:
    topic = create_topic(broker)
    send(broker, topic, numbered(5))
    copy = Copy(spark, broker, tmp_path, subscribe=topic)
    assert len(copy.run()) == 1
    delete_topic(broker, topic)
    deleted = f"topic '{topic}' was deleted; the query was at offsets {{0: 5}}"
    assert deleted in copy.fails()
    create_topic(broker, 1, topic)
    send(broker, topic, numbered(8, first=100))
    told = f"topic '{topic}' was deleted and created again"
    assert told in copy.fails()
    copy.run(failOnDataLoss=False)
    assert f"headrace: data loss: {told}" in driver_log.read_text()
    assert sorted(row[4] for row in copy.rows()) == sorted(
        [b"v%d" % n for n in range(5)] + [b"v%d" % n for n in range(100, 108)]
    )
    assert copy.run() == []


@proves("S2")
def test_a_topic_made_anew_that_ends_where_the_old_one_did_is_read(broker: Broker) -> None:
    topic = create_topic(broker)
    send(broker, topic, numbered(5))
    given = {"bootstrap": broker.bootstrap, "subscribe": topic, "startingOffsets": "earliest"}
    reader = StreamReader(options.parse({**given, "failOnDataLoss": "false"}, streaming=True))
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    delete_topic(broker, topic)
    create_topic(broker, 1, topic)
    send(broker, topic, numbered(5, first=100))
    anew = reader.latestOffset(end, ReadAllAvailable())
    assert anew[topic] == end[topic]
    rows = [batch for split in reader.partitions(end, anew) for batch in reader.read(split)]
    assert [value for batch in rows for value in batch["value"].to_pylist()] == [b"v%d" % n for n in range(100, 105)]
    assert reader.latestOffset(anew, ReadAllAvailable()) == anew


@proves("S2")
def test_retention_that_overtakes_a_query_fails_it_or_is_told_and_counted(
    spark: SparkSession, broker: Broker, tmp_path: Path, driver_log: Path
) -> None:
    topic = create_topic(broker)
    send(broker, topic, numbered(10))
    copy = Copy(spark, broker, tmp_path, subscribe=topic)
    copy.run()
    send(broker, topic, numbered(20, first=10))
    with Cluster(broker.bootstrap) as cluster:
        delete_records(cluster, topic, {0: 17})
    told = f"{topic}-0: offsets 10 to 16 were deleted before they were read; the log begins at 17"
    failure = copy.fails()
    assert told in failure
    assert "set option failOnDataLoss to false" in failure
    (batch,) = copy.run(failOnDataLoss=False)
    assert f"headrace: data loss: {told}" in driver_log.read_text()
    assert progress.Position.from_json(batch["sources"][0]["endOffset"]).lost == {(topic, 0): 7}
    assert offsets(copy.rows()) == [(0, n) for n in (*range(10), *range(17, 30))]
    send(broker, topic, numbered(1))
    assert len(copy.run()) == 1, "what was lost before is not lost again"


@proves("S2")
@pytest.mark.parametrize("fail", [True, False])
def test_retention_that_overtakes_a_task_in_the_middle(
    spark: SparkSession, broker: Broker, driver_log: Path, fail: bool
) -> None:
    """Between planning and reading, which is when a frame is used a second time."""
    topic = create_topic(broker)
    send(broker, topic, numbered(10))
    load = spark.read.format("headrace").option("bootstrap", broker.bootstrap).option("failOnDataLoss", str(fail))
    frame = load.option("subscribe", topic).load()
    assert frame.count() == 10
    with Cluster(broker.bootstrap) as cluster:
        delete_records(cluster, topic, {0: 6})
    told = f"{topic}-0: offsets 0 to 5 were deleted before they were read; the log begins at 6"
    if fail:
        with pytest.raises(PySparkException, match=told):
            frame.collect()
    else:
        assert [row["offset"] for row in frame.select("offset").collect()] == [6, 7, 8, 9]
        wait_for("the warning", lambda: f"headrace: data loss: {told}" in driver_log.read_text())


@proves("S2")
def test_a_task_says_where_the_log_begins_and_ends(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = create_topic(broker)
    send(broker, topic, numbered(10))
    with Cluster(broker.bootstrap) as cluster:
        topic_id = cluster.topic(topic).topic_id.hex()
    given = {"bootstrap": broker.bootstrap, "subscribe": topic, "columns": "offset", "failOnDataLoss": "false"}
    reading = options.parse(given, streaming=True)

    def read(next_offset: int) -> list[int]:
        rows = split_reader.read(reading, Split(topic, 0, 0, next_offset, topic_id))
        return [offset for batch in rows for offset in batch["offset"].to_pylist()]

    assert read(20) == list(range(10))
    assert f"{topic}-0: offsets 10 to 19 are gone; the log was cut off" in caplog.text
    with Cluster(broker.bootstrap) as cluster:
        delete_records(cluster, topic, {0: 8})
    assert read(5) == []
    assert f"{topic}-0: offsets 0 to 4 were deleted before they were read; the log begins at 8" in caplog.text
    assert read(10) == [8, 9]
    caplog.clear()

    def refusing(*_: object) -> NoReturn:
        raise Refusal(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "as from a broker that has just started")

    monkeypatch.setattr(split_reader, "record_sets", refusing)
    with pytest.raises(Refusal, match="just started"):
        read(10)
    assert "cut off" not in caplog.text


@proves("S2")
def test_a_batch_waits_for_enough_records_but_not_for_ever(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    topic = create_topic(broker)
    send(broker, topic, numbered(5))
    copy = Copy(spark, broker, tmp_path, subscribe=topic, minOffsetsPerTrigger=50, maxTriggerDelay="1h")
    query = copy.start(available_now=False)
    try:
        wait_for("the first batch, which does not wait", lambda: len(parquet_rows(copy)) == 5, DEADLINE_S)
        send(broker, topic, numbered(30))
        send(broker, topic, numbered(30))
        wait_for("a batch of both", lambda: len(parquet_rows(copy)) == 65, DEADLINE_S)
        sizes = [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]]
        assert sizes == [5, 60]
    finally:
        query.stop()
    send(broker, topic, numbered(3))
    assert [each["numInputRows"] for each in copy.run()] == [3], "what is there is read, however little"


@proves("S2")
def test_a_query_outlives_a_killed_broker(
    spark: SparkSession, fresh_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = fresh_broker()
    topic = create_topic(broker, partitions=2)
    send(broker, topic, numbered(50))
    copy = Copy(spark, broker, tmp_path, subscribe=topic)
    query = copy.start(available_now=False)
    try:
        wait_for("the first records", lambda: len(parquet_rows(copy)) == 50, DEADLINE_S)
        broker.restart(clean=False)
        send(broker, topic, numbered(50))
        wait_for("the others", lambda: len(parquet_rows(copy)) == 100, DEADLINE_S)
        assert query.exception() is None
    finally:
        query.stop()
    assert copy.rows() == rows_of(broker, topic)


@proves("S2")
def test_a_checkpoint_of_sparks_kafka_source_is_taken_over(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    topic = create_topic(broker, partitions=2)
    send(broker, topic, [{"value": b"%d" % n, "partition": n % 2} for n in range(20)])
    copy = Copy(spark, broker, tmp_path, subscribe=topic)
    copy.run()
    (log,) = (tmp_path / "checkpoint" / "offsets").glob("0")
    version, state, _ = log.read_text().splitlines()
    log.write_text("\n".join([version, state, json.dumps({topic: {"0": 4, "1": 10}}, separators=(",", ":"))]))
    for checksum in log.parent.glob(".*.crc"):
        checksum.unlink()
    send(broker, topic, [{"value": b"more", "partition": 1}])
    (batch,) = copy.run()
    assert batch["numInputRows"] == 7


def test_a_failing_commit_does_not_fail_the_query(
    spark: SparkSession, broker: Broker, tmp_path: Path, driver_log: Path
) -> None:
    from confluent_kafka import Consumer

    topic = create_topic(broker)
    send(broker, topic, numbered(5))
    group = f"busy-{topic}"
    member = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group, "auto.offset.reset": "latest"})
    member.subscribe([topic])
    wait_for("a member of the group", lambda: member.poll(0.1) or member.assignment(), DEADLINE_S)
    copy = Copy(spark, broker, tmp_path, subscribe=topic)
    copy.options["kafka.group.id"] = group
    try:
        assert [each["numInputRows"] for each in copy.run()] == [5]
    finally:
        member.close()
    assert f"headrace: progress of group {group} was not committed" in driver_log.read_text()
