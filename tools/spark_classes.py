"""Keeps the classes of a Spark that has worked a little, so that the JVMs of the tests, some twenty, load them faster.

The file is named by `-XX:SharedArchiveFile` in the environment's SPARK_SUBMIT_OPTS. Java reads it if the jars are those
it was made of and the other options the same, and goes on without it if not, or if it is not there yet.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pyspark

from headrace.spark import session

VARIABLE = "SPARK_SUBMIT_OPTS"


def work(folder: str) -> None:
    """Some of what the tests do; ends the JVM, which writes its file then."""
    spark = session.start("classes", "local[2]", {"spark.sql.shuffle.partitions": "2"})
    rows = spark.createDataFrame([(n % 3, f'{{"n": {n}}}') for n in range(9)], "a int, b string")
    rows.selectExpr("a", "from_json(b, 'n int').n as n").groupBy("a").sum("n").orderBy("a").collect()
    rows.write.partitionBy("a").parquet(f"{folder}/rows")
    spark.read.parquet(f"{folder}/rows").join(rows, "b").count()
    given = spark.readStream.schema("b string, a int").parquet(f"{folder}/rows")
    for name, stream in (("copy", given), ("counts", given.groupBy("a").count())):
        write = stream.writeStream.option("checkpointLocation", f"{folder}/{name}").outputMode("update")
        write.trigger(availableNow=True).format("noop").start().awaitTermination()
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    options = os.environ[VARIABLE]
    (named,) = re.findall(r"-XX:SharedArchiveFile=(\S+)", options)
    kept, new = Path(named), Path(f"{named}.new")
    if not kept.exists() or kept.stat().st_mtime < Path(pyspark.__file__).stat().st_mtime:
        os.environ[VARIABLE] = options.replace(f"-XX:SharedArchiveFile={named}", f"-XX:ArchiveClassesAtExit={new}")
        new.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            work(folder)
        # Others may be reading the one that is there.
        new.replace(kept)
