"""Rows of a Delta or Parquet table in one order, and the same state of it whenever it is opened again."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from headrace.arrow import stored_table
from headrace.arrow.stored_table import Snapshot, StoredTable
from headrace.errors import OperatorError


def rows(first: int, count: int) -> pa.Table:
    return pa.table({"n": pa.array(range(first, first + count), pa.int64()), "text": ["x" * 10] * count})


def numbers(table: StoredTable, first: int = 0, most_rows: int = 10) -> list[int]:
    found: list[int] = []
    for at, window in table.windows(first, ["n"], most_rows):
        assert at == first + len(found)
        assert 0 < len(window) <= most_rows
        found += window["n"].to_pylist()
    return found


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """Files of 25 rows in groups of 7, and one of none; and what is no part of the table."""
    folder = tmp_path / "a table"
    folder.mkdir()
    for number in range(4):
        pq.write_table(rows(number * 25, 25), folder / f"part-{number}.parquet", row_group_size=7)
    pq.write_table(rows(0, 0), folder / "part-1b.parquet")
    (folder / "_SUCCESS").touch()
    (folder / "_temporary").mkdir()
    pq.write_table(rows(1000, 3), folder / "_temporary" / "part-9.parquet")
    (folder / ".part-0.parquet.crc").touch()
    return folder


def test_rows_come_in_the_order_of_files_from_any_row_on(parquet: Path, seed: int) -> None:
    table = StoredTable(parquet)
    assert table.rows == 100
    assert numbers(table) == list(range(100))
    draw = random.Random(seed)
    for _ in range(20):
        first = draw.randrange(101)
        assert numbers(table, first, draw.randint(1, 60)) == list(range(first, 100))
    assert table.bounds("n") == (0, 99)
    assert numbers(StoredTable(parquet / "part-2.parquet")) == list(range(50, 75))


def test_a_window_ends_by_its_bytes_too(parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_table, "WINDOW_BYTES", 50)
    found = [len(window) for _, window in StoredTable(parquet).windows(0, ["n"], 1000)]
    assert sum(found) == 100
    assert max(found) < 8


def test_a_parquet_table_that_changed_is_another_state(parquet: Path) -> None:
    before = StoredTable(parquet).snapshot
    assert Snapshot.of_json(json.loads(json.dumps(before.as_json()))) == before
    os.utime(parquet / "part-2.parquet", (5, 5))
    assert StoredTable(parquet, before).snapshot == before
    other = rows(50, 25).set_column(1, "text", pa.array(["y" * 10] * 25))
    pq.write_table(other, parquet / "part-2.parquet", row_group_size=7)
    with pytest.raises(OperatorError, match="have changed since: there were 100 rows, now there are 100"):
        StoredTable(parquet, before)
    pq.write_table(rows(50, 25), parquet / "part-2.parquet", row_group_size=7)
    assert StoredTable(parquet, before).snapshot == before
    pq.write_table(rows(0, 1), parquet / "part-7.parquet")
    with pytest.raises(OperatorError, match="now there are 101"):
        StoredTable(parquet, before)


def test_values_in_folder_names_are_columns(tmp_path: Path) -> None:
    for year, city in ((2025, "a b"), (2026, None)):
        folder = tmp_path / f"year={year}" / f"city={'__HIVE_DEFAULT_PARTITION__' if city is None else 'a%20b'}"
        folder.mkdir(parents=True)
        pq.write_table(rows(year, 1), folder / "x.parquet")
    table = StoredTable(tmp_path)
    ((_, found),) = table.windows(0, ["n", "year", "city"], 10)
    assert [tuple(row.values()) for row in found.to_pylist()] == [(2025, 2025, "a b"), (2026, 2026, None)]
    ((_, only),) = table.windows(0, ["year"], 10)
    assert only["year"].to_pylist() == [2025, 2026]
    assert table.bounds("year") == (2025, 2026)


def test_files_may_have_fewer_columns_and_narrower_types(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": pa.array([1], pa.int32())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": pa.array([2], pa.int64()), "late": ["x"]}), tmp_path / "b.parquet")
    ((_, found),) = StoredTable(tmp_path).windows(0, ["n", "late"], 10)
    assert found.to_pydict() == {"n": [1, 2], "late": [None, "x"]}
    pq.write_table(pa.table({"n": [[1]]}), tmp_path / "c.parquet")
    with pytest.raises(OperatorError, match="have columns that do not fit together"):
        StoredTable(tmp_path)


def test_a_delta_table_is_read_at_its_version(tmp_path: Path) -> None:
    path = tmp_path / "a delta"
    for first in (0, 10, 20):
        write_deltalake(path, rows(first, 10), mode="append")
    before = StoredTable(path).snapshot
    assert numbers(StoredTable(path)) == list(range(30))
    write_deltalake(path, rows(0, 3), mode="overwrite")
    now, then = StoredTable(path), StoredTable(path, before)
    assert (numbers(now), numbers(then)) == ([0, 1, 2], list(range(30)))
    assert (then.snapshot.version, then.newest_version) == (2, 3)
    DeltaTable(path).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(OperatorError, match=r"is gone: version 2 of the Delta table .* was vacuumed"):
        StoredTable(path, before)
    with pytest.raises(OperatorError, match="made anew since"):
        StoredTable(path, Snapshot("other", 3, 3))


def test_partition_columns_and_later_columns_of_a_delta_table(tmp_path: Path) -> None:
    write_deltalake(tmp_path, rows(0, 2).append_column("city", pa.array(["a b", None])), partition_by=["city"])
    more = rows(2, 1).append_column("city", pa.array(["c"])).append_column("late", pa.array([5]))
    write_deltalake(tmp_path, more, mode="append", schema_mode="merge")
    ((_, found),) = StoredTable(tmp_path).windows(0, ["n", "city", "late"], 10)
    told = sorted(tuple(row.values()) for row in found.to_pylist())
    assert told == [(0, "a b", None), (1, None, None), (2, "c", 5)]


def test_what_is_no_table_is_told(tmp_path: Path, parquet: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"no Parquet at all")
    write_deltalake(tmp_path / "lake" / "one", rows(0, 1))
    for path, told in {
        "nothing": "there is no table at .*nothing",
        "empty": r"empty is no Delta table and has no files \*.parquet",
        "bad.parquet": "bad.parquet cannot be read as Parquet",
        "lake": "lake/one is a table of its own; name that",
    }.items():
        with pytest.raises(OperatorError, match=told):
            StoredTable(tmp_path / path)
    with pytest.raises(OperatorError, match="local or mounted"):
        StoredTable("s3://bucket/table")
    table = StoredTable(parquet)
    (parquet / "part-3.parquet").unlink()
    with pytest.raises(OperatorError, match=r"part-3.parquet is gone"):
        numbers(table)


def test_a_delta_table_whose_rows_are_not_all_in_its_files_is_refused(tmp_path: Path) -> None:
    write_deltalake(tmp_path, rows(0, 1))
    log = tmp_path / "_delta_log" / f"{0:020}.json"
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7}
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    changed = [{"protocol": {**protocol, **features}} if "protocol" in line else line for line in lines]
    log.write_text("\n".join(map(json.dumps, changed)))
    with pytest.raises(OperatorError, match=r"cannot be read as plain Parquet \(deletionVectors\)"):
        StoredTable(tmp_path)


def test_of_a_folder_of_sparks_file_sink_only_what_its_log_lists_is_read(parquet: Path) -> None:
    log = parquet / "_spark_metadata"
    log.mkdir()
    listed = [{"path": (parquet / f"part-{n}.parquet").as_uri(), "action": "add"} for n in (0, 2)]
    (log / "0").write_text("\n".join(["v1", *map(json.dumps, listed)]))
    assert numbers(StoredTable(parquet)) == [*range(25), *range(50, 75)]
