"""Delta tables through `deltalake`: it lists and commits, Spark reads the Parquet files that it lists.

No Delta jar is needed. Files that no version of the table names, left by a writer that died, are never read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from pyspark.sql.types import StructType

from headrace.errors import OperatorError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

READER_VERSION_MAX: Final = 1


def exists(path: str | Path) -> bool:
    return DeltaTable.is_deltatable(str(path))


def open_table(path: str | Path) -> DeltaTable:
    """The newest version, if its files can be read as plain Parquet."""
    try:
        table = DeltaTable(str(path))
    except TableNotFoundError:
        raise OperatorError(f"{path} is not a Delta table; `headrace pipeline archive --to` makes one") from None
    except (DeltaError, OSError) as error:
        raise OperatorError(f"the Delta table {path} cannot be read: {error}") from None
    needed = table.protocol().min_reader_version
    if needed > READER_VERSION_MAX:
        raise OperatorError(
            f"the Delta table {path} needs reader version {needed}: files of it may hold deleted rows or renamed "
            f"columns, so it cannot be read as plain Parquet"
        )
    return table


def spark_schema(table: DeltaTable) -> StructType:
    """Delta writes its schema in Spark's own JSON."""
    return StructType.fromJson(json.loads(table.schema().to_json()))


def read(spark: SparkSession, path: str | Path) -> DataFrame:
    """The rows of the newest version of the table; all columns typed by its schema, partition columns too."""
    table = open_table(path)
    schema = spark_schema(table)
    files = table.file_uris()
    if not files:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).option("basePath", table.table_uri).parquet(*files).select(*schema.fieldNames())
