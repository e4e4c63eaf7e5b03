"""Delta tables through `deltalake`: it lists and commits, Spark reads the Parquet files that it lists.

No Delta jar is needed. Files that no version of the table names, left by a writer that died, are never read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction
from pyspark.sql.types import StructType

from headrace.arrow.archive import WRITER, root_of
from headrace.arrow.locations import (
    ObjectPath,
    delta_options,
    delta_table,
    is_delta_table,
    location,
    one_line,
)
from headrace.errors import OperatorError
from headrace.pipelines import durable, parquet_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

READER_VERSION_MAX: Final = 1
COMMIT_TRIES: Final = 50
LOG_FOLDER: Final = "_delta_log"
LAST_CHECKPOINT: Final = "_last_checkpoint"


def exists(path: str | Path) -> bool:
    return is_delta_table(path)


def open_table(path: str | Path) -> DeltaTable:
    """The newest version, if its files can be read as plain Parquet."""
    try:
        table = delta_table(path)
    except TableNotFoundError:
        raise OperatorError(f"{path} is not a Delta table; `headrace pipeline archive --to` makes one") from None
    except (DeltaError, OSError) as error:
        raise OperatorError(f"the Delta table {path} cannot be read: {one_line(error)}") from None
    needed = table.protocol().min_reader_version
    if needed > READER_VERSION_MAX:
        raise OperatorError(
            f"the Delta table {path} needs reader version {needed}: files of it may hold deleted rows or renamed "
            f"columns, so it cannot be read as plain Parquet"
        )
    return table


def paths(table: DeltaTable) -> set[str]:
    """The files of this version, below the table's folder."""
    return set(pa.table(table.get_add_actions())["path"].to_pylist())


def spark_schema(table: DeltaTable) -> StructType:
    """Delta writes its schema in Spark's own JSON."""
    return StructType.fromJson(json.loads(table.schema().to_json()))


def read(spark: SparkSession, path: str | Path) -> DataFrame:
    """The rows of the newest version of the table; all columns typed by its schema, partition columns too."""
    table = open_table(path)
    return parquet_rows.read(spark, root_of(table), sorted(paths(table)), spark_schema(table))


def create(path: str | Path, schema: Schema | pa.Schema, partition_by: Sequence[str]) -> None:
    """A table without rows; nothing is done if it is there. On disk when this returns."""
    where = location(path)
    durable.make_folder(where)
    options = delta_options(where)
    DeltaTable.create(str(where), schema, mode="ignore", partition_by=list(partition_by), storage_options=options)
    sync_version(path, 0)


def sync_version(path: str | Path, version: int) -> None:
    """Bring a version to the disk: its entry in the log, a checkpoint that came with it, the names of the folders."""
    where = location(path)
    if isinstance(where, ObjectPath):
        return
    log, above = where / LOG_FOLDER, where.parent
    checkpoint = log / f"{version:020}.checkpoint.parquet"
    if checkpoint.exists():
        durable.sync(checkpoint)
        durable.sync(log / LAST_CHECKPOINT)
    durable.sync(log / f"{version:020}.json", above)


def append(
    path: str | Path,
    files: Sequence[AddAction],
    *,
    app_id: str,
    app_version: int,
    check: Callable[[DeltaTable], None] | None = None,
) -> bool:
    """Add files in one version of the table, once for each version of an application: False if it has that already.

    Each try commits on exactly the version that was looked at, so neither another writer nor a second life of this one
    can come in between. `check` may refuse what it sees by an exception. On return the version is on disk.
    """
    failure: Exception | None = None
    for _ in range(COMMIT_TRIES):
        table = open_table(path)
        known = table.transaction_version(app_id)
        if known is not None and known >= app_version:
            return False
        if check is not None:
            check(table)
        properties = CommitProperties(
            max_commit_retries=0,
            app_transactions=[Transaction(app_id, app_version)],
            custom_metadata={WRITER: f"{app_id} {app_version}"},
        )
        try:
            table.create_write_transaction(
                list(files), "append", table.schema(), table.metadata().partition_columns, commit_properties=properties
            )
        except CommitFailedError as error:
            failure = error
            continue
        except (DeltaError, OSError) as error:
            raise OperatorError(f"the Delta table {path} did not take a commit: {one_line(error)}") from None
        sync_version(path, table.version() + 1)
        return True
    raise OperatorError(f"the Delta table {path} did not take a commit in {COMMIT_TRIES} tries: {failure}")


def to_spark(schema: pa.Schema) -> StructType:
    """The Spark schema of a table made with an Arrow schema."""
    return StructType.fromJson(json.loads(Schema.from_arrow(schema).to_json()))
