"""The whole history of a topic, from an archive and the broker, beside all that was ever written to it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException

import headrace.arrow
from brokers import Broker
from clients.topics import create_topic
from headrace.arrow.history import History
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import delete_records
from headrace.errors import HeadraceError, OffsetOutOfRange, OperatorError, SettingError
from headrace.pipelines import archive
from pipelines.archived_world import PARTITIONS, World
from pipelines.archives import produce, topic_rows, values
from proving import proves
from transactional_producer import Transactions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@proves("S12")
def test_archive_and_broker_together_are_all_that_was_ever_written(broker: Broker, tmp_path: Path, seed: int) -> None:
    """Whatever of it is archived, deleted, rearranged, or half archived."""
    draw = random.Random(seed)
    world = World(broker, tmp_path / "an archive", draw)
    for _ in range(40):
        draw.choice([world.produce, world.produce, world.archive, world.delete, world.compact])()
        if draw.random() < 0.5:
            assert world.read() == {n: rows for n, rows in world.written.items() if rows}
        else:
            starts = {n: draw.randint(0, len(world.written[n])) for n in range(PARTITIONS)}
            expected = {n: world.written[n][at:] for n, at in starts.items() if world.written[n][at:]}
            assert world.read(start=starts) == expected


@proves("S12")
def test_a_history_begins_at_a_time_wherever_that_is(broker: Broker, tmp_path: Path, seed: int) -> None:
    world = World(broker, tmp_path / "a", random.Random(seed))
    for step in (
        world.produce,
        world.produce,
        world.archive,
        world.delete,
        world.produce,
        world.archive,
        world.produce,
    ):
        step()
    every = sorted(row[1] for rows in world.written.values() for row in rows)
    for at in (every[0], every[len(every) // 3], every[2 * len(every) // 3], every[-1]):
        expected = {n: [row for row in rows if row[1] >= at] for n, rows in world.written.items()}
        assert world.read(start=at) == {n: rows for n, rows in expected.items() if rows}


@proves("S12")
def test_what_was_there_before_an_archive_began_is_read_of_the_broker(
    broker: Broker, tmp_path: Path, seed: int, spark: SparkSession
) -> None:
    """As with --starting latest; of one partition the archive has no record yet."""
    world = World(broker, tmp_path / "a", random.Random(seed))
    while any(len(world.written[n]) < 10 for n in range(PARTITIONS)):
        world.produce()
    began = {n: len(rows) for n, rows in world.written.items()}
    world.archived = dict(began)
    world.produce()
    while not any(world.archived[n] > began[n] for n in range(PARTITIONS)):
        world.archive()
    world.produce()
    read = spark.read.format("headrace").options(
        bootstrap=broker.bootstrap, subscribe=world.topic, history=str(world.folder)
    )

    def check(gone: int, at: datetime.datetime | None = None) -> None:
        expected = {n: [row for row in rows[gone:] if at is None or row[1] >= at] for n, rows in world.written.items()}
        expected = {n: rows for n, rows in expected.items() if rows}
        assert world.read(**({} if at is None else {"start": at})) == expected
        since = {} if at is None else {"startingTimestamp": str(round(at.timestamp() * 1000))}
        rows = read.options(**since).load().select("partition", "offset").collect()
        assert sorted(map(tuple, rows)) == sorted((n, row[0]) for n, rows in expected.items() for row in rows)

    check(0)
    with Cluster(world.bootstrap) as cluster:
        delete_records(cluster, world.topic, dict.fromkeys(range(PARTITIONS), 5))
    check(5)
    check(5, at=max(world.written[n][7][1] for n in range(PARTITIONS)))
    with pytest.raises(OffsetOutOfRange):
        world.read(start=0)


@proves("S12")
def test_what_is_deleted_before_an_archive_began_while_a_task_reads_is_a_loss(
    broker: Broker, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.spark.source import HeadraceSource

    world = World(broker, tmp_path / "a", random.Random(seed))
    while any(len(world.written[n]) < 10 for n in range(PARTITIONS)):
        world.produce()
    world.archived = {n: len(rows) - 3 for n, rows in world.written.items()}
    began = dict(world.archived)
    while any(world.archived[n] < len(world.written[n]) for n in range(PARTITIONS)):
        world.archive()
    options = {"bootstrap": broker.bootstrap, "subscribe": world.topic, "history": str(world.folder)}
    monkeypatch.setenv("PYTHON_UNIX_DOMAIN_ENABLED", "true")

    def planned(**how: str) -> tuple[Any, Sequence[Any]]:
        source = HeadraceSource({**options, **how})
        reader = source.reader(source.schema())
        return reader, reader.partitions()

    (strict, its), (lenient, others) = planned(), planned(failOnDataLoss="false")
    with Cluster(world.bootstrap) as cluster:
        delete_records(cluster, world.topic, {n: len(rows) for n, rows in world.written.items()})
    early = next(split for split in its if getattr(split, "first_offset", None) == 0)
    with pytest.raises(HeadraceError, match="begins after that"):
        list(strict.read(early))
    batches = [pa.record_batch(rows) for split in others for rows in lenient.read(split)]
    found = [(row["partition"], row["offset"]) for rows in batches for row in rows.to_pylist()]
    ends = {n: len(rows) for n, rows in world.written.items()}
    assert sorted(found) == [(n, offset) for n in range(PARTITIONS) for offset in range(began[n], ends[n])]


@proves("S12")
def test_what_neither_has_is_told(broker: Broker, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker has deleted more of a partition than is archived."""
    from headrace.spark.source import HeadraceSource

    world = World(broker, tmp_path / "a", random.Random(seed))
    while any(len(world.written[n]) < 10 for n in range(PARTITIONS)):
        world.produce()
    while world.torn or not world.archived[0]:
        world.archive()
    while len(world.written[0]) == world.archived[0]:
        world.produce()
    gone = len(world.written[0])
    with Cluster(world.bootstrap) as cluster:
        delete_records(cluster, world.topic, {0: gone})
    while len(world.written[0]) == gone:
        world.produce()
    ends = History(world.folder).ends
    assert 0 < ends[world.topic, 0] < gone
    with pytest.raises(OffsetOutOfRange):
        world.read(start=0)
    others = {n: rows for n, rows in world.written.items() if n != 0}
    assert world.read(partitions=sorted(others)) == others, "of these nothing is lost"

    monkeypatch.setenv("PYTHON_UNIX_DOMAIN_ENABLED", "true")
    options = {"bootstrap": broker.bootstrap, "subscribe": world.topic, "history": str(world.folder)}
    source = HeadraceSource(options)
    lost = f"{world.topic}-0: offsets {ends[world.topic, 0]} to {gone - 1} "
    with pytest.raises(HeadraceError, match=f"{lost}.*, and {world.folder} ends before"):
        source.reader(source.schema()).partitions()
    lenient = HeadraceSource({**options, "failOnDataLoss": "false"})
    reader = lenient.reader(lenient.schema())
    batches = [pa.record_batch(rows) for split in reader.partitions() for rows in reader.read(split)]
    found = [row["offset"] for rows in batches for row in rows.to_pylist() if row["partition"] == 0]
    assert sorted(found) == [*range(ends[world.topic, 0]), *range(gone, len(world.written[0]))]


