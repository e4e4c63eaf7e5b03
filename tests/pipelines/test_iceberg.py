"""An archive in Iceberg: what its tables hold after every order of commit, crash, replay and abort, by other readers.

The tables are read with `pyiceberg`, and with DuckDB by the data files that the snapshot names: DuckDB's own reader of
Iceberg is an extension that has to be downloaded.
"""

from __future__ import annotations

import datetime
import os
import threading
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from headrace.arrow import iceberg
from headrace.arrow.history import History, read_part
from headrace.arrow.iceberg import IcebergVersion, Where
from headrace.errors import OperatorError
from headrace.pipelines import archive_tables, delta, iceberg_tables
from headrace.pipelines.archive_files import FileSet
from headrace.pipelines.archive_sink import ArchiveWriter, FilesWritten, parted
from headrace.pipelines.archive_tables import DEAD_LETTERS, DEAD_SCHEMA, RECORD_COLUMNS, RECORDS, RECORDS_SCHEMA
from pipelines.iceberg_rest import RestCatalogServer
from proving import proves

ROWS = pa.schema([RECORDS_SCHEMA.field(name) for name in RECORD_COLUMNS])
WITH_REASON = ROWS.append(pa.field("reason", pa.string()))
DAY = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)


def rows(first: int, count: int, *, partition: int = 0, days: int = 1, bad: int = 0) -> pa.RecordBatch:
    """Records of which the last `bad` have a reason."""
    return pa.RecordBatch.from_pylist(
        [
            {
                "topic": "t", "partition": partition, "offset": n, "timestampType": 0, "value": b"v%d" % n,
                "timestamp": DAY + datetime.timedelta(days=n % days, microseconds=n),
                "headers": [{"key": "h", "value": b"%d" % n}] if n % 2 else None,
                "reason": "bad" if n >= first + count - bad else None,
            }
            for n in range(first, first + count)
        ],
        WITH_REASON,
    )  # fmt: skip


class Archive:
    def __init__(self, folder: Path, known: Where | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.known = known or Where()
        iceberg_tables.check(folder, self.known)
        iceberg_tables.make(folder, self.known, RECORDS, ROWS, by_day=True)
        iceberg_tables.make(folder, self.known, DEAD_LETTERS, DEAD_SCHEMA, by_day=False)

    def writer(self, query: str = "q") -> ArchiveWriter:
        return ArchiveWriter(self.folder, query, delta.to_spark(WITH_REASON))

    def written(self, batch: int, *batches: pa.RecordBatch, query: str = "q") -> list[Any]:
        """What a task answers."""
        writer, prefix = self.writer(query), f"{query}-{batch:08}-00000"
        records = FileSet(self.folder / RECORDS, prefix, writer._inside, by_date=True)
        dead = FileSet(self.folder / DEAD_LETTERS, prefix, writer._dead_inside, by_date=False)
        for each in batches:
            for files, part in zip((records, dead), parted(each), strict=True):
                if len(part):
                    files.add(part)
        return [None, FilesWritten(tuple(records.close()), tuple(dead.close()))]

    def commit(self, batch: int, *batches: pa.RecordBatch, query: str = "q") -> None:
        self.writer(query).commit(self.written(batch, *batches, query=query), batch)

    def table(self, name: str = RECORDS) -> Table:
        """As anyone would open it."""
        uri = f"sqlite:///{self.folder}/catalog.db"
        return SqlCatalog("headrace", uri=uri).load_table(f"{self.known.namespace}.{name}")

    def offsets(self, name: str = RECORDS) -> list[int]:
        """By `pyiceberg`; DuckDB has to say the same of the files that the snapshot names."""
        table = self.table(name)
        found: list[int] = sorted(table.scan().to_arrow()["offset"].to_pylist())
        assert duckdb_offsets(table) == found
        return found

    def files(self) -> int:
        return len(list(self.folder.rglob("*.parquet")))


def data_files(table: Table) -> list[str]:
    return [task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()]


def duckdb_offsets(table: Table) -> list[int]:
    if not (files := data_files(table)):
        return []
    with duckdb.connect() as connection:
        read = connection.read_parquet(files, hive_partitioning=False)
        return [offset for (offset,) in read.project('"offset"').order('"offset"').fetchall()]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "my archive ü")


