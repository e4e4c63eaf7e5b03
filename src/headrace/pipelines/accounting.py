"""Ledger against store, for any number of records: nearly all of them match, in one shuffle, and only the rest is kept.

A claim is a ledger row; a copy is a record of the store. Both are counted per place (topic, partition, offset) and
digest. Where the counts are equal all is well. What is left over is looked at again, beside the claims that it touches,
and handed to `headrace.pipelines.judgement`, which is small and pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from headrace.pipelines.judgement import CONTENT, NO_OFFSET, PLACE, Bound

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

LEDGER_COLUMNS: Final = ("producer", "sequence", *PLACE, "timestamp", "digest")
STORE_COLUMNS: Final = (*PLACE, "timestamp", "timestampType", "digest")
BOUND_TYPE: Final = (
    "topic string, partition int, first_offset long, next_offset long, compacted boolean, complete boolean"
)

_CREATE_TIME: Final = 0


def settle(ledger: DataFrame, store: DataFrame, tasks: int) -> DataFrame:
    """The leftovers: places and digests whose claims and copies are not equally many, or differ in their timestamp."""
    no_time = F.lit(None).cast("timestamp")
    kept_time = F.when(F.col("timestampType") == _CREATE_TIME, F.col("timestamp"))
    claims = ledger.where("offset is not null").select(
        *PLACE, "digest", *_named(claims=F.lit(1), copies=F.lit(0), sent_at=F.col("timestamp"), kept_at=no_time)
    )
    copies = store.select(
        *PLACE, "digest", *_named(claims=F.lit(0), copies=F.lit(1), sent_at=no_time, kept_at=kept_time)
    )
    counts = {"claims": F.sum("claims"), "copies": F.sum("copies")}
    times = {"sent_at": F.max("sent_at"), "kept_at": F.max("kept_at")}
    counted = claims.unionAll(copies).repartition(tasks, *PLACE).groupBy(*PLACE, "digest")
    return counted.agg(*_named(**counts, **times)).where("claims <> copies or sent_at <> kept_at")


def excuse(
    spark: SparkSession, leftovers: DataFrame, bounds: Sequence[Bound], *, superseded: bool = False
) -> DataFrame:
    """Leftovers with a column `excuse`: where the store need not have what is claimed, the reason.

    With `superseded` also that of records which compaction has removed: those that a judgement could pair with no copy.
    """
    known = spark.createDataFrame([astuple(bound) for bound in bounds], BOUND_TYPE)
    reason = F.when(F.expr("claims > copies and offset < first_offset"), "deleted").when(
        F.expr("claims > copies and offset >= next_offset"), "pending"
    )
    bounded = leftovers.join(F.broadcast(known), ["topic", "partition"], "left")
    if superseded:
        spare = leftovers.where("copies > claims")
        for names, mark in ((PLACE, "at_its_place"), (CONTENT, "of_its_content")):
            marked = spare.select(*names).distinct().withColumn(mark, F.lit(True))
            bounded = bounded.join(marked, list(names), "left")
        nowhere = "copies = 0 and at_its_place is null and of_its_content is null"
        reason = reason.when(F.expr(f"compacted and {nowhere}"), "deleted")
    return bounded.select(*leftovers.columns, reason.alias("excuse"))


def excused(ledger: DataFrame, leftovers: DataFrame) -> DataFrame:
    """How many claims of each producer have which excuse."""
    some = leftovers.where("excuse is not null").select(*PLACE, "digest", "excuse")
    return ledger.join(some, [*PLACE, "digest"]).groupBy("producer", "excuse").count()


def touched(ledger: DataFrame, leftovers: DataFrame) -> DataFrame:
    """The claims that share their place with a leftover, those that have no place, and of the claims that share their
    content with one the earliest: a judgement needs no more, and there may be millions that are all alike."""
    columns = ("producer", "sequence", *PLACE, "digest")
    by_place = ledger.join(leftovers.select(*PLACE).distinct(), list(PLACE)).select(*columns)
    alike = ledger.join(leftovers.select(*CONTENT).distinct(), list(CONTENT)).groupBy(*CONTENT)
    earliest = alike.agg(F.min(F.struct("sequence", "producer", "partition", "offset")).alias("earliest"))
    by_content = earliest.select(*CONTENT, "earliest.*").select(*columns)
    claims = by_place.unionAll(by_content).unionAll(ledger.where("offset is null").select(*columns))
    return claims.distinct().fillna({"offset": NO_OFFSET})


def touching(leftovers: DataFrame, claims: DataFrame) -> DataFrame:
    """The leftovers without the copies that have nothing to do with any claim: other producers' records."""
    copies = leftovers.where("claims = 0 and copies = 1")
    by_place = copies.join(claims.select(*PLACE).distinct(), list(PLACE), "left_semi")
    by_content = copies.join(claims.select(*CONTENT).distinct(), list(CONTENT), "left_semi")
    # A join puts the columns that it is on first.
    near = by_place.unionByName(by_content).distinct()
    return leftovers.where("claims > 0 or copies > 1").unionByName(near)


def missing_first(leftovers: DataFrame) -> DataFrame:
    """In the order of places, but those first that miss a record; what else is at a place stays beside it."""
    at_place = Window.partitionBy(*PLACE)
    misses = F.max(F.col("claims") > F.col("copies")).over(at_place)
    return leftovers.withColumn("misses", misses).orderBy(F.desc("misses"), *PLACE, "digest").drop("misses")


def disordered(ledger: DataFrame) -> DataFrame:
    """Claims whose offset is not above that of the claim before it: same producer, same partition."""
    in_order = Window.partitionBy("producer", "topic", "partition").orderBy("sequence")
    before = {"offset_before": F.lag("offset").over(in_order), "sequence_before": F.lag("sequence").over(in_order)}
    known = ledger.where("offset is not null")
    return known.select("producer", "sequence", *PLACE, *_named(**before)).where("offset <= offset_before")


def _named(**columns: Column) -> list[Column]:
    return [column.alias(name) for name, column in columns.items()]
