"""Topics as a sink: what is written is what another client reads; what cannot be written is told before anything is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from brokers import Broker
from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.errors import NoBroker
from headrace.spark import sink
from proving import proves
from spark.confluent_rows import create_topic, odd_records, rows_of, send

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.readwriter import DataFrameWriter

START_MS = 1_700_000_000_000


def writer(broker: Broker, frame: DataFrame, **given: str) -> DataFrameWriter:
    named = {"kafka.bootstrap.servers": broker.bootstrap} | given
    return frame.write.format("headrace").options(**named).mode("append")


def test_rows_arrive_with_key_headers_partition_and_time(spark: SparkSession, broker: Broker) -> None:
    first, second = create_topic(broker, partitions=3), create_topic(broker, partitions=3)
    rows = [
        (first, b"k", "text", [("a", b"1"), ("b", None)], 2, START_MS, 1),
        (first, None, None, None, 0, START_MS + 1, 2),
        (second, b"", "", [], 1, START_MS + 2, 3),
    ]
    schema = (
        "topic string, key binary, value string, headers array<struct<key: string, value: binary>>, partition int, "
        "at long, more int"
    )
    frame = spark.createDataFrame(rows, schema).withColumn("timestamp", f.timestamp_millis("at")).drop("at")
    writer(broker, frame, **{"kafka.compression.type": "lz4"}).save()
    assert rows_of(broker, first) == [
        (first, 0, 0, None, None, None, START_MS + 1, 0),
        (first, 2, 0, b"k", b"text", (("a", b"1"), ("b", None)), START_MS, 0),
    ]
    assert rows_of(broker, second) == [(second, 1, 0, b"", b"", None, START_MS + 2, 0)]


def test_tasks_with_few_rows_and_no_key_fill_more_than_one_partition(spark: SparkSession, broker: Broker) -> None:
    topic = create_topic(broker, partitions=4)
    writer(broker, spark.range(0, 900, 1, 16).selectExpr("cast(id as string) as value"), topic=topic).save()
    rows = rows_of(broker, topic)
    assert sorted(int(row[4]) for row in rows) == list(range(900))
    assert len({row[1] for row in rows}) > 1


def test_a_topic_is_a_table_of_the_catalog(spark: SparkSession, broker: Broker) -> None:
    topic, name = create_topic(broker, partitions=2), "topic_as_table"
    given = f"bootstrap '{broker.bootstrap}', subscribe '{topic}'"
    spark.sql(f"CREATE TABLE {name} USING headrace OPTIONS ({given}, kafka.compression.type 'lz4') COMMENT 'orders'")
    try:
        spark.sql(f"INSERT INTO {name} (key, value) VALUES (cast('k' as binary), cast('one' as binary))")
        assert [(row[3], row[4]) for row in rows_of(broker, topic)] == [(b"k", b"one")]
        spark.sql(f"INSERT INTO {name} (value) VALUES (cast('two' as binary))")
        query = f"SELECT cast(value as string) FROM {name} ORDER BY value"
        assert [row[0] for row in spark.sql(query).collect()] == ["one", "two"]
        later = f"SELECT count(*) FROM {name} WITH ('startingOffsets' = 'latest')"
        assert spark.sql(later).collect()[0][0] == 0
    finally:
        spark.sql(f"DROP TABLE {name}")
    with pytest.raises(PySparkException, match="unknown option 'subscrib'; did you mean subscribe"):
        spark.sql(f"CREATE TABLE {name} USING headrace OPTIONS (bootstrap '{broker.bootstrap}', subscrib 'x')")


def test_keys_choose_partitions_as_kafkas_clients_do(spark: SparkSession, broker: Broker) -> None:
    topic = create_topic(broker, partitions=5)
    frame = spark.range(2000).selectExpr("cast(id % 50 as string) as key", "cast(id as string) as value")
    writer(broker, frame, topic=topic).save()
    rows = rows_of(broker, topic)
    assert sorted(int(row[4]) for row in rows) == list(range(2000))
    where = {row[3]: row[1] for row in rows}
    assert all(where[row[3]] == row[1] for row in rows)
    assert len(set(where.values())) == 5


def test_a_stream_from_topic_to_topic(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    source, target = create_topic(broker, partitions=2), create_topic(broker, partitions=2)
    writer(broker, spark.range(500).selectExpr("cast(id as string) as value"), topic=source).save()
    read = spark.readStream.format("headrace").option("kafka.bootstrap.servers", broker.bootstrap)
    stream = read.option("subscribe", source).option("startingOffsets", "earliest").load()
    changed = stream.selectExpr("key", "concat('out ', cast(value as string)) as value")
    for _ in range(2):
        write = changed.writeStream.format("headrace").option("kafka.bootstrap.servers", broker.bootstrap)
        write = write.option("topic", target).option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert write.queryName("changed").trigger(availableNow=True).start().awaitTermination(120)
    assert sorted(row[4] for row in rows_of(broker, target)) == sorted(b"out %d" % n for n in range(500))


@proves("S3")
def test_a_stream_needs_a_topic_and_a_checkpoint_and_nothing_else(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    """But the address of a broker that is not where one is by default; and a frame of the source goes as it is."""
    assert sink.parse({"topic": "t"}, streaming=True).bootstrap == DEFAULT_BOOTSTRAP
    source, target = create_topic(broker, partitions=2), create_topic(broker, partitions=2)
    send(broker, source, odd_records())
    read = spark.readStream.format("headrace").option("bootstrap", broker.bootstrap).option("subscribe", source)
    rows = read.option("startingOffsets", "earliest").option("includeHeaders", "true").load()
    write = rows.writeStream.format("headrace").option("bootstrap", broker.bootstrap)
    write = write.option("topic", target).option("checkpointLocation", str(tmp_path))
    assert write.trigger(availableNow=True).start().awaitTermination(120)
    assert [(row[1], *row[3:7]) for row in rows_of(broker, target)] == [
        (row[1], *row[3:7]) for row in rows_of(broker, source)
    ]


@pytest.mark.parametrize(
    ("columns", "given", "told"),
    [
        ("id as key", {"topic": "TOPIC"}, "there is no column 'value' to write, only key"),
        ("id as value", {"topic": "TOPIC"}, "column 'value' is bigint; to be written it has to be string or binary"),
        ("'x' as value", {}, "no topic to write to: set option topic, or have a column 'topic'"),
        ("'x' as value, id as partition", {"topic": "TOPIC"}, "column 'partition' is bigint; to be written it has"),
        ("'x' as value", {"topik": "TOPIC"}, "unknown option 'topik'; did you mean topic?"),
    ],
)
def test_a_wrong_schema_is_told_and_nothing_written(
    spark: SparkSession, broker: Broker, columns: str, given: dict[str, str], told: str
) -> None:
    topic = create_topic(broker)
    frame = spark.range(3).selectExpr(*columns.split(", "))
    with pytest.raises(PySparkException) as error:
        writer(broker, frame, **{name: value.replace("TOPIC", topic) for name, value in given.items()}).save()
    assert told in str(error.value)
    assert rows_of(broker, topic) == []


def test_rows_that_cannot_be_placed_are_told(spark: SparkSession, broker: Broker) -> None:
    topic = create_topic(broker, partitions=2)
    with pytest.raises(PySparkException, match="partition 7"):
        writer(broker, spark.sql("select 'x' as value, 7 as partition"), topic=topic).save()
    with pytest.raises(PySparkException, match="a row has a null topic"):
        writer(broker, spark.sql("select 'x' as value, cast(null as string) as topic")).save()
    with pytest.raises(PySparkException, match="a topic cannot be overwritten"):
        writer(broker, spark.sql("select 'x' as value"), topic=topic).mode("overwrite").save()


def test_a_task_waits_for_a_broker_that_restarts(fresh_broker: Callable[..., Broker]) -> None:
    broker = fresh_broker()
    topic = create_topic(broker)
    chosen = sink.parse({"bootstrap": broker.bootstrap, "topic": topic})
    rows = pa.RecordBatch.from_pydict({"value": [b"a", b"b"]})
    broker.kill()
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(sink.write, chosen, iter([rows]))
        broker.start()
        assert written.result(60).rows == 2
    assert [row[4] for row in rows_of(broker, topic)] == [b"a", b"b"]
    broker.kill()
    with pytest.raises(NoBroker, match="tried for"):
        sink.write(sink.parse({"bootstrap": broker.bootstrap, "topic": topic, "timeout": "200ms"}), iter([rows]))
