"""What was made of acknowledged records in another topic: each once, for any number of records, in one shuffle.

A copy has no claim to a place: sinks and replays choose their own. So claims and copies are counted by their content
alone. What is claimed of the copy is the record that was acknowledged, by its digest in the ledger; or, where the copy
was made by expressions, what these give for it. Then the records are read where they are, and only those count that
are as the ledger says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pandas as pd
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from headrace.errors import OperatorError
from headrace.pipelines import stores
from headrace.pipelines.judgement import PLACE, VERDICT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HEADERS: Final = "array<struct<key: string, value: binary>>"
_SAYS: Final = ("producer", "sequence", *PLACE)


@dataclass(frozen=True, slots=True)
class Making:
    """How a copy is made of a record, in SQL over its columns; None where it is the record's own."""

    key: str | None = None
    value: str | None = None
    headers: str | None = None
    where: str | None = None
    """Of which records there is a copy."""
    dead_letters: bool = False
    """Only of those that an archive has put aside."""

    @property
    def is_plain(self) -> bool:
        """Whether the ledger alone says what there is to be."""
        return (self.key, self.value, self.headers, self.where) == (None, None, None, None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a comparison: verdicts on what is missing and what is too many, as far as they are told apart."""

    records: int
    unclaimed: int
    claimed: dict[str, int]
    """Per producer, how many there are to be."""
    verdicts: pd.DataFrame
    not_told_apart: int


def claims_of(
    ledger: DataFrame, source: DataFrame | None, making: Making, put_aside: DataFrame | None = None
) -> DataFrame:
    """What there is to be of each record of the ledger: its columns, and the digest of the copy. `source` has the
    records themselves, and is not needed for a plain copy; `put_aside` the places of an archive's dead letters."""
    if making.dead_letters:
        assert put_aside is not None
        ledger = ledger.join(put_aside.select(*PLACE), list(PLACE), "left_semi")
    claims = ledger.select(*_SAYS, "digest")
    if making.is_plain:
        return claims
    assert source is not None
    known = [name for name in source.columns if name not in (*PLACE, "digest")]
    rows = source.join(claims, [*PLACE, "digest"]).select(*_SAYS, *known)
    try:
        rows = rows if making.where is None else rows.where(making.where)
        made = rows.select(
            *_SAYS,
            F.expr(making.key or "key").cast("binary").alias("key"),
            F.expr(making.value or "value").cast("binary").alias("value"),
            F.expr(making.headers or "headers").cast(HEADERS).alias("headers"),
        )
        # Spark looks at what it is told when it is asked for the columns.
        assert made.columns
    except (AnalysisException, ParseException) as error:
        raise OperatorError(f"how the copy is made cannot be understood: {str(error).splitlines()[0]}") from None
    return stores.with_digests(made, _SAYS)


def compare(claims: DataFrame, copies: DataFrame, tasks: int, most: int, if_missing: str) -> Outcome:
    """Claims against the rows of a topic. Of alike ones the earliest sent are there, and the first that are there
    count."""
    ones = claims.select("digest", F.lit(1).alias("claims"), F.lit(0).alias("copies"))
    others = copies.select("digest", F.lit(0).alias("claims"), F.lit(1).alias("copies"))
    counted = ones.unionAll(others).repartition(tasks, "digest").groupBy("digest")
    summed = counted.agg(F.sum("claims").alias("claims"), F.sum("copies").alias("copies"))
    with _persisted(claims), _persisted(summed.where("claims <> copies")) as left:
        claimed = {producer: int(count) for producer, count in claims.groupBy("producer").count().collect()}
        total = left.agg(
            F.sum(F.expr("greatest(claims - copies, 0)")),
            F.sum(F.expr("if(claims > 0, greatest(copies - claims, 0), 0)")),
            F.sum(F.expr("if(claims = 0, copies, 0)")),
        ).first()
        assert total is not None
        missing, spare, unclaimed = (int(number or 0) for number in total)
        told = _missing(claims, left, if_missing).unionByName(_spare(claims, copies, left)).limit(most)
        verdicts = told.toArrow().to_pandas() if missing or spare else pd.DataFrame(columns=list(VERDICT))
    records = sum(claimed.values()) - missing + spare + unclaimed
    return Outcome(records, unclaimed, claimed, verdicts[list(VERDICT)], missing + spare - len(verdicts))


def _missing(claims: DataFrame, left: DataFrame, what: str) -> DataFrame:
    alike = Window.partitionBy("digest").orderBy("sequence", "producer")
    short = claims.join(left.where("claims > copies"), "digest").withColumn("nth", F.row_number().over(alike))
    nowhere = F.lit(None).cast("long")
    return short.where("nth > copies").select(
        F.lit(what).alias("what"),
        *_SAYS,
        nowhere.alias("found_partition"),
        nowhere.alias("found_offset"),
        F.lit("no copy of it").alias("detail"),
    )


def _spare(claims: DataFrame, copies: DataFrame, left: DataFrame) -> DataFrame:
    alike = Window.partitionBy("digest").orderBy("partition", "offset")
    over = left.where("claims > 0 and copies > claims")
    nth = copies.select("digest", "partition", "offset").join(over, "digest")
    nth = nth.withColumn("nth", F.row_number().over(alike)).where("nth > claims")
    first = claims.join(over.select("digest"), "digest").groupBy("digest")
    of = first.agg(F.min(F.struct("sequence", "producer", *PLACE)).alias("of"))
    return nth.join(of, "digest").select(
        F.lit("duplicated").alias("what"),
        *(F.col(f"of.{name}").alias(name) for name in _SAYS),
        F.col("partition").cast("long").alias("found_partition"),
        F.col("offset").alias("found_offset"),
        F.lit("once more among the copies").alias("detail"),
    )


@contextmanager
def _persisted(rows: DataFrame) -> Iterator[DataFrame]:
    rows.persist()
    try:
        yield rows
    finally:
        rows.unpersist()


def source_of(spark: SparkSession, bootstrap: str, topic: str, archive: str | None) -> DataFrame:
    """The records of a topic; also those that the broker has deleted, where there is an archive of it."""
    columns = (*PLACE, "timestamp", *stores.SENT_COLUMNS)
    reader = spark.read.format("headrace").option("bootstrap", bootstrap).option("subscribe", topic)
    if archive is not None:
        reader = reader.option("history", archive)
    return stores.with_digests(reader.option("columns", ",".join(columns)).load(), columns)
