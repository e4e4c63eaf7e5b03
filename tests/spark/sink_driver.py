"""The driver of test_sink_exactly_once.py: a stream from a topic to a topic, through Arrow, in batches of some size.

Run as `python sink_driver.py MASTER BOOTSTRAP SOURCE TARGET CHECKPOINT ROWS [follow | speculate]`; without `follow` it
ends when all is written that is there now. With `speculate` the first attempt at a task of each batch never ends.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext

from headrace.spark import session
from spark.standalone import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

COLUMNS = "key binary, value binary"
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "100ms",
    # Rows reach the sink before the task is done.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
}


def copy(
    spark: SparkSession,
    bootstrap: str,
    source: str,
    target: str,
    checkpoint: Path,
    rows: int,
    *,
    stuck: bool = False,
    speculate: bool = False,
) -> DataStreamWriter:
    """A stream that writes what it reads. One task fails once, after it has handed on what it had; or, `stuck`, none
    ever ends; or some of them not their first attempts."""
    options = {"bootstrap": bootstrap, "subscribe": source, "startingOffsets": "earliest", "columns": "key,value"}
    read = spark.readStream.format("headrace").options(**options).option("maxOffsetsPerTrigger", str(rows))
    if stuck:
        changed = never_ending(read.load())
    elif speculate:
        changed = slow_at_first(read.load(), checkpoint.parent)
    else:
        changed = failing_once(read.load(), checkpoint.parent / "failed")
    write = changed.writeStream.format("headrace").option("bootstrap", bootstrap).option("topic", target)
    return write.option("checkpointLocation", str(checkpoint))


def failing_once(frame: DataFrame, marker: Path) -> DataFrame:
    def passing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return
        raise RuntimeError("once")

    return frame.mapInArrow(passing, COLUMNS)


def slow_at_first(frame: DataFrame, folder: Path) -> DataFrame:
    """Of every batch the first attempt at its first task hands all rows on, and waits to be killed."""

    def passing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() != 0:
            return
        try:
            (folder / f"slow-{context.getLocalProperty('streaming.sql.batchId')}").touch(exist_ok=False)
        except FileExistsError:
            return
        signal.pause()

    return frame.mapInArrow(passing, COLUMNS)


def never_ending(frame: DataFrame) -> DataFrame:
    def passing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        signal.pause()

    return frame.mapInArrow(passing, COLUMNS)


def main(master: str, bootstrap: str, source: str, target: str, checkpoint: str, rows: str, how: str = "") -> None:
    speculate = how == "speculate"
    spark = session.start("headrace-sink", master, {**SETTINGS, **(SPECULATION if speculate else {})})
    writer = copy(spark, bootstrap, source, target, Path(checkpoint), int(rows), speculate=speculate)
    follows = how == "follow"
    chosen = writer.trigger(processingTime="100 milliseconds") if follows else writer.trigger(availableNow=True)
    chosen.start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
