"""What a small micro-batch takes: `python bench/micro_batches.py` from the clone's root.

A topic of four partitions, a stream that takes 1,000 rows of it at a time, to Spark's noop sink and to another topic;
beside it the same by Spark's Kafka connector, which runs in the JVM alone, where Maven answers, and rows from Python
without a broker. All streams of a round run one after the other in one session, rounds in turns. The first batches of
a stream start its processes and are left out. Times are Spark's own, from the progress of the query, in milliseconds:
medians over the batches of all rounds, with the parts that Spark names.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import spark_rows
from contestants import CONTESTANTS, HOST, Missing, start
from processes import stop
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType
from report import machine, table
from run import say

from headrace.spark import session

ROWS: Final = 1_000
BATCHES: Final = 30
LEFT_OUT: Final = 5
PARTS: Final = ("latestOffset", "getBatch", "queryPlanning", "walCommit", "addBatch", "commitOffsets")

SPLITS: Final = 4

Query = Callable[[Path], Any]


class Prebuilt(DataSource):
    """Rows without a broker: what Spark asks of any stream that is written in Python. It knows no end."""

    @classmethod
    def name(cls) -> str:
        return "prebuilt"

    def schema(self) -> str:
        return "key binary, value binary, topic string, partition int, offset long"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return PrebuiltReader()


class PrebuiltReader(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:
        return {"batch": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"batch": min(start["batch"] + 1, BATCHES)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(nth) for nth in range(SPLITS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        count = ROWS // SPLITS
        yield pa.RecordBatch.from_pydict(
            {
                "key": pa.array([b"key-00001"] * count, pa.binary()),
                "value": pa.array([b"v" * 100] * count, pa.binary()),
                "topic": pa.array(["small"] * count, pa.string()),
                "partition": pa.array([0] * count, pa.int32()),
                "offset": pa.array(range(count), pa.int64()),
            }
        )


def take(query: Any) -> list[dict[str, Any]]:
    """The batches of a query, which ends by itself but where its source has no end."""
    while not query.awaitTermination(1):
        if len([each for each in query.recentProgress if each["numInputRows"]]) >= BATCHES:
            query.stop()
    found = [each for each in query.recentProgress if each["numInputRows"]]
    return found[LEFT_OUT:]


def queries(spark: Any, bootstrap: str, forms: list[str]) -> dict[str, Query]:
    def source(form: str) -> Any:
        reader = spark.readStream.format(form).option("kafka.bootstrap.servers", bootstrap)
        return (
            reader.option("subscribe", "small")
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", ROWS)
            .load()
        )

    def to(rows: Any, form: str, folder: Path) -> Any:
        writer = rows.writeStream.format(form).option("checkpointLocation", str(folder))
        if form != "noop":
            writer = writer.option("kafka.bootstrap.servers", bootstrap).option("topic", f"copied-{time.time_ns()}")
        return writer.trigger(availableNow=True).start()

    found: dict[str, Query] = {
        "prebuilt -> noop": lambda folder: (
            spark.readStream.format("prebuilt")
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", str(folder))
            .start()
        )
    }
    for form in forms:
        found[f"{form} -> noop"] = lambda folder, form=form: to(source(form), "noop", folder)  # type: ignore[misc]
        found[f"{form} -> {form}"] = lambda folder, form=form: to(  # type: ignore[misc]
            source(form).select("key", "value"), form, folder
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--master", default="local[2]")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="micro-batches-"))
    settings = {"spark.sql.shuffle.partitions": "4", "spark.sql.streaming.numRecentProgressUpdates": "1000"}
    forms = ["headrace"]
    try:
        settings["spark.jars"] = ",".join(spark_rows.connector_jars())
        forms.append("kafka")
    except Missing as reason:
        say(f"missing: {reason}")
    broker = start(CONTESTANTS["headrace"], folder / "broker")
    try:
        bootstrap = f"{HOST}:{broker.port}"
        spark_rows.fill([bootstrap], "small", 100, ROWS * BATCHES)
        spark = session.start("bench", asked.master, settings)
        spark.sparkContext.setLogLevel("ERROR")
        spark.dataSource.register(Prebuilt)
        batches: dict[str, list[dict[str, Any]]] = {}
        for nth in range(asked.rounds):
            for name, begin in queries(spark, bootstrap, forms).items():
                found = take(begin(folder / f"checkpoint-{nth}-{len(batches)}-{time.time_ns()}"))
                batches.setdefault(name, []).extend(found)
                median = statistics.median(each["durationMs"]["triggerExecution"] for each in found)
                say(f"round {nth} {name}: {median:.0f} ms, {len(found)} batches")
        spark.stop()
    finally:
        stop(broker.process)
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for name, found in batches.items():
        times = [[each["durationMs"].get(part, 0) for each in found] for part in ("triggerExecution", *PARTS)]
        rows.append([name, str(len(found)), *(f"{statistics.median(each):.0f}" for each in times)])
    print(" | ".join(f"{key}: {value}" for key, value in machine().items()))
    print(table(["stream", "batches", "ms", *PARTS], rows))


if __name__ == "__main__":
    main()
