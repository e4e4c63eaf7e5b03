"""An archive that merges its small files while it runs: fewer files, the same records, whoever reads or dies meanwhile.

Most of it without Spark: batches are archived as the pipeline does it, and merged between them.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType

from archive_tables import Row, Traffic, append, rows_of
from brokers import Broker
from clients.topics import create_topic
from headrace.arrow.archive import Bounds, File, list_files, row_group_bounds
from headrace.arrow.history import History, read_part
from headrace.errors import OperatorError
from headrace.pipelines import archive, archive_tables, delta, small_files, table_files
from headrace.pipelines.small_files import MergeOptions, SmallFiles
from headrace.spark import faults
from pipelines.archived_world import World
from pipelines.archives import archive_rows, produce, records_table, topic_rows, values
from pipelines.fault_actors import TOPIC, Driver, lines, send
from proving import proves

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW_MS = 1_800_000_000_000


def a_file(first: int, size: int, *, records: int = 10, partition: int = 0, date: str = "2026-11-15") -> File:
    bounds = Bounds((partition, partition), (first, first + records - 1), None)
    return File(f"{partition}-{first}", size, records, NOW_MS, "t", date, bounds)


def planned(files: list[File], after_ms: int = 0) -> list[list[str]]:
    bins = small_files.plan(files, MergeOptions(target_bytes=1000, fan_in=3), NOW_MS + after_ms)
    return [[file.path for file in files] for files in bins]


def test_neighbours_of_one_size_are_merged_when_there_are_enough_of_them() -> None:
    assert planned([a_file(10, 5), a_file(0, 5)]) == []
    assert planned([a_file(20, 5), a_file(10, 5), a_file(0, 5)]) == [["0-0", "0-10", "0-20"]]
    assert planned([a_file(0, 400), a_file(10, 5), a_file(20, 5), a_file(30, 5)]) == [["0-10", "0-20", "0-30"]]
    assert planned([a_file(0, 60), a_file(10, 5), a_file(20, 60), a_file(30, 60)]) == [["0-0", "0-10", "0-20", "0-30"]]


def test_no_large_file_is_written_again_for_the_sake_of_small_ones() -> None:
    assert planned([a_file(0, 60), a_file(10, 5), a_file(20, 5)]) == []
    assert planned([a_file(0, 60), a_file(10, 50), a_file(20, 5)]) == [["0-0", "0-10", "0-20"]]


def test_merged_files_are_cut_at_the_target_size_and_large_ones_stay() -> None:
    files = [a_file(10 * n, 400) for n in range(5)]
    assert planned(files) == [["0-0", "0-10"], ["0-20", "0-30"]]
    assert planned([a_file(0, 5), a_file(10, 600), a_file(20, 5), a_file(30, 5)]) == []


def test_other_dates_and_partitions_and_what_overlaps_are_no_neighbours() -> None:
    assert planned([a_file(0, 5), a_file(10, 5, partition=1), a_file(20, 5, date="2026-11-16")]) == []
    assert planned([a_file(0, 5), a_file(10, 5), a_file(15, 5), a_file(30, 5)]) == []
    unknown = File("x", 5, 10, NOW_MS, "t", "2026-11-15", Bounds(None, (10, 19), None))
    assert planned([a_file(0, 5), unknown, a_file(20, 5)]) == []


def test_what_is_at_rest_is_merged_without_waiting_for_more() -> None:
    files = [a_file(0, 300), a_file(10, 5)]
    assert planned(files, small_files.REST_MS - 1) == []
    assert planned(files, small_files.REST_MS) == [["0-0", "0-10"]]


@proves("S7")
def test_a_day_of_batches_is_few_files_and_each_record_was_written_a_few_times() -> None:
    """In numbers alone: a file of 10 kB a minute, merged after each."""
    options, names = MergeOptions(target_bytes=8 << 20), itertools.count()
    files: list[File] = []
    most = rewritten = 0
    for minute in range(1440):
        files.append(a_file(10 * minute, 10_000))
        while bins := small_files.plan(files, options, NOW_MS):
            for some in bins:
                assert sum(file.size_bytes for file in some) <= options.target_bytes
                records = sum(file.rows for file in some)
                merged = a_file(min(file.bounds.offset[0] for file in some if file.bounds.offset), 0, records=records)
                size = sum(file.size_bytes for file in some)
                files = [file for file in files if file not in some]
                files.append(File(f"m{next(names)}", size, records, NOW_MS, "t", merged.date, merged.bounds))
                rewritten += records
        most = max(most, len(files))
    assert sum(file.rows for file in files) == 14_400
    assert most <= 30
    assert rewritten <= 5 * 14_400


def merger(folder: Path, **options: int) -> SmallFiles:
    return SmallFiles(folder, MergeOptions(**{"fan_in": 2, **options}))


@proves("S7", "S12")
def test_archive_and_broker_are_all_that_was_written_while_files_are_merged(
    broker: Broker, tmp_path: Path, seed: int
) -> None:
    """Also for one who began to read before: what he was promised is there to the end."""
    draw = random.Random(seed)
    world = World(broker, tmp_path / "an archive", draw)
    small = merger(world.folder)
    steps = [world.produce, world.produce, world.archive, world.archive, world.delete, small.merge_some]
    for _ in range(30):
        history = History(world.folder)
        expected = {n: [row[0] for row in world.written[n][: history.ends.get((world.topic, n), 0)]] for n in range(3)}
        for _ in range(3):
            draw.choice(steps)()
        archive_tables.sweep(world.folder, "q")
        assert archived_offsets(history, world.topic) == {n: offsets for n, offsets in expected.items() if offsets}
        if draw.random() < 0.3:
            assert world.read() == {n: rows for n, rows in world.written.items() if rows}
    small.merge_all()
    assert world.read() == {n: rows for n, rows in world.written.items() if rows}
    assert small.merged > small.written > 0


def archived_offsets(history: History, topic: str) -> dict[int, list[int]]:
    spans = {n: (0, history.ends[topic, n]) for n in range(3) if (topic, n) in history.ends}
    found: dict[int, list[int]] = {}
    for part in history.parts(topic, spans) if spans else []:
        for rows in read_part(part, ("partition", "offset")):
            for partition, offset in zip(rows["partition"].to_pylist(), rows["offset"].to_pylist(), strict=True):
                found.setdefault(partition, []).append(offset)
    return {partition: sorted(offsets) for partition, offsets in sorted(found.items())}


def archived(folder: Path, seed: int, batches: int = 6) -> list[Row]:
    """An archive of one topic; all that is in it."""
    archive_tables.make_records(folder / "records")
    traffic = Traffic(seed, ("orders",))
    for _ in range(batches):
        append(folder, traffic.rows(20))
    return rows_of(folder)


def files_on_disk(folder: Path) -> set[str]:
    return {str(path.relative_to(folder / "records")) for path in (folder / "records").glob("topic=*/**/*.parquet")}


def named_paths(folder: Path) -> set[str]:
    table = archive_tables.opened(folder, "records")
    assert table is not None
    return table.named_paths()


@proves("S7")
def test_a_death_between_the_steps_of_a_merge_loses_and_repeats_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Death(BaseException):
        pass

    before = archived(tmp_path, seed)
    for point in ("merge-written", "merge-committed"):
        known = named_paths(tmp_path)

        def die(reached: str, number: int, at: str = point) -> None:
            if reached == at:
                raise Death

        with monkeypatch.context() as patched:
            patched.setattr(faults, "reached", die)
            with pytest.raises(Death):
                merger(tmp_path).merge_some()
        assert rows_of(tmp_path) == before
        left = files_on_disk(tmp_path) - known
        assert len(left) >= 2
        assert archive_tables.sweep(tmp_path, "q") == (len(left) if point == "merge-written" else 0)
        assert files_on_disk(tmp_path) == named_paths(tmp_path)
    merger(tmp_path).merge_all()
    assert rows_of(tmp_path) == before
    assert len(list_files(delta.open_table(tmp_path / "records"))) == 2


@proves("S7")
def test_another_run_that_was_quicker_is_made_way_for(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are replaced, or replaced and removed, between a plan and its commit."""
    before = archived(tmp_path, seed)
    others = [merger(tmp_path, fan_in=3), merger(tmp_path, fan_in=3)]

    def meanwhile(point: str, _: int) -> None:
        if point == "merge-written" and others:
            others.pop().merge_some()

    with monkeypatch.context() as patched:
        patched.setattr(faults, "reached", meanwhile)
        small = merger(tmp_path)
        assert small.merge_some()
    assert small.merged == 0
    table = delta.open_table(tmp_path / "records")
    planned = small_files.plan(list_files(DeltaTable(str(tmp_path / "records"), version=12)), MergeOptions(), NOW_MS)
    table_files.vacuum(table, 0)
    with pytest.raises(table_files.FilesGone):
        small_files._merge(table, planned[0])
    small.merge_all()
    assert rows_of(tmp_path) == before


