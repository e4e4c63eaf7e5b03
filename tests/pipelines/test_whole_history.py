"""The whole history of a topic, from an archive and the broker, beside all that was ever written to it."""

from __future__ import annotations

import datetime
import json
import random
import uuid
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import headrace.arrow
from brokers import Broker
from clients.topics import create_topic
from headrace.arrow.history import History
from headrace.arrow.write import write
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import delete_records
from headrace.errors import OffsetOutOfRange, OperatorError, SettingError
from headrace.pipelines import archive, archive_tables, delta
from headrace.pipelines.archive_files import FileSet
from headrace.pipelines.archive_sink import ArchiveWriter, FilesWritten, parted
from headrace.pipelines.archive_tables import DEAD_LETTERS, DEAD_SCHEMA, RECORD_COLUMNS, RECORDS, RECORDS_SCHEMA
from pipelines.archives import produce, topic_rows, values
from proving import proves

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 3
COLUMNS = ("partition", "offset", "timestamp", "key", "value", "headers")
INSIDE = pa.schema([field for field in RECORDS_SCHEMA if field.name not in ("topic", "date")])
START_MS = 1_700_000_000_000

Rows = dict[int, list[tuple[Any, ...]]]


class World:
    """A topic, its archive, which is filled batch by batch as the pipeline does, and all that was ever written."""

    def __init__(self, broker: Broker, folder: Path, draw: random.Random) -> None:
        self.bootstrap, self.folder, self.draw = broker.bootstrap, folder, draw
        self.topic = create_topic(broker, f"t{uuid.uuid4().hex[:8]}", PARTITIONS, retention_ms=-1)
        self.written: Rows = defaultdict(list)
        self.archived: dict[int, int] = dict.fromkeys(range(PARTITIONS), 0)
        self.log_starts: dict[int, int] = dict.fromkeys(range(PARTITIONS), 0)
        self.batch = 0
        self.torn: tuple[FilesWritten, dict[int, int]] | None = None
        archive_tables.make_records(folder / RECORDS)
        archive_tables.make_dead_letters(folder / DEAD_LETTERS)
        with Cluster(self.bootstrap) as cluster:
            topic_id = cluster.topic(self.topic).topic_id.hex()
        (folder / "archive.json").write_text(json.dumps({"id": "x", "topics": {self.topic: topic_id}}))

    def produce(self) -> None:
        rows = []
        for _ in range(self.draw.randrange(1, 60)):
            partition, number = self.draw.randrange(PARTITIONS), sum(map(len, self.written.values()))
            at = datetime.datetime.fromtimestamp((START_MS + number * 3_600_000) / 1000, datetime.UTC)
            value = self.draw.choice([None, b"", b"v%d" % number])
            headers = self.draw.choice([None, [{"key": "h", "value": b"%d" % number}]])
            offset = len(self.written[partition])
            rows.append(
                {"partition": partition, "timestamp": at, "key": b"k%d" % number, "value": value, "headers": headers}
            )
            self.written[partition].append((offset, at, b"k%d" % number, value, str(headers)))
        write(self.topic, pa.RecordBatch.from_pylist(rows, SENT), bootstrap=self.bootstrap)

    def archive(self) -> None:
        """The next offsets of some partitions; some records of them are put aside. Now and then only that is done, and
        the rest of the batch later."""
        message, wanted = self.torn or self._files()
        self.torn = None
        if message.dead_letters and self.draw.random() < 0.3:
            added = [file.add_action() for file in message.dead_letters]
            delta.append(self.folder / DEAD_LETTERS, added, app_id="q", app_version=self.batch)
            self.torn = message, wanted
            return
        schema = delta.to_spark(pa.schema([("topic", pa.string()), *INSIDE]))
        ArchiveWriter(self.folder, "q", schema).commit([message], self.batch)
        self.batch += 1
        self.archived = wanted

    def _files(self) -> tuple[FilesWritten, dict[int, int]]:
        wanted = {n: self.draw.randint(self.archived[n], len(self.written[n])) for n in range(PARTITIONS)}
        prefix = f"q-{self.batch:08}-00000"
        records = FileSet(self.folder / RECORDS, prefix, INSIDE, by_date=True)
        dead = FileSet(self.folder / DEAD_LETTERS, prefix, DEAD_SCHEMA, by_date=False)
        for partition, end in wanted.items():
            if end == self.archived[partition]:
                continue
            rows = headrace.arrow.read(
                self.topic,
                bootstrap=self.bootstrap,
                partitions=[partition],
                columns=RECORD_COLUMNS,
                start=self.archived[partition],
                end=end,
            ).read_all()
            reasons = pa.array([self.draw.choice([None, None, "bad"]) for _ in range(len(rows))], pa.string())
            for each in rows.append_column("reason", reasons).to_batches():
                for files, part in zip((records, dead), parted(each), strict=True):
                    if len(part):
                        files.add(part)
        return FilesWritten(tuple(records.close()), tuple(dead.close())), wanted

    def delete(self) -> None:
        with Cluster(self.bootstrap) as cluster:
            for partition, archived in self.archived.items():
                to = self.draw.randint(self.log_starts[partition], archived)
                delete_records(cluster, self.topic, {partition: to})
                self.log_starts[partition] = to

    def compact(self) -> None:
        table = DeltaTable(str(self.folder / RECORDS))
        if table.version():
            table.optimize.compact()

    def read(self, **how: Any) -> Rows:
        found: Rows = defaultdict(list)
        rows = headrace.arrow.read(
            self.topic, bootstrap=self.bootstrap, columns=COLUMNS, history=self.folder, batch_rows=17, **how
        )
        for row in rows.read_all().to_pylist():
            place = row["offset"], row["timestamp"], row["key"], row["value"], str(row["headers"])
            found[row["partition"]].append(place)
        return {partition: sorted(rows) for partition, rows in found.items()}


SENT = pa.schema(
    [
        ("partition", pa.int32()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", RECORDS_SCHEMA.field("headers").type),
    ]
)


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


def test_what_neither_has_is_told(broker: Broker, tmp_path: Path, seed: int) -> None:
    world = World(broker, tmp_path / "a", random.Random(seed))
    while any(len(world.written[n]) < 10 for n in range(PARTITIONS)):
        world.produce()
    world.archive()
    with Cluster(world.bootstrap) as cluster:
        delete_records(cluster, world.topic, {0: len(world.written[0])})
    world.produce()
    world.archived[0] = 0
    if History(world.folder).ends.get((world.topic, 0), 0) < len(world.written[0]):
        with pytest.raises(OffsetOutOfRange):
            world.read(start=0)


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
