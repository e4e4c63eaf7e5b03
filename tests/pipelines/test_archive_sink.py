"""The archive's sink without Spark: what the tables hold after every order of commit, crash, replay and abort."""

from __future__ import annotations

import datetime
import os
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from archive_tables import Traffic, append
from headrace.arrow.history import next_offsets
from headrace.errors import OperatorError
from headrace.pipelines import archive_files, archive_tables, delta
from headrace.pipelines.archive_files import FileSet
from headrace.pipelines.archive_sink import ArchiveWriter, FilesWritten, parted
from headrace.pipelines.archive_tables import DEAD_LETTERS, DEAD_SCHEMA, RECORD_COLUMNS, RECORDS, RECORDS_SCHEMA
from proving import proves

INSIDE = pa.schema([field for field in RECORDS_SCHEMA if field.name not in ("topic", "date")])
DAY = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)


def rows(first: int, count: int, *, partition: int = 0, days: int = 1, bad: int = 0) -> pa.RecordBatch:
    """Records of which the last `bad` have a reason."""
    schema = pa.schema([*(RECORDS_SCHEMA.field(name) for name in RECORD_COLUMNS), ("reason", pa.string())])
    return pa.RecordBatch.from_pylist(
        [
            {
                "topic": "t", "partition": partition, "offset": n, "timestampType": 0, "value": b"v%d" % n,
                "timestamp": DAY + datetime.timedelta(days=n % days),
                "reason": "bad" if n >= first + count - bad else None,
            }
            for n in range(first, first + count)
        ],
        schema,
    )  # fmt: skip


class Archive:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        archive_tables.make_records(folder / RECORDS)
        archive_tables.make_dead_letters(folder / DEAD_LETTERS)

    def writer(self, query: str = "q") -> ArchiveWriter:
        return ArchiveWriter(self.folder, query, delta.to_spark(pa.schema([("topic", pa.string()), *INSIDE])))

    def written(self, batch: int, *batches: pa.RecordBatch, query: str = "q") -> list[Any]:
        """What a task answers."""
        records = FileSet(self.folder / RECORDS, f"{query}-{batch:08}-00000", INSIDE, by_date=True)
        dead = FileSet(self.folder / DEAD_LETTERS, f"{query}-{batch:08}-00000", DEAD_SCHEMA, by_date=False)
        for each in batches:
            good, wrong = parted(each)
            records.add(good)
            if len(wrong):
                dead.add(wrong)
        return [None, FilesWritten(tuple(records.close()), tuple(dead.close()))]

    def offsets(self, name: str = RECORDS) -> list[int]:
        found: list[int] = DeltaTable(str(self.folder / name)).to_pyarrow_table()["offset"].to_pylist()
        return sorted(found)

    def files(self) -> int:
        return len(list(self.folder.rglob("*.parquet")))


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """In a folder whose name a URI would write otherwise."""
    return Archive(tmp_path / "my archive ü")


@proves("S4")
def test_a_batch_is_added_once_and_its_second_run_leaves_nothing(archive: Archive) -> None:
    """Neither do tasks that died beside the one that counts."""
    archive.written(0, rows(0, 10))
    first = archive.written(0, rows(0, 10))
    archive.writer().commit(first, 0)
    assert archive.files() == 1
    archive.writer().commit(first, 0)
    archive.writer().commit(archive.written(0, rows(0, 10)), 0)
    assert archive.offsets() == list(range(10))
    assert archive.files() == 1
    assert DeltaTable(str(archive.folder / RECORDS)).version() == 1


