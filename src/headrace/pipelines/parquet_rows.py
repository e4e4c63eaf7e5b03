"""Parquet files of a table as a DataFrame: files in a folder read by Spark, those in a store by Python in its tasks.

Spark's own way to S3 is a library of Java that PySpark does not bring; executors have pyarrow. A file is read by one
task, and all its columns, whatever is asked of the frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from headrace.arrow.locations import ObjectPath, location, parquet_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILE_NAME: Final = "file_name"
TASKS_MAX: Final = 200
BATCH_ROWS: Final = 1 << 16
NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"


def read(
    spark: SparkSession, base: Path, files: Sequence[str], schema: StructType, *, with_file_name: bool = False
) -> DataFrame:
    """Rows of files below a folder, with the columns that are in their paths, and with their names if asked for."""
    named = StructType([*schema.fields, *([StructField(FILE_NAME, StringType())] if with_file_name else [])])
    if not files:
        return spark.createDataFrame([], named)
    if isinstance(base, ObjectPath):
        tasks = min(len(files), TASKS_MAX)
        listed = spark.createDataFrame([(nth % tasks, path) for nth, path in enumerate(files)], "task int, path string")
        return listed.repartitionById(tasks, F.col("task")).mapInArrow(_reader(str(base), named), named)
    rows = spark.read.schema(schema).option("basePath", str(base)).parquet(*(str(base / path) for path in files))
    return rows.select(*schema.fieldNames(), *([F.col(f"_metadata.{FILE_NAME}")] if with_file_name else []))


def _reader(base: str, schema: StructType) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def read_files(batches: Iterator[Any]) -> Iterator[Any]:
        columns = to_arrow_schema(schema, timezone="UTC")
        for batch in batches:
            for path in batch["path"].to_pylist():
                yield from rows_of(location(base), path, columns)

    return read_files


def rows_of(base: Path, path: str, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of one file; a column that neither the file nor its path has is null."""
    constants = {FILE_NAME: Path(path).name} | {
        name: unquote(value) for name, is_one, value in (part.partition("=") for part in Path(path).parts) if is_one
    }
    with pq.ParquetFile(parquet_source(base / path), pre_buffer=True) as file:
        inside = [name for name in columns.names if name in file.schema_arrow.names]
        for rows in file.iter_batches(BATCH_ROWS, columns=inside):
            arrays = []
            for column in columns:
                if column.name in inside:
                    arrays.append(rows[column.name].cast(column.type))
                else:
                    value = constants.get(column.name, NO_VALUE)
                    text = pa.scalar(None if value == NO_VALUE else value, pa.string())
                    arrays.append(pa.repeat(text.cast(column.type), len(rows)))
            yield pa.RecordBatch.from_arrays(arrays, schema=columns)
