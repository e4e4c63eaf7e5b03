"""A little of all that sessions do here, so that a JVM which archives its classes when it ends has met them.

    python -m headrace.spark.class_training

Views, JSON, joins and sorts as `headrace sql` uses them, Parquet, and a stream through a source and a sink in Python as
an archive is one. It needs no broker.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)

from headrace.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA: Final = (
    "key binary, value binary, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key string, value binary>>"
)
ROWS: Final = 10
STATEMENT: Final = """
    with each as (select json.kind, json.amount, _timestamp from lessons where _offset < 8)
    select kind, count(*) as many, sum(amount) as total, max(_timestamp) as last, row_number() over (order by kind) as n
    from each join kinds using (kind) group by kind having sum(amount) > 0 order by total desc limit 5
"""


def rows() -> Iterator[pa.RecordBatch]:
    numbers = range(ROWS)
    columns = {
        "key": pa.array([b"%d" % n for n in numbers], pa.binary()),
        "value": pa.array([b'{"kind": "k%d", "amount": %d}' % (n % 3, n) for n in numbers], pa.binary()),
        "partition": pa.array([0] * ROWS, pa.int32()),
        "offset": pa.array(numbers, pa.int64()),
        "timestamp": pa.array(numbers, pa.timestamp("us", "UTC")),
        "headers": pa.array(
            [[]] * ROWS, pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
        ),
    }
    yield pa.RecordBatch.from_pydict(columns)


class LessonReader(DataSourceReader):
    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return rows()


class LessonStream(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:
        return {"offset": 0}

    def latestOffset(self, *_: Any) -> dict[str, int]:
        return {"offset": ROWS}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return rows()


class LessonWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class Lesson(DataSource):
    @classmethod
    def name(cls) -> str:
        return "headrace-lesson"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        return LessonReader()

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return LessonStream()

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:
        return LessonWriter()


def ask(spark: SparkSession) -> None:
    """What `headrace sql` does."""
    spark.catalog.listTables()
    texts = spark.createDataFrame([('{"kind": "k1", "amount": 1}',)], "value string")
    fields = spark.read.json(texts, mode="DROPMALFORMED").schema
    headers = F.transform("headers", lambda each: F.struct(each["key"], each["value"].cast("string").alias("value")))
    spark.read.format(Lesson.name()).load().select(
        F.from_json(F.col("value").cast("string"), fields).alias("json"),
        F.col("key").cast("string").alias("_key"),
        F.col("offset").alias("_offset"),
        F.col("timestamp").alias("_timestamp"),
        headers.alias("_headers"),
    ).createOrReplaceTempView("lessons")
    spark.createDataFrame([("k0",), ("k1",)], "kind string").createOrReplaceTempView("kinds")
    found = spark.sql(STATEMENT)
    found.take(2)
    list(found.select(F.to_json(F.struct("*"))).toLocalIterator())
    spark.sql("select 1").collect()


def keep(spark: SparkSession, folder: Path) -> None:
    """What pipelines do."""
    table = str(folder / "table")
    spark.read.format(Lesson.name()).load().withColumn("date", F.to_date("timestamp")).write.partitionBy("date").option(
        "compression", "zstd"
    ).parquet(table)
    spark.read.parquet(table).where("offset > 3").groupBy("partition").agg(F.max("offset")).collect()
    writer = spark.readStream.format(Lesson.name()).load().writeStream.format(Lesson.name())
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="headrace-classes-") as place:
        started = session.start("classes", "local[1]", {"spark.sql.shuffle.partitions": "1"})
        session.register_source(started, Lesson)
        ask(started)
        keep(started, Path(place))
        started.stop()
