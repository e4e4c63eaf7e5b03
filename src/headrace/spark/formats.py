"""Formats told to a session by class: Spark then need not search the path for their names, which costs a process."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource


def register(spark: SparkSession, source: type[DataSource]) -> None:
    # It may have been found already, and then it cannot be told again.
    with suppress(AnalysisException):
        spark.dataSource.register(source)
