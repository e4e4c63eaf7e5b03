"""The driver that bench/spark_rows.py starts for one size and one master: contestants take turns in one session.

Every contestant hands all rows, with all columns, to Spark's noop sink, or to a table where it says so. The first
round warms the session up and is not counted.
"""

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import processes
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headrace.records.arrow import BATCH_ROWS
from headrace.spark import session
from headrace.spark.pipelines import archive
from headrace.spark.table_sink import TableSink

SCHEMA = "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int"
SLOW_SHARE = 0.1
PIECE_ROWS = 100_000


class Prebuilt(DataSource):
    """One Arrow batch made beforehand, handed out again and again: what a Python source can reach at best."""

    @classmethod
    def name(cls) -> str:
        return "prebuilt"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return PrebuiltReader(int(self.options["rows"]), int(self.options["size"]), int(self.options["splits"]))


class PrebuiltReader(DataSourceReader):
    def __init__(self, rows: int, size_bytes: int, splits: int) -> None:
        self.rows, self.size_bytes, self.splits = rows, size_bytes, splits

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(nth) for nth in range(self.splits)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        count = BATCH_ROWS
        made = pa.RecordBatch.from_arrays(
            [
                pa.array([b"key-00001"] * count, pa.binary()),
                pa.array([b"v" * self.size_bytes] * count, pa.binary()),
                pa.array(["rows"] * count, pa.string()),
                pa.array([0] * count, pa.int32()),
                pa.array(range(count), pa.int64()),
                pa.array([0] * count, pa.timestamp("us", tz="UTC")),
                pa.array([0] * count, pa.int32()),
            ],
            names=["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"],
        )
        for _ in range(self.rows // self.splits // count):
            yield made


def to_noop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def topic_frame(spark: SparkSession, form: str, bootstrap: str, topic: str) -> DataFrame:
    reader = spark.read.format(form).option("kafka.bootstrap.servers", bootstrap).option("subscribe", topic)
    return reader.option("startingOffsets", "earliest").load()


def confluent_loop(spark: SparkSession, bootstrap: str, topic: str, rows: int) -> None:
    """What people do without a source: consume in the driver, make frames of the pieces."""
    from confluent_kafka import Consumer

    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": f"loop-{time.time()}", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    read = 0
    while read < rows:
        piece: list[tuple[Any, ...]] = []
        while len(piece) < min(PIECE_ROWS, rows - read):
            for message in consumer.consume(10_000, 0.05):
                kind, at_ms = message.timestamp()
                piece.append(
                    (message.key(), message.value(), topic, message.partition(), message.offset(), at_ms, kind - 1)
                )
        columns = list(zip(*piece, strict=True))
        made = pa.table(
            [
                pa.array(columns[0], pa.binary()),
                pa.array(columns[1], pa.binary()),
                pa.array(columns[2], pa.string()),
                pa.array(columns[3], pa.int32()),
                pa.array(columns[4], pa.int64()),
                pa.array(columns[5], pa.timestamp("ms", tz="UTC")).cast(pa.timestamp("us", tz="UTC")),
                pa.array(columns[6], pa.int32()),
            ],
            names=["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"],
        )
        to_noop(spark.createDataFrame(made, schema=SCHEMA))
        read += len(piece)
    consumer.close()


Contestants = dict[str, tuple[Callable[[], None], float, str]]
"""Name to what it does, its share of the rows, and the broker whose processor time is its own."""


def contestants(spark: SparkSession, setup: dict[str, Any]) -> Contestants:
    bootstraps, topic, rows = setup["bootstraps"], setup["topic"], setup["rows"]
    headrace = bootstraps["headrace"]
    splits = 2 * spark.sparkContext.defaultParallelism
    parquet = spark.read.parquet(setup["parquet"])
    prebuilt = spark.read.format("prebuilt").options(rows=rows, size=setup["size_bytes"], splits=splits).load()
    table = Path(setup["folder"]) / "delta"

    def to_delta(frame: DataFrame) -> None:
        shutil.rmtree(table, ignore_errors=True)
        sink = TableSink(table, "bench", ())
        sink.prepare(spark, frame.schema)
        sink.write(frame, 0)

    def to_archive() -> None:
        shutil.rmtree(table, ignore_errors=True)
        archive.run(
            spark, archive.Options(to=table, bootstrap=headrace, topics=(topic,), group=f"bench-{time.time_ns()}")
        )

    found: Contestants = {
        "headrace source": (lambda: to_noop(topic_frame(spark, "headrace", headrace, topic)), 1.0, "headrace"),
        "parquet scan": (lambda: to_noop(parquet), 1.0, ""),
        "prebuilt Arrow": (lambda: to_noop(prebuilt), 1.0, ""),
        "confluent loop": (
            lambda: confluent_loop(spark, headrace, topic, int(rows * SLOW_SHARE)),
            SLOW_SHARE,
            "headrace",
        ),
        "headrace source -> Delta": (
            lambda: to_delta(topic_frame(spark, "headrace", headrace, topic)),
            1.0,
            "headrace",
        ),
        "headrace archive -> Delta": (to_archive, 1.0, "headrace"),
        "parquet scan -> Delta": (lambda: to_delta(parquet), 1.0, ""),
    }
    if setup["jars"]:
        found["Spark's Kafka connector on headrace"] = (
            lambda: to_noop(topic_frame(spark, "kafka", headrace, topic)),
            1.0,
            "headrace",
        )
    if setup["jars"] and "kafka" in bootstraps:
        found["Spark's Kafka connector on kafka"] = (
            lambda: to_noop(topic_frame(spark, "kafka", bootstraps["kafka"], topic)),
            1.0,
            "kafka",
        )
    return {name: entry for name, entry in found.items() if not setup["only"] or name in setup["only"]}


def check_rows(spark: SparkSession, setup: dict[str, Any]) -> None:
    """A contestant that reads less than all would look fast."""
    for name, bootstrap in setup["bootstraps"].items():
        form = "headrace" if name == "headrace" else "kafka"
        found = topic_frame(spark, form, bootstrap, setup["topic"]).count()
        if found != setup["rows"]:
            raise SystemExit(f"{name} has {found} rows, not {setup['rows']}")


def measure(run: Callable[[], None], rows: float, broker_pid: int | None) -> dict[str, float]:
    driver, whole = processes.cpu_seconds(os.getpid()), processes.machine_cpu_seconds()
    broker = processes.cpu_seconds(broker_pid) if broker_pid else 0.0
    began = time.monotonic()
    run()
    took_s = time.monotonic() - began
    used = processes.cpu_seconds(os.getpid()) - driver
    served = processes.cpu_seconds(broker_pid) - broker if broker_pid else 0.0
    others = processes.machine_cpu_seconds() - whole - used - served
    return {
        "rows_per_s": rows / took_s,
        "cpu_s_per_million": (used + served) / rows * 1e6,
        "broker_cpu_s_per_million": served / rows * 1e6,
        "others_cpu_percent": max(0.0, others) / took_s / (os.cpu_count() or 1) * 100,
    }


def main() -> None:
    setup = json.loads(Path(sys.argv[1]).read_text())
    settings = {"spark.driver.memory": "3g", "spark.sql.shuffle.partitions": "4"}
    if setup["jars"]:
        settings["spark.jars"] = ",".join(setup["jars"])
    spark = session.start("bench", setup["master"], settings)
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(Prebuilt)
    check_rows(spark, setup)
    rounds: dict[str, list[dict[str, float]]] = {}
    entries = contestants(spark, setup)
    for nth in range(setup["rounds"] + 1):
        for name, (run, share, broker) in entries.items():
            figures = measure(run, setup["rows"] * share, setup["broker_pids"].get(broker))
            if nth:
                rounds.setdefault(name, []).append(figures)
            print(f"  round {nth} {name}: {figures['rows_per_s'] / 1e6:.2f} Mrows/s", flush=True)
    medians = [
        {
            "contestant": name,
            "master": setup["master"],
            "size_bytes": setup["size_bytes"],
            **{key: statistics.median(each[key] for each in taken) for key in taken[0]},
        }
        for name, taken in rounds.items()
    ]
    Path(sys.argv[2]).write_text(json.dumps(medians))
    spark.stop()


if __name__ == "__main__":
    main()
