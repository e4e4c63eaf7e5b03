"""The driver of test_standalone.py: a process of its own, because a JVM belongs to one master.

Reads a topic and its data folder on the executors, then the topic again while one of them is killed, and writes what
it found as JSON to a file. Run as `python standalone_driver.py MASTER BOOTSTRAP TOPIC DATA RESULT`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

import headrace
from headrace.spark import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Processes that live for seconds are not worth the optimising compiler.
SHORT_LIVED = os.environ.get("SPARK_SUBMIT_OPTS") or "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""`make test` has options of its own, with which JVMs start sooner (tools/spark_classes.py)."""
SETTINGS = {
    "spark.driver.extraJavaOptions": SHORT_LIVED,
    "spark.executor.extraJavaOptions": SHORT_LIVED,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.sql.shuffle.partitions": "2",
    # Both executors have to be there before the first task is given to one.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
}
COLUMNS = "partition,offset,digest"
WITH_EXECUTOR = "partition int, offset long, digest long, executor string, package string"


def main(master: str, bootstrap: str, topic: str, data: str, result: str) -> None:
    spark = session.start("headrace-standalone", master, SETTINGS)
    options = {"kafka.bootstrap.servers": bootstrap, "subscribe": topic, "columns": COLUMNS, "minPartitions": "8"}
    topic_rows = spark.read.format("headrace").options(**options).load()
    folder_rows = spark.read.format("headrace-log").options(topic=topic, columns=COLUMNS).load(data)
    marker = f"{result}.killed"
    found = {
        "tasks": topic_rows.rdd.getNumPartitions(),
        "topic": rows(topic_rows.mapInArrow(with_executor, WITH_EXECUTOR)),
        "folder": rows(folder_rows),
        "killed": rows(topic_rows.mapInArrow(lambda batches: killing(batches, marker), topic_rows.schema)),
        "victim": Path(marker).read_text(),
    }
    Path(result).write_text(json.dumps(found))
    spark.stop()


def rows(frame: DataFrame) -> list[list[object]]:
    return [list(row) for row in frame.collect()]


def with_executor(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows with the executor that read them and where it has the package from."""
    # An executor works in a folder that is named by its id.
    told = {"executor": Path.cwd().name, "package": str(headrace.__file__)}
    for batch in batches:
        for name, value in told.items():
            batch = batch.append_column(name, pa.repeat(pa.scalar(value), len(batch)))
        yield batch


def killing(batches: Iterator[pa.RecordBatch], marker: str) -> Iterator[pa.RecordBatch]:
    """The same rows; the first task that has handed some on kills its executor before it hands on the rest."""
    for batch in batches:
        yield batch.slice(0, 1)
        try:
            with Path(marker).open("x") as file:
                file.write(Path.cwd().name)
        except FileExistsError:
            yield batch.slice(1)
            continue
        os.kill(executor_pid(), signal.SIGKILL)
        signal.pause()  # the worker ends with its executor


def executor_pid() -> int:
    """The JVM above this Python worker."""
    pid = os.getpid()
    while b"CoarseGrainedExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


if __name__ == "__main__":
    main(*sys.argv[1:])
