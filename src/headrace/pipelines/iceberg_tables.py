"""The tables of an archive in Iceberg, made and added to through `pyiceberg`: each batch once.

`append` adds files, the batch's number in the table's properties and its name in the snapshot's summary by one commit,
which the catalog takes only if the table is still as it was looked at: `pyiceberg` itself would try again on another
snapshot, where the batch may be already, so its tries are turned off (`commit.retry.num-retries`). A lost answer of a
catalog is an error, and the batch's second run finds what became of it.

Manifests and metadata are on disk before the catalog names them (`SyncedFileIO`). Snapshots expire when they are older
than `KEPT_HOURS`, and manifests go that no other snapshot needs; a killed run leaves such files behind, which nothing
names. Data files of an archive are never removed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyiceberg.conversions import to_bytes
from pyiceberg.exceptions import CommitFailedException, NamespaceAlreadyExistsError, TableAlreadyExistsError
from pyiceberg.io import OutputStream
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.transforms import DayTransform, IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import PrimitiveType

from headrace.arrow import iceberg
from headrace.arrow.archive import WRITER
from headrace.arrow.iceberg import BATCH, LAST_WRITER, IcebergVersion, Where
from headrace.errors import OperatorError
from headrace.pipelines import archive_tables, durable
from headrace.pipelines.archive_files import DataFile

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

COMMIT_TRIES: Final = 50
KEPT_HOURS: Final = 24
"""Readers of a snapshot may take as long."""
RETRIES: Final = "commit.retry.num-retries"
PROPERTIES: Final = {
    RETRIES: "0",
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    "write.parquet.compression-codec": "zstd",
}
WRITING: Final = {"py-io-impl": "headrace.pipelines.iceberg_tables.SyncedFileIO"}
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def check(folder: Path, known: Where) -> None:
    """That this catalog is the archive's, and answers."""
    if any(sign in str(folder) for sign in "?#"):
        raise OperatorError(
            f"{folder} has a ? or # in its name, which Iceberg's locations do not bear; give another --to"
        )
    before = iceberg.where(folder)
    if before is not None and before != known:
        raise OperatorError(
            f"{folder} is listed as {before.namespace} in {before.uri or 'its own catalog'}; leave out --catalog and "
            "--namespace, or give another --to"
        )
    with iceberg.catalog(folder, known, WRITING) as opened:
        opened.namespace_exists(known.namespace)


def make(folder: Path, known: Where, name: str, wanted: pa.Schema, *, by_day: bool) -> None:
    """A table with these columns, made or given those that it lacks. On disk when this returns, as is where it is."""
    if iceberg.where(folder) is None:
        _refuse_other_kinds(folder / name)
        durable.save_json(folder / iceberg.WHERE, {"catalog": known.uri, "namespace": known.namespace})
    location = f"file://{folder / name}"
    with iceberg.catalog(folder, known, WRITING) as opened:
        table = iceberg.load(opened, known, name)
        if table is None:
            table = _create(opened, f"{known.namespace}.{name}", location, wanted, by_day=by_day)
        if table.location() != location:
            raise OperatorError(
                f"{known.namespace}.{name} in the catalog {known.uri} is at {table.location()}, not at {location}; "
                "give another --namespace"
            )
        try:
            with table.update_schema() as update:
                update.union_by_name(wanted)
        except Exception as error:  # noqa: BLE001 - what does not fit is told by several classes
            raise OperatorError(
                f"the columns do not fit the table {folder / name}: {error}; give a --schema that fits, or another --to"
            ) from None


def _refuse_other_kinds(path: Path) -> None:
    if path.exists() and any(path.iterdir()):
        raise OperatorError(f"{path} holds something that is no Iceberg table; give another --to")


def _create(opened: Catalog, identifier: str, location: str, wanted: pa.Schema, *, by_day: bool) -> Table:
    from pyiceberg.catalog import Catalog

    schema = assign_fresh_schema_ids(Catalog._convert_schema_if_needed(wanted))
    spec = PartitionSpec()
    if by_day:
        topic, timestamp = (schema.find_field(name).field_id for name in ("topic", "timestamp"))
        spec = PartitionSpec(
            PartitionField(topic, 1000, IdentityTransform(), "topic"),
            PartitionField(timestamp, 1001, DayTransform(), "timestamp_day"),
        )
    with suppress(NamespaceAlreadyExistsError):
        opened.create_namespace(identifier.rpartition(".")[0])
    try:
        return opened.create_table(identifier, schema, location=location, partition_spec=spec, properties=PROPERTIES)
    except TableAlreadyExistsError:
        return opened.load_table(identifier)