@proves("S7")
def test_files_that_were_merged_are_kept_for_readers_and_then_removed(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = archived(tmp_path, seed)
    files = files_on_disk(tmp_path)
    small = merger(tmp_path, vacuum_hours=1)
    # The log has it that the first were merged an hour and a half ago.
    with monkeypatch.context() as patched:
        patched.setattr(small_files, "STEP_BYTES", 1)
        patched.setattr("headrace.pipelines.table_files.time.time", lambda now=time.time: now() - 5400)
        assert small.merge_some()
    old = files - {file.path for file in list_files(delta.open_table(tmp_path / "records"))}
    assert files <= files_on_disk(tmp_path)
    small.merge_all()
    assert small.removed == len(old) == len(files) / 2
    assert files_on_disk(tmp_path) >= files - old
    assert not files_on_disk(tmp_path) & old
    assert rows_of(tmp_path) == before


@proves("S7")
def test_entries_that_vacuum_makes_in_the_log_are_on_disk(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(tmp_path, seed)
    merger(tmp_path).merge_some()
    table = delta.open_table(tmp_path / "records")
    before, synced = table.version(), list[int]()
    monkeypatch.setattr(delta, "sync_version", lambda _, version: synced.append(version))
    assert table_files.vacuum(table, 0) > 0
    assert synced == list(range(before + 1, DeltaTable(str(tmp_path / "records")).version() + 1)) != []


@proves("S7")
def test_columns_that_came_later_are_null_in_what_was_there_before(tmp_path: Path, seed: int) -> None:
    before = archived(tmp_path, seed)
    DeltaTable(str(tmp_path / "records")).alter.add_columns([Field("country", PrimitiveType("string"))])
    merger(tmp_path).merge_all()
    assert rows_of(tmp_path) == before
    assert set(DeltaTable(str(tmp_path / "records")).to_pyarrow_table()["country"].to_pylist()) == {None}


def test_a_file_that_cannot_be_read_is_named_and_nothing_is_changed(tmp_path: Path, seed: int) -> None:
    archived(tmp_path, seed)
    for path in (tmp_path / "records").glob("topic=*/**/*.parquet"):
        path.unlink()
    with pytest.raises(OperatorError, match=r"records cannot be merged: .*No such file"):
        merger(tmp_path).merge_some()
    assert files_on_disk(tmp_path) == set()


def check_statistics(folder: Path) -> None:
    """Every file says of partition, offset and timestamp what is least and greatest, in its log and in its footer."""
    for file in list_files(DeltaTable(str(folder / "records"))):
        rows = pq.read_table(folder / "records" / file.path, columns=["partition", "offset"], partitioning=None)
        offsets = rows["offset"].to_pylist()
        assert file.bounds.partition == (rows["partition"][0].as_py(),) * 2
        assert file.bounds.offset == (offsets[0], offsets[-1])
        assert offsets == sorted(offsets)
        assert file.bounds.timestamp is not None
        with pq.ParquetFile(folder / "records" / file.path) as opened:
            assert all(None not in bounds for _, bounds in row_group_bounds(opened))


@proves("S7")
@pytest.mark.timeout(600)
def test_an_archive_merges_its_files_while_it_runs(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    """And counts what a run has added, not what it has merged."""
    topic = create_topic(broker, f"t{uuid.uuid4().hex[:8]}", 1, retention_ms=-1)
    merging = MergeOptions(fan_in=3)
    added = []
    for seed in range(2):
        produce(broker.bootstrap, topic, values(700, seed))
        chosen = archive.ArchiveOptions(
            tmp_path / "a", broker.bootstrap, (topic,), max_offsets_per_trigger=100, merge=merging
        )
        added.append(archive.run(spark, chosen))
    assert [told.facts["records"] for told in added] == [700, 700]
    assert [told.tables[0].rows[0]["first_offset"] for told in added] == [0, 700]
    assert all(told.facts["files_merged"] >= 6 for told in added)
    assert archive_rows(records_table(tmp_path / "a")) == topic_rows(broker.bootstrap, topic)
    check_statistics(tmp_path / "a")
    by_day = len({file.date for file in list_files(DeltaTable(str(tmp_path / "a" / "records")))})
    assert len(list_files(DeltaTable(str(tmp_path / "a" / "records")))) <= 3 * by_day


@proves("S7", "S4")
@pytest.mark.timeout(600)
def test_a_driver_killed_while_it_merges_loses_and_repeats_nothing(
    spark: SparkSession, fresh_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = fresh_broker()
    create_topic(broker, TOPIC, 1, retention_ms=-1)
    send(broker, tmp_path / "ledger", lines(0, 1200))
    driver = Driver(broker, tmp_path / "archive", "--merge", die_at="merge-written:0", batch=100)
    assert driver.wait() == -signal.SIGKILL, driver.told()
    held = archive_rows(records_table(tmp_path / "archive"))
    assert len(held) >= 600
    chosen = archive.ArchiveOptions(
        tmp_path / "archive", broker.bootstrap, (TOPIC,), decode="json", schema="country string, quantity int",
        max_offsets_per_trigger=100, merge=MergeOptions(fan_in=3),
    )  # fmt: skip
    assert archive.run(spark, chosen).ok
    records, dead = archive_rows(records_table(tmp_path / "archive")), History(tmp_path / "archive")
    assert sorted(row.offset for row in records) == [n for n in range(1200) if n % 7]
    assert dead.ends == {(TOPIC, 0): 1200}
    named = named_paths(tmp_path / "archive")
    assert files_on_disk(tmp_path / "archive") <= named
