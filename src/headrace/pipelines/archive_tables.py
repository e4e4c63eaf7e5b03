"""The two tables of an archive, and what they say about how far it is.

`records/` is partitioned by topic and UTC date; `dead_letters/` takes records that could not be decoded. Both hold a
record of a topic at most once. The tables are the truth: the checkpoint of a query and the offsets of its consumer
group only repeat what they say, so an archive that lost its checkpoint goes on from the offsets in its tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import Field, Schema
from deltalake.exceptions import DeltaError
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructField, StructType

from headrace.arrow import iceberg
from headrace.arrow.history import DeltaVersion
from headrace.arrow.locations import ObjectPath
from headrace.arrow.table_version import TableVersion
from headrace.errors import OperatorError
from headrace.pipelines import delta
from headrace.pipelines.archive_files import DataFile
from headrace.records.arrow import HEADERS_TYPE, TIMESTAMP_TYPE, TYPES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORDS: Final = "records"
DEAD_LETTERS: Final = "dead_letters"
PARTITIONED_BY: Final = ("topic", "date")
MERGED: Final = "merged"
"""How the names of files begin that an archive has made of smaller ones."""
RECORD_COLUMNS: Final = ("topic", "partition", "offset", "timestamp", "timestampType", "key", "value", "headers")
"""As rows reach the sink; the date is added when they are put into files."""

RECORDS_SCHEMA: Final = pa.schema(
    [("topic", pa.string()), ("date", pa.date32()), *((name, TYPES[name]) for name in RECORD_COLUMNS[1:])]
)
DEAD_SCHEMA: Final = pa.schema(
    [
        *((name, TYPES[name]) for name in ("topic", "partition", "offset", "timestamp", "key", "value")),
        ("headers", HEADERS_TYPE),
        ("reason", pa.string()),
        ("archived_at", TIMESTAMP_TYPE),
    ]
)

Offsets = dict[tuple[str, int], int]


def make_records(path: Path, decoded: Iterable[StructField] = ()) -> None:
    """The table of records, made or given the columns that it lacks; a column of another type is an error."""
    _make(path, RECORDS_SCHEMA, list(PARTITIONED_BY))
    table = delta.open_table(path)
    if tuple(table.metadata().partition_columns) != PARTITIONED_BY:
        raise OperatorError(f"{path} is a Delta table, but none of an archive: it is not partitioned by topic and date")
    there = {field.name.lower(): field for field in delta.spark_schema(table)}
    for field in delta.to_spark(RECORDS_SCHEMA):
        known = there.get(field.name.lower())
        if known is None or known.dataType != field.dataType:
            raise OperatorError(f"{path} is a Delta table, but none of an archive: its column {field.name} differs")
    missing = []
    for field in decoded:
        known = there.get(field.name.lower())
        if known is None:
            missing.append(Field.from_json(json.dumps(_nullable(field).jsonValue())))
        elif known.dataType != _nullable(field).dataType:
            raise OperatorError(
                f"column {field.name} of {path} is {known.dataType.simpleString()}, and now it would be "
                f"{field.dataType.simpleString()}; give a --schema that fits, or another --to"
            )
    if missing:
        table.alter.add_columns(missing)
        delta.sync_version(path, table.version())


def make_dead_letters(path: Path) -> None:
    _make(path, DEAD_SCHEMA, [])


def _make(path: Path, schema: pa.Schema, partitioned_by: list[str]) -> None:
    if delta.exists(path):
        return
    if path.exists() and any(path.iterdir()):
        raise OperatorError(f"{path} holds something that is no Delta table; give another --to")
    try:
        delta.create(path, Schema.from_arrow(schema), partitioned_by)
    except (DeltaError, OSError) as error:
        raise OperatorError(f"no table can be made in {path}: {error}") from None


def _nullable(field: StructField) -> StructField:
    """As Delta has it: everything may be null."""
    schema = Schema.from_json(json.dumps(StructType([StructField(field.name, field.dataType, True)]).jsonValue()))
    found: StructField = StructType.fromJson(json.loads(schema.to_json()))[0]
    return found


def opened(archive: Path, name: str) -> TableVersion | None:
    """A table of an archive, as it is now; None if it is not there."""
    known = iceberg.where(archive)
    if known is not None:
        return iceberg.open_version(archive, known, name)
    return DeltaVersion(delta.open_table(archive / name)) if delta.exists(archive / name) else None


def frame(spark: SparkSession, archive: Path, name: str) -> DataFrame | None:
    """The rows of a table; None if it is not there."""
    table = opened(archive, name)
    if not isinstance(table, iceberg.IcebergVersion):
        return None if table is None else delta.read(spark, archive / name)
    schema = from_arrow_schema(table.columns())
    files = [str(table.root / path) for path in sorted(table.paths())]
    # What is in the names of folders is inside too.
    reader = spark.read.schema(schema).option("recursiveFileLookup", "true")
    return reader.parquet(*files) if files else spark.createDataFrame([], schema)


def refuse_repeats(table: TableVersion, files: Iterable[DataFile]) -> None:
    """An error if the table has an offset of these files already."""
    for file, where, next_offset in _reached(table, files):
        if file.first_offset < next_offset:
            raise OperatorError(
                f"{where} is archived up to offset {next_offset - 1}, and now {file.first_offset} comes again: the "
                "topic was made anew, or the checkpoint is not of this archive; use another --to"
            )


def refuse_unknown(table: TableVersion, files: Iterable[DataFile]) -> None:
    """An error unless the table has all offsets of these files, which come a second time."""
    for file, where, next_offset in _reached(table, files):
        if file.last_offset >= next_offset:
            raise OperatorError(
                f"{where} is archived up to offset {next_offset - 1}, and a batch that was archived before reaches "
                f"{file.last_offset}: the checkpoint has lost its offsets; remove it, and the archive goes on from its "
                "tables"
            )


def _reached(table: TableVersion, files: Iterable[DataFile]) -> Iterator[tuple[DataFile, str, int]]:
    """Each file with its partition, and the next offset that the table has of that."""
    files = list(files)
    there = table.next_offsets({file.place.topic for file in files})
    for file in files:
        topic, partition = file.place.topic, file.place.partition
        yield file, f"{topic}-{partition}", there.get((topic, partition), 0)


def refuse_missing(table: TableVersion, prefix: str) -> None:
    """An error unless all files of a batch are there that the table names."""
    folder = table.root
    for path in sorted(table.paths()):
        if Path(path).name.startswith(prefix) and not (folder / path).exists():
            raise OperatorError(
                f"{folder} names {path} as archived, and that file is gone; bring it back from a copy, or archive the "
                "topic anew with another --to"
            )


def half_committed(archive: Path) -> bool:
    """Whether the last dead letters are of a batch whose records are not yet in their table."""
    dead = opened(archive, DEAD_LETTERS)
    last = None if dead is None else dead.last_writer()
    if last is None:
        return False
    app_id, version = last
    records = opened(archive, RECORDS)
    known = None if records is None else records.transaction_version(app_id)
    return known is None or known < version


def is_behind(archive: Path, checkpoint: Path, query: str) -> bool:
    """Whether the table of records lacks a batch that Spark has finished: it was set back to an older version."""
    records = opened(archive, RECORDS)
    done = [int(path.name) for path in (checkpoint / "commits").glob("[0-9]*") if path.name.isdigit()]
    if records is None or not done:
        return False
    known = records.transaction_version(query)
    return records.is_set_back() or known is None or known < max(done)


def archived_offsets(archive: Path) -> Offsets:
    """What both tables have together; dead letters that are ahead of their batch's records do not count."""
    found: Offsets = {}
    for name in (RECORDS,) if half_committed(archive) else (RECORDS, DEAD_LETTERS):
        table = opened(archive, name)
        for place, offset in ({} if table is None else table.next_offsets()).items():
            found[place] = max(found.get(place, 0), offset)
    return found


def sweep(archive: Path, app_id: str) -> int:
    """Remove files that lost against others of their batch, and merged ones that no table ever had. How many.

    Files of a batch that no table has yet are left alone: the process that wrote them may outlive its driver and still
    commit them. They are removed here once their batch is committed, by whomever. Files that a table had, and that were
    merged since, are left to vacuum: a reader may be at them. To be called by who holds the archive alone, as merging
    is done by no other process. Nobody holds one in a store: there merged files are left to vacuum.
    """
    count, merges_too = 0, not isinstance(archive, ObjectPath)
    for name in (RECORDS, DEAD_LETTERS):
        table = opened(archive, name)
        if table is None:
            continue
        version, live = table.transaction_version(app_id), table.paths()
        done: dict[str, Path] = {}
        for path in (archive / name).rglob("*-*.parquet"):
            first, second, *_ = path.name.split("-")
            is_old = first == app_id and version is not None and int(second) <= version
            if merges_too if first == MERGED else is_old:
                done[str(path.relative_to(archive / name))] = path
        if lost := done.keys() - live:
            for each in lost - table.named_paths():
                done[each].unlink(missing_ok=True)
                count += 1
    return count