@proves("S12")
@pytest.mark.parametrize("how", ["restored", "copied back"])
def test_an_archive_that_was_set_back_to_an_older_version_has_no_silent_gap(
    spark: SparkSession, broker: Broker, tmp_path: Path, how: str
) -> None:
    """Its checkpoint tells of batches that its table has not any more."""
    topic = create_topic(broker, f"t{uuid.uuid4().hex[:8]}", 1, retention_ms=-1)
    chosen = archive.ArchiveOptions(tmp_path / "a", broker.bootstrap, (topic,))
    records = chosen.to / "records"

    def more(count: int, seed: int) -> None:
        produce(broker.bootstrap, topic, values(count, seed=seed))

    def offsets() -> list[int]:
        found = headrace.arrow.read(topic, bootstrap=broker.bootstrap, history=chosen.to, columns=["offset"])
        return sorted(found.read_all()["offset"].to_pylist())

    def frame() -> DataFrame:
        given = {"bootstrap": broker.bootstrap, "subscribe": topic, "history": str(chosen.to)}
        return spark.read.format("headrace").options(**given).load()

    more(100, 1)
    archive.run(spark, chosen)
    version = DeltaTable(str(records)).version()
    shutil.copytree(records, tmp_path / "older")
    more(100, 2)
    archive.run(spark, chosen)
    more(100, 3)
    if how == "restored":
        DeltaTable(str(records)).restore(version)
    else:
        shutil.rmtree(records)
        shutil.copytree(tmp_path / "older", records)
    assert History(chosen.to).ends == {(topic, 0): 100}
    assert offsets() == list(range(300)), "the broker has them still"
    assert frame().count() == 300
    with Cluster(broker.bootstrap) as cluster:
        delete_records(cluster, topic, {0: 150})
    with pytest.raises(OffsetOutOfRange):
        offsets()
    with pytest.raises(PySparkException, match=f"offsets 100 to 149 .*, and {chosen.to} ends before"):
        frame().count()
    with pytest.raises(PySparkException, match="offsets 100 to 149"):
        archive.run(spark, chosen)
    archive.run(spark, dataclasses.replace(chosen, accept_loss=True))
    assert History(chosen.to).ends == {(topic, 0): 300}
    archived = DeltaTable(str(records)).to_pyarrow_table(columns=["offset"])["offset"].to_pylist()
    assert sorted(archived) == [*range(100), *range(150, 300)], "it went on from what the table has"


