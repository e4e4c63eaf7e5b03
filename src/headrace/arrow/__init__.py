"""Topics as Arrow: `read` gives pyarrow batches that Polars, DuckDB and pandas take as is, `Writer` sends them, and
`Transaction` sends them so that all count, or none."""

try:
    import pyarrow  # noqa: F401
except ImportError as error:
    raise ImportError("headrace.arrow needs pyarrow: pip install 'headrace[arrow]'", name="pyarrow") from error

from headrace.arrow.read import read
from headrace.arrow.transaction import Transaction
from headrace.arrow.write import WriteFailed, Writer, write

__all__ = ["Transaction", "WriteFailed", "Writer", "read", "write"]
