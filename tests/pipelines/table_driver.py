"""The driver of test_copies.py: a table to a topic, its values in capitals, under a name.

Run as `python table_driver.py BOOTSTRAP TABLE TOPIC NAME [WHERE]`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.pipelines import delta
from headrace.spark import session
from spark.standalone import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS = 3


def write(spark: SparkSession, bootstrap: str, table: Path, topic: str, name: str, where: str = "true") -> None:
    rows = delta.read(spark, table).where(where).selectExpr("key", "upper(cast(value as string)) as value", "headers")
    writer = rows.repartition(TASKS).write.format("headrace").option("bootstrap", bootstrap)
    writer.option("topic", topic).option("writeId", name).mode("append").save()


def main(bootstrap: str, table: str, topic: str, name: str, where: str = "true") -> None:
    spark = session.start("headrace-table", "local[2]", SETTINGS)
    write(spark, bootstrap, Path(table), topic, name, where)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
