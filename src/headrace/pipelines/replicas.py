"""Comparison of replicas: the records by which two data folders differ.

Every replica of a partition holds the same record at the same offset. What only one of them holds may still be on its
way, or deleted or compacted in the other already; two records at one offset are never right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from headrace.pipelines.summary import Progress, Summary, Table
from headrace.spark.log_source import LogDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WHERE: Final = ["topic", "partition", "offset"]
LEFT_ONLY: Final = "left only"
RIGHT_ONLY: Final = "right only"
DIFFERENT: Final = "different"


def run(
    spark: SparkSession, left: str, right: str, options: Mapping[str, str], shown: int, progress: Progress
) -> Summary:
    """How many records differ and in which way, and the first of them."""
    progress.say(f"comparing {left} with {right}")
    found = compare(spark, left, right, options).cache()
    counts = {row.difference: row["count"] for row in found.groupBy("difference").count().collect()}
    rows = [row.asDict() for row in found.orderBy(*WHERE).limit(shown).collect()]
    found.unpersist()
    progress.done()
    facts = {kind.replace(" ", "_"): counts.get(kind, 0) for kind in (DIFFERENT, LEFT_ONLY, RIGHT_ONLY)}
    tables = [Table("differences", found.columns, rows)] if rows else []
    return Summary("compare", facts, tables, ok=DIFFERENT not in counts)


def compare(spark: SparkSession, left: str, right: str, options: Mapping[str, str] | None = None) -> DataFrame:
    """Rows `topic, partition, offset, difference` and segment and digest of each side; none if the folders agree.

    Options are those of `format("headrace-log")`, such as `topic`. Damaged batches count as not there.
    """
    sides = [_records(spark, folder, options or {}).alias(side) for side, folder in (("left", left), ("right", right))]
    same = [f.col("left.digest") == f.col("right.digest"), f.col("left.timestamp") == f.col("right.timestamp")]
    difference = (
        f.when(f.col("right.digest").isNull(), LEFT_ONLY)
        .when(f.col("left.digest").isNull(), RIGHT_ONLY)
        .when(~(same[0] & same[1]), DIFFERENT)
    )
    return (
        sides[0]
        .join(sides[1], WHERE, "full_outer")
        .select(
            *WHERE,
            difference.alias("difference"),
            *(f.col(f"{side}.{name}").alias(f"{side}_{name}") for name in ("segment", "digest") for side in _SIDES),
        )
        .where(f.col("difference").isNotNull())
    )


_SIDES = ("left", "right")


def _records(spark: SparkSession, folder: str, options: Mapping[str, str]) -> DataFrame:
    columns = ",".join((*WHERE, "timestamp", "digest", "segment"))
    # A replica may not have the marker of a transaction yet: all of it has to be the same all the same.
    chosen = {"isolation": "uncommitted", **options, "mode": "PERMISSIVE", "columns": columns}
    return spark.read.format(LogDataSource.name()).options(**chosen).load(folder)
