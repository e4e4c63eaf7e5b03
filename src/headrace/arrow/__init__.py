"""Topics as Arrow: `headrace.arrow.read(topic)` gives pyarrow batches that Polars, DuckDB and pandas take as they are."""

from headrace.arrow.read import read

__all__ = ["read"]
