"""Compaction of an archive: the same records in fewer files, whoever writes or dies meanwhile; the latest per key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType

from archive_tables import MIDNIGHT_MS, Row, Traffic, append, rows_of
from headrace.arrow.archive import Bounds, File, list_files
from headrace.pipelines import compact, delta, durable, latest
from headrace.pipelines.compact import CompactOptions
from headrace.pipelines.summary import Progress
from headrace.spark import faults
from proving import proves

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def records(archive: Path) -> DeltaTable:
    return DeltaTable(str(archive / "records"))


def parquet_files(archive: Path) -> set[str]:
    return {str(path.relative_to(archive / "records")) for path in (archive / "records").rglob("*.parquet")}


@proves("S7")
def test_same_records_in_fewer_files_by_one_version(tmp_path: Path, spark: SparkSession, seed: int) -> None:
    traffic = Traffic(seed)
    for mixed in (False, False, False, True):
        append(tmp_path, traffic.rows(40), mixed)
    before, files_before, version = rows_of(tmp_path), list_files(records(tmp_path)), records(tmp_path).version()
    summary = compact.run(spark, CompactOptions(tmp_path, vacuum_hours=0), Progress())
    files = list_files(records(tmp_path))
    assert rows_of(tmp_path) == before
    assert len(files) < len(files_before) * 0.7
    assert summary.facts["files_merged"] > summary.facts["files_written"]
    assert parquet_files(tmp_path) == {file.path for file in files}
    log = (tmp_path / "records" / "_delta_log" / f"{version + 1:020}.json").read_text().splitlines()
    actions = [json.loads(line) for line in log]
    changes = [action.get("add") or action.get("remove") for action in actions if "add" in action or "remove" in action]
    assert len(changes) > 8
    assert not any(change["dataChange"] for change in changes)
    merged = {action["add"]["path"] for action in actions if "add" in action}
    for file in files:
        if file.path in merged:
            check_file(tmp_path / "records" / file.path, file)
    compact.run(spark, CompactOptions(tmp_path), Progress())
    assert list_files(records(tmp_path)) == files


def check_file(path: Path, file: File) -> None:
    rows = pq.read_table(path, columns=["partition", "offset", "timestamp"], partitioning=None)
    offsets = rows["offset"].to_pylist()
    assert offsets == sorted(offsets)
    times_us = [round(at.timestamp() * 1e6) for at in rows["timestamp"].to_pylist()]
    partitions = rows["partition"].to_pylist()
    assert file.bounds == Bounds(
        (partitions[0], partitions[0]), (offsets[0], offsets[-1]), (min(times_us), max(times_us))
    )
    assert set(partitions) == {partitions[0]}
    assert file.rows == len(offsets)


@proves("S7")
def test_others_may_write_and_compact_meanwhile(
    tmp_path: Path, spark: SparkSession, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook is the point where a run has written its files and committed nothing."""
    traffic = Traffic(seed, topics=("orders",), partitions=1)
    append(tmp_path, traffic.rows(50))
    append(tmp_path, traffic.rows(50))
    meanwhile = ["append", "compact"]

    def reached(point: str, batch: int) -> None:
        if point != "compact-written" or not meanwhile:
            return
        if meanwhile.pop(0) == "append":
            append(tmp_path, traffic.rows(50))
        else:
            compact.run(spark, CompactOptions(tmp_path), Progress())

    monkeypatch.setattr(faults, "reached", reached)
    compact.run(spark, CompactOptions(tmp_path), Progress())
    assert [row.offset for row in rows_of(tmp_path)] == list(range(150))
    append(tmp_path, traffic.rows(50))
    compact.run(spark, CompactOptions(tmp_path), Progress())
    assert meanwhile == []
    assert [row.offset for row in rows_of(tmp_path)] == list(range(200))


def a_file(name: str, size: int, partition: int = 0, offset: int = 0, topic: str = "t", at_ms: int = 0) -> File:
    return File(name, size, 1, at_ms, topic, "2026-11-15", Bounds((partition, partition), (offset, offset), None))


def planned(files: list[File], **options: object) -> list[list[str]]:
    bins = compact.plan(files, CompactOptions(Path(), target_bytes=100, **options))  # type: ignore[arg-type]
    return [[file.path for file in files] for files in bins]


def test_bins_hold_neighbours_of_one_partition() -> None:
    files = [a_file("c", 30, 0, 9), a_file("a", 40, 0, 1), a_file("b", 40, 0, 5), a_file("d", 10, 0, 12)]
    assert planned(files) == [["a", "b"], ["c", "d"]]
    assert planned([a_file("a", 40), a_file("b", 40, partition=1), a_file("c", 40, topic="u")]) == []
    assert planned([a_file("large", 60), a_file("a", 40), a_file("b", 5, offset=1)]) == [["a", "b"]]


def test_only_files_that_were_asked_for() -> None:
    files = [a_file("a", 1, at_ms=5), a_file("b", 1, at_ms=6), a_file("c", 1, at_ms=7), a_file("u", 1, topic="u")]
    assert planned(files, older_than_ms=7) == [["a", "b"]]
    assert planned(files, topics=("u",)) == []
    assert planned(files, topics=("t",)) == [["a", "b", "c"]]


@proves("S7")
def test_latest_record_of_each_key(tmp_path: Path, spark: SparkSession, seed: int) -> None:
    traffic = Traffic(seed, partitions=1)
    append(tmp_path, traffic.rows(200))
    append(tmp_path, traffic.rows(200))
    # A key that moved to another partition: the later of the two counts, here and there.
    moved = [("up", 100, 200), ("down", 200, 100)]
    append(
        tmp_path, [Row("orders", 7, n, MIDNIGHT_MS + at, key.encode(), b"7") for n, (key, at, _) in enumerate(moved)]
    )
    append(
        tmp_path, [Row("orders", 8, n, MIDNIGHT_MS + at, key.encode(), None) for n, (key, _, at) in enumerate(moved)]
    )
    expected: dict[tuple[str, bytes], Row] = {}
    for row in rows_of(tmp_path):
        if row.key is not None and row.partition == 0:
            expected[row.topic, row.key] = row
    found = latest_rows(tmp_path, spark)
    assert found.pop(("orders", b"down")) == (7, 1, b"7")
    assert found == {
        place: (row.partition, row.offset, row.value) for place, row in expected.items() if row.value is not None
    }
    append(tmp_path, [Row("orders", 7, 2, MIDNIGHT_MS + 300, b"down", None)])
    assert ("orders", b"down") not in latest_rows(tmp_path, spark, topics=("orders",))


def latest_rows(archive: Path, spark: SparkSession, **options: object) -> dict[tuple[str, bytes], tuple[object, ...]]:
    latest.run(spark, latest.LatestOptions(archive, **options), Progress())  # type: ignore[arg-type]
    rows = delta.read(spark, archive / "latest").collect()
    assert len({(row["topic"], bytes(row["key"])) for row in rows}) == len(rows)
    return {(row["topic"], bytes(row["key"])): (row["partition"], row["offset"], bytes(row["value"])) for row in rows}


@proves("S7")
def test_new_columns_of_the_latest_records_are_on_disk_before_they_are_used(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, Traffic(seed).rows(5))
    latest._open_latest(tmp_path, records(tmp_path))
    archived = records(tmp_path)
    archived.alter.add_columns([Field("country", PrimitiveType("string"))])
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync", lambda file, *_: synced.append(file))
    table = latest._open_latest(tmp_path, archived)
    assert {field.name for field in table.schema().fields} >= {"country"}
    assert synced == [tmp_path / "latest" / "_delta_log" / f"{table.version():020}.json"]
