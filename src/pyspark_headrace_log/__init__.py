"""Spark finds the format `headrace-log` by the name of this package."""

try:
    from headrace.spark.log_source import LogDataSource as DefaultSource
except ImportError as error:
    from headrace.spark.unavailable import unavailable

    if found := unavailable("headrace-log", str(error)):
        DefaultSource = found  # type: ignore[assignment,misc]