def test_what_an_archive_cannot_give_is_refused(broker: Broker, tmp_path: Path, seed: int) -> None:
    world = World(broker, tmp_path / "a", random.Random(seed))
    world.produce()

    def read(**how: Any) -> None:
        headrace.arrow.read(world.topic, bootstrap=world.bootstrap, **{"history": world.folder, **how})

    with pytest.raises(SettingError, match="column 'digest' is not in an archive"):
        read(columns=["digest"])
    with pytest.raises(ValueError, match="has what is committed"):
        read(isolation="uncommitted")
    with pytest.raises(OperatorError, match="has no archive"):
        read(history=tmp_path / "nothing")
    (world.folder / "archive.json").write_text(json.dumps({"id": "x", "topics": {world.topic: "00" * 16}}))
    with pytest.raises(OperatorError, match="made anew since"):
        read()


@proves("S12")
@pytest.mark.timeout(600)
def test_a_frame_and_a_stream_have_the_whole_history(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    """A stream begins in the archive and goes over into the topic; the broker has deleted what it begins with."""
    topic = create_topic(broker, f"t{uuid.uuid4().hex[:8]}", PARTITIONS, retention_ms=-1)
    produce(broker.bootstrap, topic, values(1500), partitions=PARTITIONS)
    archive.run(spark, archive.ArchiveOptions(tmp_path / "a", broker.bootstrap, (topic,)))
    expected = {(row.partition, row.offset): row.value for row in topic_rows(broker.bootstrap, topic)}
    with Cluster(broker.bootstrap) as cluster:
        delete_records(cluster, topic, {0: 500, 1: 321})
    produce(broker.bootstrap, topic, values(300, seed=1), partitions=PARTITIONS)
    expected |= {(row.partition, row.offset): row.value for row in topic_rows(broker.bootstrap, topic)}

    options = {"bootstrap": broker.bootstrap, "subscribe": topic, "history": str(tmp_path / "a")}
    frame = spark.read.format("headrace").options(**options).load()
    found = [((row.partition, row.offset), row.value and bytes(row.value)) for row in frame.collect()]
    assert len(found) == len(expected) == 1800
    assert {place: value or None for place, value in found} == {place: v or None for place, v in expected.items()}
    assert frame.where("partition = 1 and offset < 10").count() == 10

    stream = (
        spark.readStream.format("headrace")
        .options(**options, startingOffsets="earliest", maxOffsetsPerTrigger="400")
        .load()
        .select("partition", "offset")
    )
    writer = (
        stream.writeStream.format("memory")
        .queryName(f"history_{topic}")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
    )
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(300)
    seen = spark.table(f"history_{topic}").collect()
    assert sorted((row.partition, row.offset) for row in seen) == sorted(expected)


@proves("S12")
def test_what_is_deleted_while_a_task_reads_is_read_where_it_is_archived(
    spark: SparkSession, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned before the archive had it, and read after the broker has deleted it."""
    from headrace.spark.source import HeadraceSource

    topic = create_topic(broker, f"t{uuid.uuid4().hex[:8]}", 1, retention_ms=-1)
    produce(broker.bootstrap, topic, values(100))
    chosen = archive.ArchiveOptions(tmp_path / "a", broker.bootstrap, (topic,))
    archive.run(spark, chosen)
    produce(broker.bootstrap, topic, values(200, seed=1))
    options = {"bootstrap": broker.bootstrap, "subscribe": topic, "history": str(tmp_path / "a")}
    monkeypatch.setenv("PYTHON_UNIX_DOMAIN_ENABLED", "true")
    source = HeadraceSource(options)
    reader = source.reader(source.schema())
    splits = reader.partitions()
    archive.run(spark, chosen)
    with Cluster(broker.bootstrap) as cluster:
        delete_records(cluster, topic, {0: 250})
    rows = [
        offset
        for split in splits
        for batch in reader.read(split)
        for offset in pa.record_batch(batch)["offset"].to_pylist()
    ]
    assert sorted(rows) == list(range(300))


@proves("S12", "T2")
def test_what_is_no_record_at_the_end_of_an_archive_is_no_gap(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    """Behind the last record of both partitions are markers and an aborted transaction; the broker has deleted all."""
    topic = create_topic(broker, f"t{uuid.uuid4().hex[:8]}", 2, retention_ms=-1)
    transactions = Transactions(broker, topic)
    chosen = archive.ArchiveOptions(tmp_path / "a", broker.bootstrap, (topic,))

    def check() -> None:
        with Cluster(broker.bootstrap) as cluster:
            delete_records(cluster, topic, {0: -1, 1: -1})
        found = headrace.arrow.read(topic, bootstrap=broker.bootstrap, history=chosen.to, columns=["value"]).read_all()
        read = spark.read.format("headrace").options(
            bootstrap=broker.bootstrap, subscribe=topic, history=str(chosen.to)
        )
        for seen in (found["value"].to_pylist(), [row.value for row in read.load().select("value").collect()]):
            assert sorted(seen) == [b"kept 0", b"kept 1"]

    for partition in range(2):
        transactions.write(b"kept %d" % partition, "kept", partition)
    transactions.end("kept", commit=True)
    archive.run(spark, chosen)
    check()
    for partition in range(2):
        transactions.write(b"aborted", "aborted", partition)
    transactions.end("aborted", commit=False)
    archive.run(spark, chosen)
    check()
