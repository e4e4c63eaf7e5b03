"""Delta tables read by Spark through the list of files that `deltalake` gives."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from headrace.errors import OperatorError
from headrace.pipelines import delta
from proving import proves

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema(
    [("topic", pa.string()), ("date", pa.date32()), ("offset", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))]
)
DAY = datetime.date(2026, 1, 2)
AT = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)


def rows(topic: str, count: int) -> pa.Table:
    return pa.table([[topic] * count, [DAY] * count, list(range(count)), [AT] * count], schema=SCHEMA)


@proves("S4")
def test_a_table_is_read_with_its_own_types(spark: SparkSession, tmp_path: Path) -> None:
    """Also below a folder whose name a URI would write otherwise."""
    tmp_path = tmp_path / "my tables ü"
    for topic in ("007", "orders"):
        write_deltalake(str(tmp_path / "t"), rows(topic, 2), mode="append", partition_by=["topic", "date"])
    (tmp_path / "t" / "topic=007" / "date=2026-01-02" / "orphan.parquet").write_bytes(b"not in the table")
    frame = delta.read(spark, tmp_path / "t")
    assert frame.columns == SCHEMA.names
    assert [(r.topic, r.date, r.offset) for r in frame.orderBy("topic", "offset").collect()] == [
        ("007", DAY, 0), ("007", DAY, 1), ("orders", DAY, 0), ("orders", DAY, 1),
    ]  # fmt: skip
    assert frame.toArrow()["at"].to_pylist() == [AT] * 4


def test_an_empty_table_has_columns_and_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    DeltaTable.create(str(tmp_path), SCHEMA, partition_by=["topic", "date"])
    frame = delta.read(spark, tmp_path)
    assert (frame.columns, frame.count()) == (SCHEMA.names, 0)


def test_a_folder_that_is_no_table_is_named(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="is not a Delta table"):
        delta.read(spark, tmp_path / "nothing")
