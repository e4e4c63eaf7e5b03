"""Where Spark looks for `format("headrace")`: a top-level package `pyspark_<format>` with a class `DefaultSource`."""

try:
    from headrace.spark.source import HeadraceSource as DefaultSource
except ImportError as error:
    from headrace.spark.unavailable import unavailable

    if found := unavailable("headrace", str(error)):
        DefaultSource = found  # type: ignore[assignment,misc]
