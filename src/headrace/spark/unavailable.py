"""What stands for a format where its own module cannot be imported: PySpark is too old, or pyarrow is missing.

Spark imports every package whose name begins with `pyspark_` when it looks for any format at all. An error there would
take the formats of others along; so it is told only to those who use this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from headrace.errors import OperatorError
from headrace.spark.session import check_spark

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource, DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType


def unavailable(form: str, why: str) -> type[DataSource] | None:
    """A source that says why it is none; None for a Spark that knows no sources in Python."""
    try:
        from pyspark.sql.datasource import DataSource
    except ImportError:
        return None

    class Unavailable(DataSource):
        @classmethod
        def name(cls) -> str:
            return form

        def schema(self) -> StructType:
            refuse(form, why)

        def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
            refuse(form, why)

        def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
            refuse(form, why)

    return Unavailable


def refuse(form: str, why: str) -> NoReturn:
    check_spark()
    raise OperatorError(f"format {form!r} lacks a package: {why}; pip install 'headrace[spark]'")
