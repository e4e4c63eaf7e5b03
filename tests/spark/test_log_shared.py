"""`format("headrace-log")` on folders of the shared layout. Splits are read without Spark; one test has it."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.records import kernel
from headrace.records.batch import HEADER_BYTES
from headrace.settings.values import log_settings
from headrace.spark import log_options, log_plan, log_reader
from headrace.spark.log_plan import LogProblem, SharedSplit
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import TopicPartition
from headrace.storage.offline.convert import ConversionOptions, convert
from headrace.system.clock import LoopClock
from headrace.system.disk import SystemDisk
from proving import proves
from storage.folders import FolderHarness, contents, fill, stop
from storage.harness import append, batch, real_harness
from storage.test_compaction import COMPACTED, compact

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, list[int]]]]:
    """A folder of the shared layout, and the offsets of each partition."""
    data = tmp_path_factory.mktemp("shared") / "data"
    for real in real_harness(str(data), SHARED):
        harness = FolderHarness(real.disk, real.clock, real.data, real.loop, layout=SHARED)
        fill(harness)
        offsets = {
            str(where): [
                offset
                for header, _ in contents(harness.log(where))
                for offset in range(header.base_offset, header.next_offset)
                if offset >= harness.log(where).start_offset
            ]
            for where in harness.expected
        }
        stop(harness)
        yield data, offsets


@pytest.fixture
def data(left: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(left[0], tmp_path / "data"))


def planned(data: Path, **more: str) -> log_plan.Plan:
    return log_plan.plan(SystemDisk(), log_options.parse({"path": str(data), **more}))


def read(data: Path, **more: str) -> tuple[dict[str, list[int]], list[LogProblem]]:
    rows: dict[str, list[int]] = {}
    problems: list[LogProblem] = []
    for split in planned(data, **more).splits:
        for found in log_reader.read_split(split, ["topic", "partition", "offset", "value", "segment"]):
            if isinstance(found, LogProblem):
                problems.append(found)
                continue
            for row in found.to_pylist():
                rows.setdefault(f"{row['topic']}-{row['partition']}", []).append(row["offset"])
    return rows, problems


def test_every_record_is_a_row_once_however_small_the_splits(left: tuple[Path, dict[str, list[int]]]) -> None:
    data, offsets = left
    wanted = {where: found for where, found in offsets.items() if found}
    for split_bytes in ("300", "1000000"):
        rows, problems = read(data, maxPartitionBytes=split_bytes)
        assert not problems
        assert rows == wanted
    assert len(planned(data, maxPartitionBytes="300").splits) > len(planned(data).splits)


def test_damage_is_a_problem_and_the_rest_are_rows(data: Path, left: tuple[Path, dict[str, list[int]]]) -> None:
    split = next(each for each in planned(data, topic="busy").splits if isinstance(each, SharedSplit))
    path, position, _, offset = split.runs[1][:4]
    content = bytearray(Path(path).read_bytes())
    content[position + 65] ^= 1
    Path(path).write_bytes(content)
    rows, (problem,) = read(data, topic="busy")
    assert (problem.kind, problem.offset, problem.position, problem.fails) == ("corrupt", offset, position, True)
    assert rows["busy-0"] == [each for each in left[1]["busy-0"] if each != offset]
    (check,) = planned(data, table="problems").checks
    (told,) = log_reader.check_folder(check)
    assert (told.topic, told.kind, told.position, told.offset) == ("busy", "corrupt", position, offset)
    (check,) = planned(data, table="problems", topic="late").checks
    assert not list(log_reader.check_folder(check))
    Path(path).rename(path + ".deleted")
    assert read(data, topic="late")[0] == {"late-0": left[1]["late-0"]}


@proves("S11")
@pytest.mark.parametrize(("byte", "bit"), [(0, 0x40), (6, 1), (7, 1), (7, 0x40)])
def test_a_wrong_base_offset_is_told_though_no_crc_covers_it(
    data: Path, left: tuple[Path, dict[str, list[int]]], byte: int, bit: int
) -> None:
    """Of a partition with one epoch, where nothing but its place tells; and of one with gaps."""
    splits = planned(data, topics="cut,sparse").splits
    runs = [run for each in splits if isinstance(each, SharedSplit) and each.path[-5:] != "cut-0" for run in each.runs]
    assert len(runs) > 40
    for path, position, _, offset, next_offset, _ in (runs[0], runs[1], runs[-2], runs[-1]):
        whole = Path(path).read_bytes()
        content = bytearray(whole)
        content[position + byte] ^= bit
        Path(path).write_bytes(content)
        rows, (problem,) = read(data, topics="cut,sparse")
        assert (problem.kind, problem.position, problem.fails) == ("corrupt", position, True)
        where = f"{problem.topic}-{problem.partition}"
        assert rows[where] == [each for each in left[1][where] if not offset <= each < next_offset]
        Path(path).write_bytes(whole)


def test_a_wrong_base_offset_is_told_in_a_gap_of_a_compacted_partition(tmp_path: Path) -> None:
    data, where, chance = tmp_path / "data", TopicPartition("states", 0), random.Random(5)
    for real in real_harness(str(data), SHARED):
        harness = FolderHarness(real.disk, real.clock, real.data, real.loop, layout=SHARED)
        log = harness.log(where, **COMPACTED)
        for n in range(150):
            append(log, memoryview(kernel.build([(n, b"%d" % chance.randrange(12), b"v", []) for _ in range(3)])))
            harness.write()
        compact(harness)
        offsets = [record.offset for _, found in contents(log) for record in kernel.records(memoryview(found))]
        stop(harness)
    assert read(data) == ({str(where): offsets}, [])
    assert len(offsets) < 450
    joints = [
        (run.path, position, offset)
        for split in planned(data).splits
        if isinstance(split, SharedSplit)
        for run in split.runs
        for position, offset in run.joints
    ]
    path, position, offset = joints[0]
    content = bytearray(Path(path).read_bytes())
    content[position + 7] ^= 1
    Path(path).write_bytes(content)
    rows, (problem,) = read(data)
    assert (problem.position, problem.offset, problem.fails) == (position, offset, True)
    assert set(rows[str(where)]) < set(offsets)


def test_rows_come_from_the_bytes_that_were_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two reads are needed for the second batch, so that the first is in none of the last two pieces."""
    data, where = tmp_path / "data", TopicPartition("large", 0)
    overhead = len(batch(bytes(1 << 19))) - (1 << 19)
    for real in real_harness(str(data), PARTITIONED):
        harness = FolderHarness(real.disk, real.clock, real.data, real.loop, layout=PARTITIONED)
        log = harness.log(where)
        for size in ((1 << 20) - HEADER_BYTES // 2 - overhead, 2 << 20):
            append(log, batch(b"right".ljust(size, b".")))
        harness.write()
        stop(harness)
    monkeypatch.setattr(log_reader, "PIECE_BYTES", 1)
    pread = os.pread
    read_to: dict[int, int] = {}

    def other_when_read_again(descriptor: int, count: int, position: int) -> bytes:
        found, inode = pread(descriptor, count, position), os.fstat(descriptor).st_ino
        again = position + len(found) <= read_to.get(inode, 0)
        read_to[inode] = max(position + len(found), read_to.get(inode, 0))
        return found.replace(b"right", b"wrong") if again else found

    (split,) = planned(data).splits
    monkeypatch.setattr(os, "pread", other_when_read_again)
    found = list(log_reader.read_split(split, ["value"]))
    values = [row["value"] for each in found if not isinstance(each, LogProblem) for row in each.to_pylist()]
    assert [value[:5] for value in values] == [b"right", b"right"]


def test_a_torn_tail_is_told_once_as_torn(data: Path) -> None:
    newest = max((data / "@commitlog").glob("*.log"))
    size = newest.stat().st_size
    newest.write_bytes(newest.read_bytes() + b"HRFA torn")
    (check,) = planned(data, table="problems").checks
    (told,) = log_reader.check_folder(check)
    assert (told.topic, told.segment, told.position, told.kind) == (None, newest.name, size, "torn")


def test_lost_queues_cost_no_rows_and_are_told(data: Path, left: tuple[Path, dict[str, list[int]]]) -> None:
    for path in data.glob("*/*/*.queue"):
        path.unlink()
    rows, problems = read(data)
    assert not problems
    assert rows == {where: found for where, found in left[1].items() if found}
    (check,) = planned(data, table="problems").checks
    assert {each.kind for each in log_reader.check_folder(check)} == {"index"}


def test_spark_reads_either_layout_alike(
    spark: SparkSession, data: Path, left: tuple[Path, Any], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(data, tmp_path / "other"))
    loop = asyncio.new_event_loop()
    options = ConversionOptions("partitioned", settings=lambda _: log_settings({}, {"segment.bytes": "2000"}))
    convert(SystemDisk(), LoopClock(loop), str(other), options)
    loop.close()
    columns = "topic,partition,offset,value"
    one, two = (spark.read.format("headrace-log").option("columns", columns).load(str(each)) for each in (data, other))
    assert sorted(one.collect()) == sorted(two.collect())
    assert spark.read.format("headrace-log").option("table", "problems").load(str(data)).count() == 0