@proves("S13")
def test_what_is_archived_is_read_by_others(archive: Archive) -> None:
    """All columns, by day and topic, with statistics by which files are skipped."""
    archive.commit(0, rows(0, 10, days=2), rows(0, 5, partition=1))
    table = archive.table()
    sent = [*rows(0, 10, days=2).to_pylist(), *rows(0, 5, partition=1).to_pylist()]
    expected = [{name: row[name] for name in RECORD_COLUMNS} for row in sorted(sent, key=place)]
    found = sorted(table.scan().to_arrow().to_pylist(), key=place)
    # `pyiceberg` reads a list of structs that is null as an empty one.
    assert [{**row, "headers": row["headers"] or None} for row in found] == expected
    with duckdb.connect() as connection:
        read = connection.read_parquet(data_files(table), hive_partitioning=False).order('"partition", "offset"')
        assert pa.table(read.arrow()).select(RECORD_COLUMNS).to_pylist() == expected
    assert len(list(table.scan(row_filter="offset >= 5 and partition = 0").plan_files())) == 2
    assert len(list(table.scan(row_filter="offset >= 8").plan_files())) == 2
    assert len(list(table.scan(row_filter="partition = 1").plan_files())) == 1
    assert len(list(table.scan(row_filter="timestamp >= '2026-03-02T00:00:00+00:00'").plan_files())) == 1
    assert table.scan(row_filter="timestamp >= '2026-03-02T00:00:00+00:00'").to_arrow().num_rows == 5
    assert [str(field) for field in table.spec().fields] == [
        "1000: topic: identity(1)",
        "1001: timestamp_day: day(4)",
    ]
    assert archive.offsets() == sorted([*range(10), *range(5)])


def place(row: dict[str, Any]) -> tuple[int, int]:
    return row["partition"], row["offset"]


@proves("S13")
def test_a_batch_is_added_once_and_its_second_run_leaves_nothing(archive: Archive) -> None:
    """Neither do tasks that died beside the one that counts."""
    archive.written(0, rows(0, 10))
    first = archive.written(0, rows(0, 10))
    archive.writer().commit(first, 0)
    assert archive.files() == 1
    archive.writer().commit(first, 0)
    archive.commit(0, rows(0, 10))
    assert archive.offsets() == list(range(10))
    assert archive.files() == 1
    assert len(archive.table().snapshots()) == 1


@proves("S13")
def test_snapshots_that_expire_take_no_batch_with_them(archive: Archive) -> None:
    """Which batches are archived is a property of the table, and comes with their files."""
    for batch in range(4):
        archive.commit(batch, rows(10 * batch, 10))
    metadata = archive.folder / RECORDS / "metadata"
    before = len(list(metadata.glob("*.avro")))
    now = datetime.datetime.now(datetime.UTC)
    assert iceberg_tables.expire(archive.folder, RECORDS, now - datetime.timedelta(hours=1)) == 0
    assert iceberg_tables.expire(archive.folder, RECORDS, now + datetime.timedelta(hours=1)) == 2
    assert len(archive.table().snapshots()) == 2
    assert len(list(metadata.glob("*.avro"))) == before - 2
    archive.commit(3, rows(30, 10))
    archive.commit(1, rows(10, 10))
    archive.commit(4, rows(40, 10))
    assert archive.offsets() == list(range(50))


