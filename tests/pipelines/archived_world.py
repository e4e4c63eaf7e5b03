"""A topic and its archive, filled batch by batch as the pipeline does, beside all that was ever written. No Spark."""

from __future__ import annotations

import datetime
import json
import random
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

import headrace.arrow
from brokers import Broker
from clients.topics import create_topic
from headrace.arrow.write import write
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import delete_records
from headrace.pipelines import archive_tables, delta
from headrace.pipelines.archive_files import FileSet
from headrace.pipelines.archive_sink import ArchiveWriter, FilesWritten, parted
from headrace.pipelines.archive_tables import DEAD_LETTERS, DEAD_SCHEMA, RECORD_COLUMNS, RECORDS, RECORDS_SCHEMA

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
