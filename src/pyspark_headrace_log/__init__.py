"""Spark finds the format `headrace-log` by the name of this package."""

from headrace.spark.log_source import LogDataSource as DefaultSource

__all__ = ["DefaultSource"]