@proves("S4")
def test_a_loss_of_power_takes_nothing_that_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table names is synced before it is named: files, the folders they are in, and the names of these."""
    synced: list[Path] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        sync(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "fsync", note)
    archive = Archive(tmp_path / "new" / "archive")
    records = archive.folder / RECORDS
    log = records / delta.LOG_FOLDER
    assert {tmp_path, tmp_path / "new", archive.folder, records, log, log / f"{0:020}.json"} <= set(synced)
    synced.clear()
    written = archive.written(0, rows(0, 10, days=2, bad=1))
    files = sorted(records.rglob("*.parquet"))
    assert len(files) == 2
    assert {*files, *(file.parent for file in files), records / "topic=t", records} <= set(synced)
    synced.clear()
    archive.writer().commit(written, 0)
    assert {log, log / f"{1:020}.json"} <= set(synced)


@proves("S4")
def test_abort_removes_files_but_not_those_of_a_commit_that_succeeded(archive: Archive) -> None:
    lost = archive.written(0, rows(0, 10))
    archive.writer().abort(lost, 0)
    assert archive.files() == 0
    kept = archive.written(0, rows(0, 10, bad=2))
    archive.writer().commit(kept, 0)
    archive.writer().abort(kept, 0)
    assert (archive.offsets(), archive.offsets(DEAD_LETTERS)) == (list(range(8)), [8, 9])


@proves("S4")
def test_a_crash_between_the_two_tables_is_mended_by_the_second_run(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException):
        pass

    def crash(point: str, batch: int) -> None:
        if point == "dead-committed":
            raise Crash

    with monkeypatch.context() as patched:
        patched.setattr("headrace.spark.faults.reached", crash)
        with pytest.raises(Crash):
            archive.writer().commit(archive.written(0, rows(0, 10, bad=3)), 0)
    assert archive_tables.half_committed(archive.folder)
    assert archive_tables.archived_offsets(archive.folder) == {}
    archive.writer().commit(archive.written(0, rows(0, 10, bad=3)), 0)
    assert not archive_tables.half_committed(archive.folder)
    assert (archive.offsets(), archive.offsets(DEAD_LETTERS)) == (list(range(7)), [7, 8, 9])
    assert archive_tables.archived_offsets(archive.folder) == {("t", 0): 10}


@proves("S4")
def test_a_batch_of_dead_letters_alone_counts_as_archived(archive: Archive) -> None:
    archive.writer().commit(archive.written(0, rows(0, 4, bad=4)), 0)
    assert not archive_tables.half_committed(archive.folder)
    assert archive_tables.archived_offsets(archive.folder) == {("t", 0): 4}


def test_offsets_that_come_again_under_another_batch_are_refused(archive: Archive) -> None:
    archive.writer().commit(archive.written(0, rows(0, 10)), 0)
    for query, batch in (("q", 1), ("other", 0)):
        with pytest.raises(OperatorError, match="archived up to offset 9, and now 5 comes again"):
            archive.writer(query).commit(archive.written(batch, rows(5, 10), query=query), batch)
    assert archive.offsets() == list(range(10))


def test_a_known_batch_with_more_in_it_than_the_table_has_is_refused(archive: Archive) -> None:
    archive.writer().commit(archive.written(0, rows(0, 10)), 0)
    with pytest.raises(OperatorError, match="the checkpoint has lost its offsets"):
        archive.writer().commit(archive.written(0, rows(0, 15)), 0)


@proves("S4")
def test_writers_at_the_same_time_all_get_through(archive: Archive) -> None:
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for batch in range(5):
                written = archive.written(batch, rows(batch * 10, 10, partition=number), query=f"q{number}")
                archive.writer(f"q{number}").commit(written, batch)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert archive.offsets() == sorted(list(range(50)) * 3)


def test_a_file_has_one_partition_and_one_date(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when more dates come than files may be open, and when files grow beyond their bound."""
    monkeypatch.setattr(archive_files, "OPEN_FILES", 3)
    monkeypatch.setattr(archive_files, "FILE_BYTES", 1)
    monkeypatch.setattr(archive_files, "ROW_GROUP_ROWS", 7)
    mixed = pa.Table.from_batches([rows(0, 60, days=6), rows(0, 30, partition=1, days=2)]).combine_chunks()
    written = archive.written(0, *mixed.to_batches(max_chunksize=20))
    archive.writer().commit(written, 0)
    listed = pa.table(DeltaTable(str(archive.folder / RECORDS)).get_add_actions(flatten=True)).to_pylist()
    assert len(listed) > 8
    assert all(file["min.partition"] == file["max.partition"] for file in listed)
    assert all(file["min.timestamp"].date() == file["partition.date"] for file in listed)
    assert sum(file["num_records"] for file in listed) == 90
    assert archive.offsets() == sorted([*range(60), *range(30)])


def test_offsets_are_known_of_files_that_hold_several_partitions(archive: Archive) -> None:
    """As compaction makes them."""
    archive.writer().commit(archive.written(0, rows(0, 10), rows(0, 20, partition=1)), 0)
    table = DeltaTable(str(archive.folder / RECORDS))
    write_deltalake(table, table.to_pyarrow_table(), mode="overwrite")
    assert len(DeltaTable(str(archive.folder / RECORDS)).file_uris()) == 1
    assert archive_tables.archived_offsets(archive.folder) == {("t", 0): 10, ("t", 1): 20}


@proves("S4")
def test_files_are_swept_only_once_their_batch_is_committed(archive: Archive) -> None:
    """A worker may outlive its driver and commit what it has written after the next run has begun."""
    archive.writer().commit(archive.written(0, rows(0, 10)), 0)
    late = archive.written(1, rows(10, 10))
    archive.written(1, rows(10, 10), query="another")
    assert archive_tables.sweep(archive.folder, "q") == 0
    again = archive.written(1, rows(10, 10))
    archive.writer().commit(late, 1)
    archive.writer().commit(again, 1)
    assert archive.offsets() == list(range(20))
    archive.written(1, rows(10, 10))
    assert archive_tables.sweep(archive.folder, "q") == 1
    assert archive.files() == 3
    assert archive.offsets() == list(range(20))


@proves("S4")
def test_a_batch_whose_files_are_gone_does_not_count_as_archived(archive: Archive) -> None:
    archive.writer().commit(archive.written(0, rows(0, 10)), 0)
    for path in archive.folder.rglob("*.parquet"):
        path.unlink()
    with pytest.raises(OperatorError, match="as archived, and that file is gone"):
        archive.writer().commit(archive.written(0, rows(0, 10)), 0)


def test_files_of_topics_that_nobody_asks_for_are_not_looked_into(tmp_path: Path) -> None:
    append(tmp_path, Traffic(1, ("asked", "other")).rows(40), mixed=True)
    for file in (tmp_path / RECORDS).glob("topic=other/*/*.parquet"):
        file.unlink()
    found = next_offsets(delta.open_table(tmp_path / RECORDS), {"asked"})
    assert found == {("asked", 0): 40, ("asked", 1): 40}
