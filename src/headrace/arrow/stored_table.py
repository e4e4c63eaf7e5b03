"""A Delta or Parquet table of anybody's as rows in one order, which is the same whenever the same state is opened.

Files of a Delta table come in the order in which they were added, as far as its log tells (time, then name); those of a
folder of Parquet by name. Rows are numbered through all files. A `Snapshot` tells which state that was: the version of
a Delta table, a digest of names, sizes and footers of Parquet files. Opened again by it, it is the same state, or an
OperatorError says what has changed.

Reads only, from local and mounted file systems. Of a folder that Spark's streaming file sink has written only what its
log lists is read: other files were left by attempts that failed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from headrace.arrow.archive import root_of
from headrace.errors import OperatorError

READABLE_FEATURES: Final = frozenset({"columnMapping", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"})
"""Of Delta: files of such a table are plain Parquet. Names of columns may be mapped, which is looked at apart."""
SUFFIXES: Final = (".parquet", ".parq", ".pq")
FILE_SINK_LOG: Final = "_spark_metadata"
NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
WINDOW_BYTES: Final = 32 << 20
_TAIL_BYTES: Final = 8
"""At the end of a Parquet file: the length of its footer, and four letters."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which state of a table. `id` is a Delta table's own, or the digest of Parquet files; these have no version."""

    id: str
    version: int | None
    rows: int

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "version": self.version, "rows": self.rows}

    @classmethod
    def of_json(cls, given: Any) -> Snapshot:
        """ValueError, KeyError or TypeError if it is none."""
        version = given["version"]
        return cls(str(given["id"]), None if version is None else int(version), int(given["rows"]))


