"""Where Spark looks for `format("headrace")`: a top-level package `pyspark_<format>` with a class `DefaultSource`."""

from headrace.spark.source import HeadraceSource

DefaultSource = HeadraceSource

__all__ = ["DefaultSource"]
