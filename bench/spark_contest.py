"""The driver that bench/spark_rows.py starts for one size and one master: contestants take turns in one session.

Every contestant hands all rows, with all columns, to Spark's noop sink, or to a table where it says so; those that
write to a topic take key and value of the Parquet files to a topic of their own. Each first
reads the tenth that warms the session up, then a few rows some times for its fixed costs, then takes its rounds.
"""

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.pipelines import archive
from headrace.pipelines.table_sink import TableSink
from headrace.records.arrow import BATCH_ROWS
from headrace.spark import session

SCHEMA = "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int"
PIECE_ROWS = 100_000
FEW_ROUNDS = 3
WRITTEN_PARTITIONS = 4


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
        for nth in range(0, self.rows // self.splits, count):
            yield made.slice(0, min(count, self.rows // self.splits - nth))


def to_noop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def topic_frame(spark: SparkSession, form: str, bootstrap: str, topic: str) -> DataFrame:
    reader = spark.read.format(form).option("kafka.bootstrap.servers", bootstrap).option("subscribe", topic)
    return reader.option("startingOffsets", "earliest").load()


def confluent_loop(spark: SparkSession, bootstrap: str, wanted: dict[str, Any]) -> None:
    """What people do without a source: consume in the driver, make frames of the pieces."""
    from confluent_kafka import Consumer

    topic, rows = wanted["topic"], wanted["rows"]
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


@dataclass(frozen=True, slots=True)
class Contestant:
    """What it does with one of the sets of rows, and the broker whose processor time is its own."""

    run: Callable[[dict[str, Any]], None]
    broker: str = ""
    which: str = "all"
    """The slow ones are measured with the set that others warm up with."""
    quick: bool = False
    """Worth several rounds."""


def contestants(spark: SparkSession, setup: dict[str, Any]) -> dict[str, Contestant]:
    bootstraps = setup["bootstraps"]
    headrace = bootstraps["headrace"]
    splits = 2 * spark.sparkContext.defaultParallelism
    table = Path(setup["folder"]) / "delta"

    def source(rows: dict[str, Any]) -> DataFrame:
        return topic_frame(spark, "headrace", headrace, rows["topic"])

    def scan(rows: dict[str, Any]) -> DataFrame:
        return spark.read.parquet(rows["parquet"])

    def prebuilt(rows: dict[str, Any]) -> DataFrame:
        reader = spark.read.format("prebuilt")
        return reader.options(rows=rows["rows"], size=setup["size_bytes"], splits=splits).load()

    def connector(rows: dict[str, Any], broker: str) -> DataFrame:
        return topic_frame(spark, "kafka", bootstraps[broker], rows["topic"])

    def to_delta(frame: DataFrame) -> None:
        shutil.rmtree(table, ignore_errors=True)
        sink = TableSink(table, "bench", ())
        sink.prepare(spark, frame.schema)
        sink.write(frame, 0)

    def to_archive(rows: dict[str, Any]) -> None:
        shutil.rmtree(table, ignore_errors=True)
        group = f"bench-{time.time_ns()}"
        archive.run(spark, archive.ArchiveOptions(to=table, bootstrap=headrace, topics=(rows["topic"],), group=group))

    def to_topic(rows: dict[str, Any], form: str, broker: str, **given: str) -> None:
        topic, bootstrap = f"written-{time.time_ns()}", bootstraps[broker]
        with Cluster(bootstrap) as cluster:
            operations.create_topic(cluster, topic, partitions=WRITTEN_PARTITIONS)
            wanted = {"kafka.bootstrap.servers": bootstrap, "topic": topic, **given}
            scan(rows).select("key", "value").write.format(form).options(**wanted).mode("append").save()
            operations.delete_topic(cluster, topic)

    found = {
        "parquet scan": Contestant(lambda rows: to_noop(scan(rows)), quick=True),
        "headrace source": Contestant(lambda rows: to_noop(source(rows)), "headrace", quick=True),
        "prebuilt Arrow": Contestant(lambda rows: to_noop(prebuilt(rows)), quick=True),
        "parquet scan -> Delta": Contestant(lambda rows: to_delta(scan(rows))),
        "headrace source -> Delta": Contestant(lambda rows: to_delta(source(rows)), "headrace"),
        "headrace archive -> Delta": Contestant(to_archive, "headrace"),
        "parquet scan -> topic": Contestant(
            lambda rows: to_topic(rows, "headrace", "headrace", delivery="exactly-once"), "headrace", quick=True
        ),
        "parquet scan -> topic, at least once": Contestant(
            lambda rows: to_topic(rows, "headrace", "headrace", delivery="at-least-once"), "headrace", quick=True
        ),
        "confluent loop": Contestant(lambda rows: confluent_loop(spark, headrace, rows), "headrace", "warm"),
    }
    if setup["jars"]:
        for broker in bootstraps:
            found[f"Spark's Kafka connector on {broker}"] = Contestant(
                lambda rows, broker=broker: to_noop(connector(rows, broker)),  # type: ignore[misc]
                broker,
            )
            found[f"parquet scan -> topic, Spark's Kafka connector on {broker}"] = Contestant(
                lambda rows, broker=broker: to_topic(rows, "kafka", broker),  # type: ignore[misc]
                broker,
                quick=True,
            )
    return {name: entry for name, entry in found.items() if not setup["only"] or name in setup["only"]}


def check_rows(spark: SparkSession, setup: dict[str, Any]) -> None:
    """A contestant that reads less than all would look fast."""
    rows = setup["sets"]["warm"]
    for name, bootstrap in setup["bootstraps"].items():
        form = "headrace" if name == "headrace" else "kafka"
        found = topic_frame(spark, form, bootstrap, rows["topic"]).count()
        if found != rows["rows"]:
            raise SystemExit(f"{name} has {found} rows of {rows['topic']}, not {rows['rows']}")


@dataclass(frozen=True, slots=True)
class Clocks:
    """Processor time of all that has to do with a driver, by who used it."""

    jvm: float
    python: dict[int, float]
    """By process. PySpark's daemon does not wait for its workers: the time of one that has ended is nowhere any more,
    also what it used before. So only those that live are compared; idle ones are what Spark ends."""
    broker: float
    machine: float

    @classmethod
    def now(cls, broker_pid: int | None) -> "Clocks":
        tree = processes.process_tree(os.getpid())
        java = [pid for pid in tree if is_java(pid)]
        jvm = sum(processes.own_cpu_seconds(pid) for pid in java)
        python = {pid: processes.own_cpu_seconds(pid) for pid in tree if pid not in java}
        python |= {-pid: processes.ended_children_cpu_seconds(pid) for pid in tree}
        broker = processes.cpu_seconds(broker_pid) if broker_pid else 0.0
        return cls(jvm, python, broker, processes.machine_cpu_seconds())

    def since(self, before: "Clocks") -> dict[str, float]:
        python = sum(spent - before.python.get(pid, 0.0) for pid, spent in self.python.items())
        return {"jvm": self.jvm - before.jvm, "python": python, "broker": self.broker - before.broker}


def is_java(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "java"
    except OSError:
        return False


def measure(contestant: Contestant, rows: dict[str, Any], setup: dict[str, Any]) -> dict[str, float]:
    broker_pid = setup["broker_pids"].get(contestant.broker)
    before = Clocks.now(broker_pid)
    began = time.monotonic()
    contestant.run(rows)
    took_s = time.monotonic() - began
    after = Clocks.now(broker_pid)
    used = after.since(before)
    others = after.machine - before.machine - sum(used.values())
    return {
        "rows_per_s": rows["rows"] / took_s,
        "took_s": took_s,
        "cpu_s_per_million": sum(used.values()) / rows["rows"] * 1e6,
        **{f"{name}_cpu_s_per_million": spent / rows["rows"] * 1e6 for name, spent in used.items()},
        "others_cpu_percent": max(0.0, others) / took_s / (os.cpu_count() or 1) * 100,
    }


def take_turns(setup: dict[str, Any], entries: dict[str, Contestant]) -> list[dict[str, Any]]:
    deadline = time.monotonic() + setup["within_s"]
    sets = setup["sets"]
    fixed: dict[str, list[float]] = {}
    rounds: dict[str, list[dict[str, float]]] = {}
    for name, entry in entries.items():
        measure(entry, sets["warm"], setup)
        fixed[name] = [measure(entry, sets["few"], setup)["took_s"] for _ in range(FEW_ROUNDS if entry.quick else 1)]
        print(f"  {name}: {min(fixed[name]):.2f} s for a few rows", flush=True)
    for nth in range(setup["rounds"]):
        for name, entry in entries.items():
            longest_s = max((each["took_s"] for each in rounds.get(name, [])), default=0.0)
            if nth and (not entry.quick or time.monotonic() + longest_s > deadline):
                continue
            figures = measure(entry, sets[entry.which], setup)
            rounds.setdefault(name, []).append(figures)
            print(f"  round {nth} {name}: {figures['rows_per_s'] / 1e6:.2f} Mrows/s", flush=True)
    return [summary(setup, name, entries[name], fixed[name], taken) for name, taken in rounds.items()]


def summary(
    setup: dict[str, Any], name: str, entry: Contestant, fixed: list[float], taken: list[dict[str, float]]
) -> dict[str, Any]:
    medians = {key: statistics.median(each[key] for each in taken) for key in taken[0]}
    rows, fixed_s = setup["sets"][entry.which]["rows"], statistics.median(fixed)
    return {
        "contestant": name,
        "master": setup["master"],
        "size_bytes": setup["size_bytes"],
        "rows": rows,
        "rounds": len(taken),
        "fixed_s": fixed_s,
        "steady_rows_per_s": rows / max(1e-3, medians["took_s"] - fixed_s),
        **medians,
    }


def main() -> None:
    setup = json.loads(Path(sys.argv[1]).read_text())
    settings = {"spark.driver.memory": "3g", "spark.sql.shuffle.partitions": "4", **setup["conf"]}
    if setup["jars"]:
        settings["spark.jars"] = ",".join(setup["jars"])
    spark = session.start("bench", setup["master"], settings)
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(Prebuilt)
    check_rows(spark, setup)
    figures = take_turns(setup, contestants(spark, setup))
    Path(sys.argv[2]).write_text(json.dumps(figures))
    spark.stop()


if __name__ == "__main__":
    main()