@dataclass(frozen=True, slots=True)
class TableFile:
    path: Path
    rows: int
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Columns that are not in the file, but in the table's log or the file's path."""


class StoredTable:
    """One state of a table, the newest unless an older one is asked for."""

    def __init__(self, path: str | Path, snapshot: Snapshot | None = None) -> None:
        self.path = Path(path)
        if "://" in str(path):
            raise OperatorError(f"{path} is no path: a table has to be on a local or mounted file system")
        if not self.path.exists():
            raise OperatorError(f"there is no table at {path}: no such file or folder")
        self.newest_version: int | None = None
        if self.path.is_dir() and DeltaTable.is_deltatable(str(self.path)):
            self._open_delta(snapshot)
        else:
            self._open_parquet()
        if snapshot is not None and snapshot != self.snapshot:
            raise OperatorError(self._change(snapshot))

    @property
    def rows(self) -> int:
        return self.snapshot.rows

    def windows(self, first: int, columns: Sequence[str], most_rows: int) -> Iterator[tuple[int, pa.Table]]:
        """Rows in their order from a number on, some at a time: the number of the first, and the rows."""
        held: list[pa.Table] = []
        count = size = 0
        for rows in self._batches(first, columns, most_rows):
            if held and (count + len(rows) > most_rows or size >= WINDOW_BYTES):
                yield first, pa.concat_tables(held)
                first, held, count, size = first + count, [], 0, 0
            held.append(rows)
            count += len(rows)
            size += rows.nbytes
        if held:
            yield first, pa.concat_tables(held)

    def bounds(self, column: str) -> tuple[int, int] | None:
        """Least and greatest of a column of whole numbers; None if all are null. From the files' statistics where they
        have such."""
        found: list[int] = []
        for file in self.files:
            if column in file.constants:
                found += [] if file.constants[column] is None else [int(file.constants[column])]
                continue
            with self._opened(file) as opened:
                if column not in opened.schema_arrow.names:
                    continue
                known = _statistics(opened.metadata, column)
                if known is None:
                    least = pc.min_max(opened.read([column])[column]).as_py()
                    known = [each for each in least.values() if each is not None]
                found += known
        return (min(found), max(found)) if found else None

    def _batches(self, first: int, columns: Sequence[str], most_rows: int) -> Iterator[pa.Table]:
        at = 0
        for file in self.files:
            if at + file.rows > first:
                yield from self._read(file, max(0, first - at), columns, most_rows)
            at += file.rows

    def _read(self, file: TableFile, skip: int, columns: Sequence[str], most_rows: int) -> Iterator[pa.Table]:
        with self._opened(file) as opened:
            inside = [name for name in columns if name in opened.schema_arrow.names and name not in file.constants]
            for number in range(opened.num_row_groups):
                group = opened.metadata.row_group(number)
                if skip >= group.num_rows:
                    skip -= group.num_rows
                    continue
                fitting = WINDOW_BYTES * group.num_rows // max(1, group.total_byte_size)
                batch_rows = max(1, min(most_rows, fitting))
                if not inside:
                    # Nothing to read tells no number of rows.
                    yield self._shaped(None, group.num_rows - skip, file, columns)
                    skip = 0
                    continue
                for rows in opened.iter_batches(batch_rows, [number], inside):
                    left, skip = rows.slice(skip), max(0, skip - len(rows))
                    if len(left):
                        yield self._shaped(left, len(left), file, columns)

    def _shaped(self, rows: pa.RecordBatch | None, count: int, file: TableFile, columns: Sequence[str]) -> pa.Table:
        """The columns as the table has them: of its types, with those of the path, nulls where the file lacks one."""
        arrays = []
        for name in columns:
            kind = self.schema.field(name).type
            if name in file.constants:
                arrays.append(pa.repeat(pa.scalar(file.constants[name], kind), count))
            elif rows is not None and name in rows.schema.names:
                found = rows[name]
                arrays.append(found if found.type == kind else found.cast(kind, safe=not pa.types.is_timestamp(kind)))
            else:
                arrays.append(pa.nulls(count, kind))
        return pa.Table.from_arrays(arrays, schema=pa.schema([self.schema.field(name) for name in columns]))

    def _opened(self, file: TableFile) -> Any:
        try:
            opened = pq.ParquetFile(file.path, pre_buffer=False)
        except FileNotFoundError:
            raise OperatorError(f"{file.path} is gone: the table {self.path} was changed while it was read") from None
        except (pa.ArrowException, OSError) as error:
            raise OperatorError(f"{file.path} cannot be read as Parquet: {error}") from None
        if opened.metadata.num_rows != file.rows:
            found = opened.metadata.num_rows
            opened.close()
            raise OperatorError(f"{file.path} has {found} rows, and had {file.rows} when the table was opened")
        return opened

    def _change(self, before: Snapshot) -> str:
        now = self.snapshot
        if before.version is not None and now.version is not None:
            return f"the Delta table {self.path} was made anew since: its id is {now.id}, and was {before.id}"
        if (before.version is None) != (now.version is None):
            return f"the table {self.path} was Parquet and is Delta now, or the other way round"
        return f"the files of {self.path} have changed since: there were {before.rows} rows, now there are {now.rows}"

    def _open_delta(self, snapshot: Snapshot | None) -> None:
        wanted = snapshot.version if snapshot is not None else None
        try:
            table = DeltaTable(str(self.path))
            self.newest_version = table.version()
            if wanted is not None and wanted != table.version():
                table.load_as_version(wanted)
        except (TableNotFoundError, DeltaError, OSError) as error:
            which = "" if wanted is None else f" at version {wanted}"
            raise OperatorError(f"the Delta table {self.path} cannot be read{which}: {error}") from None
        _check_plain(table)
        self.schema = pa.schema(table.schema().to_arrow())
        self.files = _delta_files(table)
        rows = sum(file.rows for file in self.files)
        self.snapshot = Snapshot(str(table.metadata().id), table.version(), rows)
        for file in self.files:
            if not file.path.exists():
                raise OperatorError(
                    f"{file.path} is gone: version {table.version()} of the Delta table {self.path} was vacuumed"
                )

    def _open_parquet(self) -> None:
        paths = [self.path] if self.path.is_file() else _parquet_paths(self.path)
        told = hashlib.sha256()
        files: list[TableFile] = []
        schemas: list[pa.Schema] = []
        values = {path: _hive_values(path.relative_to(self.path)) for path in paths}
        kinds = _hive_types(values.values())
        for path in paths:
            with self._footer(path, told) as opened:
                schemas.append(opened.schema_arrow.remove_metadata())
                constants = {name: _hive_value(values[path].get(name), kind) for name, kind in kinds.items()}
                files.append(TableFile(path, opened.metadata.num_rows, constants))
        try:
            inside = pa.unify_schemas(schemas, promote_options="permissive")
        except pa.ArrowException as error:
            raise OperatorError(f"the files of {self.path} have columns that do not fit together: {error}") from None
        kept = [each for each in inside if each.name not in kinds]
        self.schema = pa.schema([*kept, *(pa.field(name, kind) for name, kind in kinds.items())])
        self.files = files
        self.snapshot = Snapshot(told.hexdigest(), None, sum(file.rows for file in files))

    def _footer(self, path: Path, told: Any) -> Any:
        """Open a file, and add to the digest what tells it from another one of its name."""
        try:
            with path.open("rb") as file:
                size_bytes = file.seek(0, 2)
                file.seek(-_TAIL_BYTES, 2)
                footer_bytes = int.from_bytes(file.read(4), "little")
                file.seek(max(0, size_bytes - _TAIL_BYTES - footer_bytes))
                told.update(f"{path.relative_to(self.path)} {size_bytes}\n".encode() + file.read())
            return pq.ParquetFile(path, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise OperatorError(f"{path} cannot be read as Parquet: {error}") from None


def file_sink_files(folder: Path) -> set[Path]:
    """Spark's file sink logs each batch as lines of JSON, and now and then all of them in one file."""
    found: set[Path] = set()
    for log in (folder / FILE_SINK_LOG).glob("[0-9]*"):
        for line in log.read_text().splitlines()[1:]:
            found.add(Path(unquote(urlparse(json.loads(line)["path"]).path)))
    return found


