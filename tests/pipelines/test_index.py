"""The key index answers as a search of everything does, whatever was archived, merged or killed in between."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from archive_tables import MIDNIGHT_MS, Row, Traffic, append, rows_of
from brokers import DIES_WITH_PARENT, Broker, wait_for
from clients.topics import create_topic
from headrace.arrow.archive import Archive, Work
from headrace.arrow.key_index import BLOCK_OFFSETS, KeyIndex, key_hash
from headrace.cli.main import main
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import list_offsets
from headrace.client.admin.query import RecordQuery
from headrace.client.fetch_requests import EARLIEST
from headrace.pipelines import archive, compact, index
from headrace.pipelines.index import Generation
from headrace.pipelines.summary import Progress
from json_topics import fill, new_name
from pipelines.archives import produce, values
from proving import proves

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Build = Callable[..., dict[str, int]]


@pytest.fixture
def build(spark: SparkSession) -> Build:
    def run(archive: Path, rebuild: bool = False) -> dict[str, int]:
        return dict(index.run(spark, index.IndexOptions(archive, rebuild), Progress()).facts)

    return run


def found(archive: Path, wanted: RecordQuery, work: Work | None = None) -> list[Row]:
    rows = Archive(archive).find(wanted, False, work or Work())
    return [Row(wanted.topic, n, r.offset, r.timestamp_ms, r.key, r.value, tuple(r.headers)) for n, r in rows]


def check_keys(archive: Path, seed: int, unindexed: bool) -> None:
    """Random keys, those with odd bytes among them, in all of time and in a part of it, beside a full scan."""
    everything, draw = rows_of(archive), random.Random(seed)
    keys = {row.key for row in everything if row.key is not None}
    assert b"" in keys
    chosen = [b"", b"not there", *(key for key in keys if b"\xff" in key), *draw.sample(sorted(keys), 10)]
    for topic in ("123", "orders", "unknown"):
        for key in chosen:
            from_ms, to_ms = draw.choice(
                [(None, None), (MIDNIGHT_MS + 3_600_000, None), (None, MIDNIGHT_MS + 86_400_000)]
            )
            expected = [
                row
                for row in everything
                if row.topic == topic
                and row.key == key
                and (from_ms is None or row.timestamp_ms >= from_ms)
                and (to_ms is None or row.timestamp_ms < to_ms)
            ]
            work = Work()
            assert found(archive, RecordQuery(topic, key, (), from_ms, to_ms), work) == expected
            assert (work.files_not_indexed > 0) == (unindexed and topic != "unknown")


@proves("S7", "R3")
def test_answers_equal_a_full_scan(tmp_path: Path, spark: SparkSession, build: Build, seed: int) -> None:
    folder = tmp_path / "my archive, é#1"  # another text as a URI
    traffic = Traffic(seed)

    def merge() -> None:
        compact.run(spark, compact.CompactOptions(folder), Progress())

    append(folder, traffic.rows(120))
    append(folder, traffic.rows(120), mixed=True)
    check_keys(folder, seed, unindexed=True)
    assert build(folder)["records_indexed"] == 960
    check_keys(folder, seed, unindexed=False)
    merge()
    check_keys(folder, seed, unindexed=False)
    assert build(folder)["files_indexed"] == 0
    append(folder, traffic.rows(50))
    check_keys(folder, seed, unindexed=True)
    merge()
    check_keys(folder, seed, unindexed=True)
    build(folder)
    check_keys(folder, seed, unindexed=False)
    append(folder, traffic.rows(5))
    assert build(folder)["records_indexed"] == 20
    check_keys(folder, seed, unindexed=False)
    assert build(folder)["records_indexed"] == 0
    assert build(folder, rebuild=True)["generations"] == 1
    check_keys(folder, seed, unindexed=False)


def test_hash_is_that_of_spark(spark: SparkSession, seed: int) -> None:
    draw = random.Random(seed)
    drawn = [(draw.choice(["123", "orders", "a" * 40]), draw.randbytes(length)) for length in range(100)]
    rows = spark.createDataFrame(drawn, "topic string, key binary").selectExpr("topic", "key", "xxhash64(topic, key)")
    assert [row[2] for row in rows.collect()] == [key_hash(topic, key) for topic, key in drawn]


def test_key_of_many_records_takes_few_rows(tmp_path: Path, build: Build) -> None:
    count = BLOCK_OFFSETS + 1000
    append(tmp_path, [Row("t", 0, n, MIDNIGHT_MS + n, b"rare" if n == 70 else b"hot", b"") for n in range(count)])
    assert build(tmp_path)["index_rows"] == 3
    assert len(found(tmp_path, RecordQuery("t", b"hot"))) == count - 1
    assert [row.offset for row in found(tmp_path, RecordQuery("t", b"rare"))] == [70]


def test_index_of_another_table_counts_as_none(tmp_path: Path, build: Build) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    append(one, [Row("t", 0, 0, MIDNIGHT_MS, b"a", b"1")])
    append(other, [Row("t", 0, 0, MIDNIGHT_MS, b"b", b"2")])
    build(one)
    (one / "keys").rename(other / "keys")
    assert KeyIndex(other, DeltaTable(str(other / "records"))).version is None
    assert [row.value for row in found(other, RecordQuery("t", b"b"))] == [b"2"]
    assert build(other)["index_rows"] == 1
    assert found(other, RecordQuery("t", b"a")) == []


def test_new_rows_absorb_generations_that_are_not_much_larger() -> None:
    generations = [Generation(3, 10, ()), Generation(2, 40, ()), Generation(1, 1000, ())]
    assert [each.number for each in index._absorbed(generations, 5)] == [3, 2]
    assert index._absorbed(generations, 1) == []
    assert [each.number for each in index._absorbed(generations, 300)] == [3, 2, 1]


@proves("S7", "R3")
def test_finds_what_the_broker_has_deleted(
    tmp_path: Path,
    spark: SparkSession,
    build: Build,
    fresh_broker: Callable[..., Broker],
    capfd: pytest.CaptureFixture[str],
) -> None:
    broker = fresh_broker(settings={"retention.check.ms": 100})
    short = {"retention_ms": 1, "segment_bytes": 1024, "file_delete_delay_ms": 0}
    topic = create_topic(broker, "123", retention_archived="true", **short)
    sent = 0
    for seed in range(2):
        sent += produce(broker.bootstrap, topic, values(100, seed))
        archive.run(spark, archive.ArchiveOptions(tmp_path, broker.bootstrap, (topic,)))
    assert build(tmp_path)["records_indexed"] == sent
    wait_for("retention of the first record", lambda: first_offset(broker.bootstrap, topic) > 100)
    compact.run(spark, compact.CompactOptions(tmp_path), Progress())
    sent += produce(broker.bootstrap, topic, values(100, 3))
    archive.run(spark, archive.ArchiveOptions(tmp_path, broker.bootstrap, (topic,)))
    everything = rows_of(tmp_path)
    assert [row.offset for row in everything] == list(range(sent))
    work = Work()
    assert found(tmp_path, RecordQuery(topic, b"key 7"), work) == [row for row in everything if row.key == b"key 7"]
    assert work.files_not_indexed == 1
    assert main(["query", "--archive", str(tmp_path), "--topic", topic, "--key", "key 7", "--format", "%o"]) == 0
    assert "6" in capfd.readouterr().out.split()


@proves("S7", "S4")
def test_columns_and_dead_letters_are_no_hindrance(
    tmp_path: Path, spark: SparkSession, build: Build, broker: Broker
) -> None:
    """Records are found by their key as they came, merged or not; what did not decode is in a table of its own."""
    topic = create_topic(broker, new_name("decoded"), retention_ms=-1)
    options = archive.ArchiveOptions(
        tmp_path, broker.bootstrap, (topic,), decode="json", schema="n int, name string", group=topic
    )
    for first in (0, 20):
        sent = [{"n": n, "name": "even" if n % 2 == 0 else n} if n % 5 else b"bad" for n in range(first, first + 20)]
        fill(broker.bootstrap, topic, sent, key="name")
        archive.run(spark, options)
    assert build(tmp_path)["records_indexed"] == 32
    before = found(tmp_path, RecordQuery(topic, b"even"))
    assert [row.offset for row in before] == [n for n in range(40) if n % 2 == 0 and n % 5]
    assert compact.run(spark, compact.CompactOptions(tmp_path), Progress()).facts["files_merged"] == 2
    work = Work()
    assert found(tmp_path, RecordQuery(topic, b"even"), work) == before
    assert work.files_not_indexed == 0
    kept = DeltaTable(str(tmp_path / "records")).to_pyarrow_table(columns=["offset", "n", "name"]).sort_by("offset")
    assert kept["n"].to_pylist() == kept["offset"].to_pylist() == [n for n in range(40) if n % 5]
    dead = DeltaTable(str(tmp_path / "dead_letters")).to_pyarrow_table(columns=["offset"])["offset"].to_pylist()
    assert sorted(dead) == list(range(0, 40, 5))


def first_offset(bootstrap: str, topic: str) -> int:
    with Cluster(bootstrap) as cluster:
        return list_offsets(cluster, topic, {0: EARLIEST})[0].offset


@pytest.mark.parametrize("point", ["index-written", pytest.param("compact-written", marks=pytest.mark.long)])
@proves("S7")
def test_killed_before_its_commit_leaves_all_as_it_was(tmp_path: Path, build: Build, seed: int, point: str) -> None:
    traffic = Traffic(seed)
    for _ in range(2):
        append(tmp_path, traffic.rows(30))
    before, version = rows_of(tmp_path), DeltaTable(str(tmp_path / "records")).version()
    run_killed(tmp_path, point)
    assert rows_of(tmp_path) == before
    assert DeltaTable(str(tmp_path / "records")).version() == version
    check_keys(tmp_path, seed, unindexed=True)
    assert build(tmp_path)["records_indexed"] == len(before)
    check_keys(tmp_path, seed, unindexed=False)


def run_killed(archive: Path, point: str) -> None:
    pipeline = point.partition("-")[0]
    command = [*DIES_WITH_PARENT, sys.executable, "-m", "headrace.cli.main", "pipeline", pipeline]
    done = subprocess.run(
        [*command, "--archive", str(archive), "--master", "local[1]", "--spark-conf", "spark.driver.memory=512m"],
        env={**os.environ, "HEADRACE_DIE_AT": point, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == -9, done.stderr.decode()[-2000:]
