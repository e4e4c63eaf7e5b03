"""The driver of test_sink_exactly_once.py: a stream from a topic to a topic, through Arrow, in batches of some size.

Run as `python sink_driver.py MASTER BOOTSTRAP SOURCE TARGET CHECKPOINT ROWS [follow]`; without `follow` it ends when
all is written that is there now.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.spark import session
from spark.standalone import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

COLUMNS = "key binary, value binary"


def copy(
    spark: SparkSession, bootstrap: str, source: str, target: str, checkpoint: Path, rows: int, *, stuck: bool = False
) -> DataStreamWriter:
    """A stream that writes what it reads. One task fails once, after it has handed on what it had; or, `stuck`, none
    ever ends."""
    options = {"bootstrap": bootstrap, "subscribe": source, "startingOffsets": "earliest", "columns": "key,value"}
    read = spark.readStream.format("headrace").options(**options).option("maxOffsetsPerTrigger", str(rows))
    changed = never_ending(read.load()) if stuck else failing_once(read.load(), checkpoint.parent / "failed")
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


def never_ending(frame: DataFrame) -> DataFrame:
    def passing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        signal.pause()

    return frame.mapInArrow(passing, COLUMNS)


def main(master: str, bootstrap: str, source: str, target: str, checkpoint: str, rows: str, follow: str = "") -> None:
    spark = session.start("headrace-sink", master, SETTINGS)
    writer = copy(spark, bootstrap, source, target, Path(checkpoint), int(rows))
    chosen = writer.trigger(processingTime="100 milliseconds") if follow else writer.trigger(availableNow=True)
    chosen.start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