def _check_plain(table: DeltaTable) -> None:
    """OperatorError unless files of the table have its rows and columns as they are."""
    protocol = table.protocol()
    features = set(protocol.reader_features or ()) if protocol.min_reader_version >= 3 else set()
    mapped = table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none"
    if mapped or features - READABLE_FEATURES:
        why = "its columns are renamed in its log" if mapped else ", ".join(sorted(features - READABLE_FEATURES))
        raise OperatorError(
            f"the Delta table {root_of(table)} cannot be read as plain Parquet ({why}): write it anew without that, "
            "or as Parquet, and replay the copy"
        )


def _delta_files(table: DeltaTable) -> list[TableFile]:
    listed = pa.table(table.get_add_actions(flatten=True))
    root, schema = root_of(table), pa.schema(table.schema().to_arrow())
    by = list(table.metadata().partition_columns)
    rows = []
    for each in listed.to_pylist():
        path = _place(root, each["path"])
        count = each.get("num_records")
        if count is None:
            count = pq.read_metadata(path).num_rows if path.exists() else 0
        constants = {name: each.get(f"partition.{name}") for name in by}
        rows.append((each["modification_time"], each["path"], TableFile(path, count, constants)))
    assert all(name in schema.names for name in by)
    return [file for _, _, file in sorted(rows, key=lambda each: each[:2])]


def _place(root: Path, path: str) -> Path:
    """Of a file by its path in the log, which may be a whole URI, and have blanks and the like as %20."""
    if "://" in path:
        return Path(unquote(urlparse(path).path))
    return root / path if (root / path).exists() else root / unquote(path)


def _parquet_paths(folder: Path) -> list[Path]:
    if (folder / FILE_SINK_LOG).is_dir():
        return sorted(folder / path.relative_to(folder.resolve()) for path in _resolved(file_sink_files(folder)))
    inner = next(folder.rglob("_delta_log"), None) or next(folder.rglob("*.metadata.json"), None)
    if inner is not None:
        raise OperatorError(f"{folder} is no folder of Parquet files: {inner.parent} is a table of its own; name that")
    found = [path for path in folder.rglob("*") if path.suffix in SUFFIXES and not _is_hidden(path.relative_to(folder))]
    if not found:
        raise OperatorError(f"{folder} is no Delta table and has no files {', '.join('*' + each for each in SUFFIXES)}")
    return sorted(found)


def _resolved(paths: set[Path]) -> list[Path]:
    return [path.resolve() for path in paths]


def _is_hidden(path: Path) -> bool:
    """As Spark and Hive have it: what another program has not finished, or does not mean for readers."""
    return any(part.startswith((".", "_")) and "=" not in part for part in path.parts)


def _hive_values(path: Path) -> dict[str, str | None]:
    """Of folders such as `date=2026-11-18`."""
    pairs = [part.partition("=") for part in path.parts[:-1] if "=" in part]
    return {name: None if value == NO_VALUE else unquote(value) for name, _, value in pairs}


def _hive_types(values: Any) -> dict[str, pa.DataType]:
    """int64 where all are whole numbers, else text."""
    found: dict[str, list[str | None]] = {}
    for of_file in values:
        for name, value in of_file.items():
            found.setdefault(name, []).append(value)
    return {
        name: pa.int64() if all(each is None or _is_number(each) for each in given) else pa.string()
        for name, given in found.items()
    }


def _hive_value(value: str | None, kind: pa.DataType) -> Any:
    return value if value is None or pa.types.is_string(kind) else int(value)


def _is_number(text: str) -> bool:
    return text.isascii() and text.removeprefix("-").isdigit() and str(int(text)) == text and len(text) < 19


def _statistics(metadata: Any, column: str) -> list[int] | None:
    """Least and greatest over all row groups; None where some have none to tell."""
    place = next(
        (n for n in range(metadata.num_columns) if metadata.schema.column(n).path == column),
        None,
    )
    if place is None:
        return None
    found: list[int] = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        known = group.column(place).statistics
        if known is not None and known.has_null_count and known.null_count == group.num_rows:
            continue
        if known is None or not known.has_min_max:
            return None
        found += [known.min, known.max]
    return found