def append(folder: Path, name: str, files: Sequence[DataFile], *, app_id: str, app_version: int) -> bool:
    """Add files in one snapshot, once for each version of an application: False if the table has that already.

    Each try commits on exactly the snapshot that was looked at. On return all of it is on disk.
    """
    known = iceberg.where(folder)
    assert known is not None
    failure: Exception | None = None
    with iceberg.catalog(folder, known, WRITING) as opened:
        for _ in range(COMMIT_TRIES):
            table = opened.load_table(f"{known.namespace}.{name}")
            version = IcebergVersion(folder / name, table, table.current_snapshot())
            has = version.transaction_version(app_id)
            if has is not None and has >= app_version:
                return False
            archive_tables.refuse_repeats(version, files)
            try:
                if table.properties.get(RETRIES) != "0":
                    # Another program has turned them on.
                    table.transaction().set_properties(PROPERTIES).commit_transaction()
                    continue
                _commit(table, folder / name, files, app_id, app_version)
            except CommitFailedException as error:
                failure = error
                continue
            except OSError as error:
                raise OperatorError(f"the Iceberg table {folder / name} cannot be written: {error}") from None
            return True
    raise OperatorError(f"the Iceberg table {folder / name} did not take a commit in {COMMIT_TRIES} tries: {failure}")


def _commit(table: Table, root: Path, files: Sequence[DataFile], app_id: str, app_version: int) -> None:
    transaction = table.transaction()
    transaction.set_properties({f"{BATCH}{app_id}": str(app_version)})
    if files:
        told = f"{app_id} {app_version}"
        transaction.set_properties({LAST_WRITER: told})
        with transaction.update_snapshot(snapshot_properties={WRITER: told}).merge_append() as snapshot:
            for file in files:
                snapshot.append_data_file(_entry(table, root, file))
    transaction.commit_transaction()


def _entry(table: Table, root: Path, file: DataFile) -> IcebergFile:
    """A file as a manifest has it, with the statistics by which readers skip it."""
    schema = table.schema()
    first_us, last_us = (
        (at - EPOCH) // timedelta(microseconds=1) for at in (file.first_timestamp, file.last_timestamp)
    )
    bounds: dict[str, tuple[Any, Any]] = {
        "topic": (file.place.topic, file.place.topic),
        "partition": (file.place.partition, file.place.partition),
        "offset": (file.first_offset, file.last_offset),
        "timestamp": (first_us, last_us),
    }
    fields = {schema.find_field(name).field_id: both for name, both in bounds.items()}
    least, most = ({number: _as_bytes(schema, number, both[end]) for number, both in fields.items()} for end in (0, 1))
    day = None if file.place.date is None else (file.place.date - EPOCH.date()).days
    return IcebergFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"file://{root / file.path}",
        file_format=FileFormat.PARQUET,
        partition=Record(file.place.topic, day) if table.spec().fields else Record(),
        record_count=file.rows,
        file_size_in_bytes=file.size_bytes,
        value_counts=dict.fromkeys(fields, file.rows),
        null_value_counts=dict.fromkeys(fields, 0),
        lower_bounds=least,
        upper_bounds=most,
        spec_id=table.metadata.default_spec_id,
    )


def _as_bytes(schema: Schema, field_id: int, value: Any) -> bytes:
    kind = schema.find_type(field_id)
    assert isinstance(kind, PrimitiveType)
    return to_bytes(kind, value)


def expire(folder: Path, name: str, older_than: datetime) -> int:
    """Forget snapshots, except the last two, and remove the metadata that only they had. How many.

    The one before the current is that which readers of the history are at between the commits of a batch to its two
    tables, however old it is.
    """
    known = iceberg.where(folder)
    assert known is not None
    with iceberg.catalog(folder, known, WRITING) as opened:
        table = iceberg.load(opened, known, name)
        if table is None:
            return 0
        before = list(table.metadata.snapshots)
        metadata = {one.snapshot_id: _metadata_files(table, one) for one in before}
        current = table.current_snapshot()
        kept = {current.parent_snapshot_id} if current is not None else set()
        kept |= {named.snapshot_id for named in table.metadata.refs.values()}
        old = [one.snapshot_id for one in before if one.timestamp_ms < older_than.timestamp() * 1000]
        if not (going := [number for number in old if number not in kept]):
            return 0
        with suppress(CommitFailedException):
            table.maintenance.expire_snapshots().by_ids(going).commit()
        left = {one.snapshot_id for one in opened.load_table(f"{known.namespace}.{name}").metadata.snapshots}
        needed = {path for number in left & metadata.keys() for path in metadata[number]}
        gone = metadata.keys() - left
        for path in {path for number in gone for path in metadata[number]} - needed:
            with suppress(FileNotFoundError):
                table.io.delete(path)
        return len(gone)


def _metadata_files(table: Table, snapshot: Snapshot) -> set[str]:
    return {snapshot.manifest_list, *(manifest.manifest_path for manifest in snapshot.manifests(table.io))}


class SyncedFileIO(PyArrowFileIO):
    """Files on a local disk are on it, with their names, when they are closed."""

    def new_output(self, location: str) -> PyArrowFile:
        scheme, netloc, path = self.parse_location(location, self.properties)
        if scheme != "file":
            return super().new_output(location)
        return _SyncedFile(location, path, self.fs_by_scheme(scheme, netloc))


class _SyncedFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> OutputStream:
        path = Path(self._path)
        durable.make_folder(path.parent)
        return _SyncedStream(io.FileIO(path, "w" if overwrite else "x"), path)


class _SyncedStream(io.BufferedWriter):
    def __init__(self, raw: io.FileIO, path: Path) -> None:
        super().__init__(raw)
        self._path = path

    def close(self) -> None:
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
            super().close()
            durable.sync(self._path)
