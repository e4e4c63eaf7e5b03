"""The tables of an archive that is kept in Iceberg, read through `pyiceberg`. Needs the extra `iceberg`.

    iceberg.json   {"catalog": its URI, "namespace": of the tables}
    catalog.db     the catalog, unless that is elsewhere

The folder says where its tables are listed; data and metadata are below `records/` and `dead_letters/`, as a catalog
has their absolute paths. Credentials for a catalog elsewhere are not kept: `pyiceberg` takes them from its own
configuration of a catalog `headrace`, such as `PYICEBERG_CATALOG__HEADRACE__TOKEN`.

A commit has the name of a query and its batch twice: in the summary of its snapshot, which goes when snapshots expire,
and in the table's properties, which stay. Both come with the files, or not at all. Whoever sets a table back to an
older snapshot changes no property: so it is seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headrace.arrow.archive import WRITER, Bounds, File
from headrace.arrow.locations import ObjectPath
from headrace.arrow.table_version import Place, looked_into
from headrace.errors import OperatorError

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

WHERE: Final = "iceberg.json"
CATALOG_FILE: Final = "catalog.db"
CATALOG: Final = "headrace"
NAMESPACE: Final = "archive"
BATCH: Final = "headrace.batch."
"""Begins the name of the property that has the last batch of a query."""
LAST_WRITER: Final = "headrace.last.writer"
"""The property that has query and batch of the last snapshot: a batch without records makes none."""
READING: Final = {"py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO"}
LOCAL: Final = re.compile(r"^file:(//)?")


@dataclass(frozen=True, slots=True)
class Where:
    """A catalog and the namespace in it. Without a URI the catalog is a file in the folder."""

    uri: str = ""
    namespace: str = NAMESPACE


def where(folder: str | Path) -> Where | None:
    """What the folder remembers; None if its archive is not in Iceberg, as none in an object store is."""
    if isinstance(folder, ObjectPath):
        return None
    path = Path(folder) / WHERE
    try:
        found = json.loads(path.read_text())
        return Where(str(found["catalog"]), str(found["namespace"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OperatorError(f"{path} cannot be read: {error}; bring it back from a copy") from None


def require() -> None:
    """An OperatorError unless `pyiceberg` can be had."""
    try:
        import pyiceberg.catalog.sql
        import pyiceberg.io.pyarrow  # noqa: F401
    except ImportError as error:
        raise OperatorError(f"an Iceberg archive needs pyiceberg ({error}): pip install 'headrace[iceberg]'") from None


@contextmanager
def catalog(folder: Path, known: Where, properties: Mapping[str, str] = READING) -> Iterator[Catalog]:
    """The catalog of a folder; what it cannot do is told as an OperatorError."""
    require()
    import requests
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import RESTError
    from sqlalchemy.exc import SQLAlchemyError

    kind, uri = ("rest", known.uri) if known.uri else ("sql", f"sqlite:///{folder.resolve() / CATALOG_FILE}")
    try:
        with load_catalog(CATALOG, type=kind, uri=uri, **properties) as opened:
            yield opened
    except (requests.RequestException, RESTError, SQLAlchemyError) as error:
        raise OperatorError(f"the Iceberg catalog {uri} of {folder} does not do its work: {error}") from None


def load(opened: Catalog, known: Where, name: str) -> Table | None:
    """A table as it is now; None if there is none."""
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    try:
        return opened.load_table(f"{known.namespace}.{name}")
    except (NoSuchTableError, NoSuchNamespaceError):
        return None


class IcebergVersion:
    """A table of an archive as it was at one snapshot."""

    def __init__(self, root: Path, table: Table, snapshot: Snapshot | None) -> None:
        self.root = root
        self._table = table
        self._snapshot = snapshot

    def columns(self) -> pa.Schema:
        """As its files have them inside; fields bear their ids."""
        return pa.schema([_small(field) for field in self._table.schema().as_arrow()])

    def files(self) -> list[File]:
        """Its data files, with what the manifests say of them."""
        if self._snapshot is None:
            return []
        found = []
        for task in self._table.scan(snapshot_id=self._snapshot.snapshot_id).plan_files():
            if task.delete_files:
                raise OperatorError(f"the Iceberg table in {self.root} has deleted rows: another program wrote to it")
            found.append(self._file(task.file))
        return found

    def _file(self, file: Any) -> File:
        from pyiceberg.conversions import from_bytes
        from pyiceberg.types import PrimitiveType

        schema = self._table.schema()

        def bounds(name: str) -> tuple[Any, Any] | None:
            field = schema.find_field(name)
            least, most = (file.lower_bounds or {}).get(field.field_id), (file.upper_bounds or {}).get(field.field_id)
            if least is None or most is None:
                return None
            assert isinstance(field.field_type, PrimitiveType)
            return from_bytes(field.field_type, least), from_bytes(field.field_type, most)

        topics = bounds("topic")
        topic = str(topics[0]) if topics and topics[0] == topics[1] else ""
        known = Bounds(bounds("partition"), bounds("offset"), bounds("timestamp"))
        return File(self._local(file.file_path), file.file_size_in_bytes, file.record_count, 0, topic, "", known)

    def _local(self, location: str) -> str:
        path = Path(LOCAL.sub("", location))
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def paths(self) -> set[str]:
        return {file.path for file in self.files()}

    def named_paths(self) -> set[str]:
        """Files of all snapshots that the table has."""
        io = self._table.io
        manifests = {each.manifest_path: each for one in self._table.metadata.snapshots for each in one.manifests(io)}
        entries = (entry for each in manifests.values() for entry in each.fetch_manifest_entry(io))
        return {self._local(entry.data_file.file_path) for entry in entries}

    def transaction_version(self, app_id: str) -> int | None:
        found = self._table.properties.get(BATCH + app_id)
        return None if found is None else int(found)

    def last_writer(self) -> tuple[str, int] | None:
        return next((writer for one in self._ancestors() if (writer := writer_of(one)) is not None), None)

    def is_set_back(self) -> bool:
        """Its properties tell of another last writer than the snapshot that is current, and those before it. Where all
        of those have expired nothing tells."""
        told, last = self._table.properties.get(LAST_WRITER), self.last_writer()
        return told is not None and last is not None and _writer(told) != last

    def next_offsets(self, topics: Iterable[str] | None = None) -> dict[Place, int]:
        asked = None if topics is None else set(topics)
        found: dict[Place, int] = {}
        for file in self.files():
            if asked is not None and file.topic and file.topic not in asked:
                continue
            for place, last in self._lasts(file):
                found[place] = max(found.get(place, 0), last + 1)
        return found

    def _lasts(self, file: File) -> Iterator[tuple[Place, int]]:
        partition, offset = file.bounds.partition, file.bounds.offset
        if file.topic and partition and offset and partition[0] == partition[1]:
            yield (file.topic, partition[0]), offset[1]
            return
        rows = looked_into(self.root, file.path, file.topic or None).group_by(["topic", "partition"])
        for row in rows.aggregate([("offset", "max")]).to_pylist():
            yield (row["topic"], row["partition"]), row["offset_max"]

    def before(self, is_known: Callable[[tuple[str, int]], bool]) -> IcebergVersion:
        """This table at its newest snapshot at and before which all writers are known."""
        for snapshot in self._ancestors():
            writer = writer_of(snapshot)
            if writer is not None and is_known(writer):
                break
            if writer is not None:
                self._snapshot = self._parent(snapshot)
        return self

    def _parent(self, snapshot: Snapshot) -> Snapshot | None:
        number = snapshot.parent_snapshot_id
        found = None if number is None else self._table.snapshot_by_id(number)
        # Who expires a snapshot takes its number from those that follow.
        if found is None and (snapshot.sequence_number or 0) > 1:
            raise OperatorError(
                f"{self.root} is in the middle of a batch, and the snapshot before that has expired; run the archive "
                "once more, which brings the batch to its end"
            )
        return found

    def _ancestors(self) -> Iterator[Snapshot]:
        at = self._snapshot
        while at is not None:
            yield at
            at = None if at.parent_snapshot_id is None else self._table.snapshot_by_id(at.parent_snapshot_id)


def _small(field: pa.Field) -> pa.Field:
    """Without the large types, which `pyiceberg` takes everywhere."""
    kind = field.type
    if pa.types.is_large_string(kind):
        return field.with_type(pa.string())
    if pa.types.is_large_binary(kind):
        return field.with_type(pa.binary())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return field.with_type(pa.list_(_small(kind.value_field)))
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_small(kind.field(n)) for n in range(kind.num_fields)]))
    if pa.types.is_map(kind):
        return field.with_type(pa.map_(_small(kind.key_field), _small(kind.item_field)))
    return field


def writer_of(snapshot: Snapshot) -> tuple[str, int] | None:
    told = None if snapshot.summary is None else snapshot.summary.additional_properties.get(WRITER)
    return None if told is None else _writer(told)


def _writer(told: str) -> tuple[str, int]:
    name, _, batch = told.rpartition(" ")
    return name, int(batch)


def open_version(folder: Path, known: Where, name: str) -> IcebergVersion | None:
    """The newest version of a table; None if there is no such table."""
    with catalog(folder, known) as opened:
        table = load(opened, known, name)
        return None if table is None else IcebergVersion(folder.resolve() / name, table, table.current_snapshot())