@proves("S12", "S13")
def test_snapshots_that_expire_between_two_tables_take_nothing_from_the_history(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead letters are rare: those before may be older than snapshots are kept."""
    archive.commit(0, rows(0, 10, bad=3))

    def crash(point: str, batch: int) -> None:
        if point == "dead-committed":
            raise Crash

    with monkeypatch.context() as patched:
        patched.setattr("headrace.spark.faults.reached", crash)
        with pytest.raises(Crash):
            archive.commit(1, rows(10, 10, bad=3))
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    for name in (RECORDS, DEAD_LETTERS):
        iceberg_tables.expire(archive.folder, name, later)

    def offsets() -> list[int]:
        parts = History(archive.folder).parts("t", {0: (0, 100)})
        return sorted(n for part in parts for rows in read_part(part, ["offset"]) for n in rows["offset"].to_pylist())

    assert offsets() == list(range(10))
    dead = archive.table(DEAD_LETTERS)
    dead.maintenance.expire_snapshots().older_than(later).commit()
    with pytest.raises(OperatorError, match="in the middle of a batch, and the snapshot before that has expired"):
        offsets()
    archive.commit(1, rows(10, 10, bad=3))
    assert offsets() == list(range(20))


@proves("S13")
def test_abort_removes_nothing_that_may_be_committed(archive: Archive) -> None:
    lost = archive.written(0, rows(0, 10))
    archive.writer().abort(lost, 0)
    kept = archive.written(0, rows(0, 10, bad=2))
    archive.writer().commit(kept, 0)
    archive.writer().abort(kept, 0)
    assert (archive.offsets(), archive.offsets(DEAD_LETTERS)) == (list(range(8)), [8, 9])
    assert archive.files() == 2


class Crash(BaseException):
    pass


@proves("S13")
def test_a_crash_between_the_two_tables_is_mended_by_the_second_run(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(point: str, batch: int) -> None:
        if point == "dead-committed":
            raise Crash

    with monkeypatch.context() as patched:
        patched.setattr("headrace.spark.faults.reached", crash)
        with pytest.raises(Crash):
            archive.commit(0, rows(0, 10, bad=3))
    assert archive_tables.half_committed(archive.folder)
    assert archive_tables.archived_offsets(archive.folder) == {}
    assert History(archive.folder).ends == {}
    archive.commit(0, rows(0, 10, bad=3))
    assert not archive_tables.half_committed(archive.folder)
    assert (archive.offsets(), archive.offsets(DEAD_LETTERS)) == (list(range(7)), [7, 8, 9])
    assert archive_tables.archived_offsets(archive.folder) == {("t", 0): 10}
    archive.commit(1, rows(10, 2, bad=2))
    assert not archive_tables.half_committed(archive.folder)
    assert archive_tables.archived_offsets(archive.folder) == {("t", 0): 12}


@proves("S13")
def test_a_commit_whose_answer_is_lost_is_found_by_the_second_run(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = iceberg_tables._commit

    def lose(*given: Any) -> None:
        commit(*given)
        raise ConnectionError("no answer")

    lost = archive.written(0, rows(0, 10))
    with monkeypatch.context() as patched:
        patched.setattr(iceberg_tables, "_commit", lose)
        with pytest.raises(OperatorError, match="no answer"):
            archive.writer().commit(lost, 0)
    archive.writer().abort(lost, 0)
    archive.commit(0, rows(0, 10))
    assert archive.offsets() == list(range(10))
    assert archive.files() == 1


@proves("S13")
def test_a_second_life_that_commits_the_batch_in_between_is_noticed(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when another program has turned on the tries of `pyiceberg`, which would add the files a second time."""
    with archive.table().transaction() as transaction:
        transaction.set_properties({iceberg_tables.RETRIES: "4"})
    commit, meanwhile = iceberg_tables._commit, [archive.written(0, rows(0, 10))]

    def overtaken(*given: Any) -> None:
        if meanwhile:
            archive.writer().commit(meanwhile.pop(), 0)
        commit(*given)

    monkeypatch.setattr(iceberg_tables, "_commit", overtaken)
    archive.commit(0, rows(0, 10))
    assert archive.offsets() == list(range(10))
    assert archive.files() == 1


@proves("S13")
def test_writers_at_the_same_time_all_get_through(archive: Archive) -> None:
    failures: list[BaseException] = []

    def write(partition: int) -> None:
        try:
            for batch in range(3):
                archive.commit(batch, rows(batch * 5, 5, partition=partition), query=f"q{partition}")
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)

    threads = [threading.Thread(target=write, args=(partition,)) for partition in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert archive_tables.archived_offsets(archive.folder) == {("t", n): 15 for n in range(3)}
    assert archive.offsets() == sorted([*range(15)] * 3)


def test_offsets_that_come_again_under_another_batch_are_refused(archive: Archive) -> None:
    archive.commit(0, rows(0, 10))
    for query, batch in (("q", 1), ("other", 0)):
        with pytest.raises(OperatorError, match="archived up to offset 9, and now 5 comes again"):
            archive.commit(batch, rows(5, 10), query=query)
    with pytest.raises(OperatorError, match="the checkpoint has lost its offsets"):
        archive.commit(0, rows(0, 15))
    assert archive.offsets() == list(range(10))


@proves("S13")
def test_files_are_swept_only_once_their_batch_is_committed(archive: Archive) -> None:
    archive.commit(0, rows(0, 10))
    late = archive.written(1, rows(10, 10))
    assert archive_tables.sweep(archive.folder, "q") == 0
    archive.writer().commit(late, 1)
    archive.written(1, rows(10, 10))
    assert archive_tables.sweep(archive.folder, "q") == 1
    assert archive.offsets() == list(range(20))


@proves("S13")
def test_a_loss_of_power_takes_nothing_that_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, manifests and metadata, and their names, are on disk before the catalog names them."""
    archive = Archive(tmp_path / "archive")
    synced: list[Path] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        sync(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "fsync", note)
    before = set((archive.folder / RECORDS).rglob("*.*"))
    archive.commit(0, rows(0, 10))
    new = set((archive.folder / RECORDS).rglob("*.*")) - before
    assert {path.suffix for path in new} == {".parquet", ".avro", ".json"}
    assert {*new, *(path.parent for path in new)} <= set(synced)


@proves("S13", "S12")
def test_the_history_of_an_archive_is_read_by_offset_and_time(archive: Archive) -> None:
    for batch in range(3):
        archive.commit(batch, rows(10 * batch, 10, days=2, bad=1))
    history = History(archive.folder)
    assert history.ends == {("t", 0): 30}
    assert history.starts() == {("t", 0): 0}
    found = [
        offset
        for part in history.parts("t", {0: (5, 25)})
        for batch in read_part(part, ("offset", "value"))
        for offset in batch["offset"].to_pylist()
    ]
    assert sorted(found) == list(range(5, 25))
    assert history.first_at(("t", 0), round((DAY + datetime.timedelta(hours=1)).timestamp() * 1000)) == 1
    with pytest.raises(Exception, match="a condition in SQL needs a Delta archive"):
        history.chosen_offsets(("t", 0), (0, 10), "partition = 0")


def test_columns_that_are_added_are_there_and_others_are_refused(archive: Archive) -> None:
    archive.commit(0, rows(0, 10))
    wider = ROWS.append(pa.field("country", pa.string()))
    iceberg_tables.make(archive.folder, archive.known, RECORDS, wider, by_day=True)
    assert [field.name for field in archive.table().schema().fields] == [*RECORD_COLUMNS, "country"]
    assert archive.offsets() == list(range(10))
    other = ROWS.append(pa.field("country", pa.int64()))
    with pytest.raises(OperatorError, match=r"do not fit the table .*give a --schema that fits"):
        iceberg_tables.make(archive.folder, archive.known, RECORDS, other, by_day=True)


def test_what_another_program_has_deleted_is_told(archive: Archive) -> None:
    archive.commit(0, rows(0, 10))
    with pytest.raises(OperatorError, match=r"is listed as archive in its own catalog"):
        iceberg_tables.check(archive.folder, Where(namespace="other"))
    with pytest.raises(OperatorError, match=r"has a \? or #"):
        iceberg_tables.check(archive.folder.parent / "a?b", Where())
    assert isinstance(archive_tables.opened(archive.folder, RECORDS), IcebergVersion)
    (archive.folder / iceberg.WHERE).write_text("{")
    with pytest.raises(OperatorError, match=r"iceberg.json cannot be read"):
        History(archive.folder)


@proves("S13")
def test_tables_can_be_listed_in_a_rest_catalog(tmp_path: Path) -> None:
    with RestCatalogServer(tmp_path / "server") as server:
        archive = Archive(tmp_path / "archive", Where(server.uri, "ours"))
        for batch in range(2):
            archive.commit(batch, rows(10 * batch, 10, bad=1))
            archive.commit(batch, rows(10 * batch, 10, bad=1))
        assert History(archive.folder).ends == {("t", 0): 20}
        found = server.catalog.load_table("ours.records").scan().to_arrow()["offset"].to_pylist()
        assert sorted(found) == [*range(9), *range(10, 19)]
        with pytest.raises(OperatorError, match="give another --namespace"):
            Archive(tmp_path / "another", Where(server.uri, "ours"))
    with pytest.raises(OperatorError, match=r"the Iceberg catalog http://.* does not do its work"):
        History(archive.folder)
