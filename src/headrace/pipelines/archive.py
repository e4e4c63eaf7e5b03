"""`headrace pipeline archive`: topics kept in a Delta or Iceberg table, or as Parquet files, each record once.

    topics -> format("headrace") -> columns (JSON decoded, if asked) -> archive sink -> records/ and dead_letters/

The offsets of what is archived are committed to a consumer group after each batch that the table holds, never before:
a broker whose topic has `retention.archived` deletes by them. With `starting="latest"` what was in the topic before is
not archived, and the group's offsets say that it is not waited for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from headrace.arrow import iceberg
from headrace.arrow.iceberg import Where
from headrace.arrow.locations import ObjectPath
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.errors import HeadraceError, OperatorError
from headrace.pipelines import archive_contents, archive_group, archive_state, archive_tables, json_columns, query_watch
from headrace.pipelines.archive_format import FORMAT, ArchiveSink
from headrace.pipelines.archive_state import Origin, Query
from headrace.pipelines.archive_tables import (
    DEAD_LETTERS,
    DEAD_SCHEMA,
    RECORD_COLUMNS,
    RECORDS,
    RECORDS_SCHEMA,
    Offsets,
)
from headrace.pipelines.query_watch import Batches
from headrace.pipelines.small_files import MergeOptions, SmallFiles
from headrace.pipelines.summary import Progress, Summary, Table, rate
from headrace.records.isolation import Isolation
from headrace.spark import plan, session
from headrace.spark.options import Topics
from headrace.spark.progress import Position, nested
from headrace.spark.source import HeadraceSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

DEFAULT_MAX_OFFSETS: Final = 2_000_000
NO_SPACE: Final = "No space left on device"
"""As an archive's tasks say it, and Spark of its checkpoint."""
EXPIRE_EVERY_S: Final = 3600.0
# A broker may be restarted under the archive.
BROKER_TIMEOUT_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """Topics by name or by pattern, and the folder. `schema` is DDL for `decode="json"`, else sampled."""

    to: Path
    bootstrap: str
    topics: tuple[str, ...] = ()
    pattern: str = ""
    format: str = "delta"
    follow: bool = False
    decode: str | None = None
    schema: str | None = None
    drop_value: bool = False
    group: str = archive_group.DEFAULT_GROUP
    max_offsets_per_trigger: int = DEFAULT_MAX_OFFSETS
    trigger_s: float = 1.0
    starting: str = "earliest"
    accept_loss: bool = False
    merge: MergeOptions | None = None
    """Merge small files meanwhile."""
    checkpoint: Path | None = None
    """In the archive, unless that is in a store."""
    catalog: Where | None = None
    """Of `format="iceberg"`; as the archive knows it, or its own."""

    @property
    def subject(self) -> Topics:
        return Topics(names=tuple(sorted(set(self.topics))), pattern=self.pattern)

    @property
    def folder(self) -> Path:
        return self.to.resolve()

    @property
    def checkpoint_folder(self) -> Path:
        return self.checkpoint.resolve() if self.checkpoint else archive_state.checkpoint_of(self.folder)


def check(options: ArchiveOptions) -> plan.TopicsFound:
    """Fail early, before Spark starts: the broker answers, the topics are there, the folder can be used."""
    if bool(options.topics) == bool(options.pattern):
        raise OperatorError("either topics or a pattern has to be given")
    if options.decode and options.format == "parquet":
        raise OperatorError("--decode needs --format delta or iceberg: those have a table for dead letters")
    if options.catalog and options.format != "iceberg":
        raise OperatorError("--catalog and --namespace are for --format iceberg")
    if options.merge and options.format != "delta":
        raise OperatorError("--merge needs --format delta: Spark keeps a log of the Parquet files that it has written")
    if options.format != "delta" and isinstance(options.folder, ObjectPath):
        why = "Spark itself writes the files, and cannot write to a store"
        if options.format == "iceberg":
            why = "its metadata is synced to a disk before the catalog names it"
        raise OperatorError(f"--format {options.format} needs a folder: {why}")
    with _cluster(options) as cluster:
        found = plan.find(cluster, options.subject)
        with archive_state.locked(options.folder, options.checkpoint_folder):
            if options.format == "iceberg":
                _check_iceberg(options)
            origin = archive_state.origin(options.folder, options.checkpoint_folder)
            archive_group.refuse_others(cluster, options.group, origin.id, found.places)
            return found


def run(spark: SparkSession, options: ArchiveOptions, progress: Progress | None = None) -> Summary:
    """Archive what the topics have now, or with `follow` until a signal comes."""
    progress = progress or Progress()
    check(options)
    with archive_state.locked(options.folder, options.checkpoint_folder):
        schema = _schema(spark, options)
        # Before a checkpoint that has topic ids may go.
        origin = archive_state.origin(options.folder, options.checkpoint_folder)
        archive_state.remember(options.folder, origin)
        query = archive_state.begin(options.folder, options.checkpoint_folder, _identity(options, schema))
        _make_tables(options, schema)
        before = archive_contents.listed(options.folder, options.format)
        archived = archive_tables.archived_offsets(options.folder) if options.format != "parquet" else {}
        ids, starts = _starts(options, archived, origin, is_new=query.is_new)
        origin = replace(origin, topics={**origin.topics, **ids})
        archive_state.remember(options.folder, origin)
        with query_watch.signals() as stopping:
            # A query that is new begins at `starts`, and what is before them is not waited for.
            passed = query.is_new and options.starting == "latest"
            has = starts if passed else {place: archived[place] for place in starts if place in archived}
            followed = _Followed(options, progress, Position(has, ids), origin)
            rows = _rows(spark, options, schema, starts)
            interrupted = _run(lambda: _start(rows, options, query), followed, stopping, options.folder)
        if followed.small_files is not None and not interrupted:
            followed.small_files.merge_all()
        if options.format != "parquet":
            archive_tables.sweep(options.folder, query.name)
        if options.format == "iceberg":
            _expire_snapshots(options)
        followed.commit_last()
        progress.done()
        added = archive_contents.listed(options.folder, options.format) - before
        rows_added = archive_contents.describe(options.folder, added, archived)
        return _summary(options, query, rows_added, followed, interrupted)


def _where(options: ArchiveOptions) -> Where:
    return options.catalog or iceberg.where(options.folder) or Where()


def _check_iceberg(options: ArchiveOptions) -> None:
    iceberg.require()
    from headrace.pipelines import iceberg_tables

    iceberg_tables.check(options.folder, _where(options))


def _make_tables(options: ArchiveOptions, schema: StructType | None) -> None:
    decoded = json_columns.columns(schema) if schema else ()
    if options.format == "delta":
        archive_tables.make_records(options.folder / RECORDS, decoded)
        if schema:
            archive_tables.make_dead_letters(options.folder / DEAD_LETTERS)
    elif options.format == "iceberg":
        from headrace.pipelines import iceberg_tables

        known, of_records = _where(options), [RECORDS_SCHEMA.field(name) for name in RECORD_COLUMNS]
        wanted = pa.schema([*of_records, *to_arrow_schema(StructType(list(decoded)), timezone="UTC")])
        iceberg_tables.make(options.folder, known, RECORDS, wanted, by_day=True)
        if schema:
            iceberg_tables.make(options.folder, known, DEAD_LETTERS, DEAD_SCHEMA, by_day=False)


def _expire_snapshots(options: ArchiveOptions) -> None:
    """Each batch adds one, and a table's metadata, which each batch writes anew, lists them all."""
    from headrace.pipelines import iceberg_tables

    for name in (RECORDS, DEAD_LETTERS):
        iceberg_tables.expire(options.folder, name, datetime.now(UTC) - timedelta(hours=iceberg_tables.KEPT_HOURS))


def _cluster(options: ArchiveOptions) -> Cluster:
    """An archive has what is committed, and its group never passes an open transaction."""
    retry = Retry(within_ms=BROKER_TIMEOUT_MS, first_contact_ms=0)
    return Cluster(options.bootstrap, retry=retry, isolation=Isolation.COMMITTED)


def _schema(spark: SparkSession, options: ArchiveOptions) -> StructType | None:
    """The schema of JSON values: given, else as the archive had it for these topics, else sampled."""
    if options.decode is None:
        return None
    if options.schema is not None:
        return json_columns.given_schema(options.schema)
    known = archive_state.known_identity(options.folder)
    if known and known["schema"] and known == _identity(options, StructType.fromJson(known["schema"])):
        return StructType.fromJson(known["schema"])
    with _cluster(options) as cluster:
        return json_columns.sampled_schema(spark, cluster, plan.find(cluster, options.subject).ids)


def _identity(options: ArchiveOptions, schema: StructType | None) -> dict[str, Any]:
    return {
        "topics": list(options.subject.names),
        "pattern": options.pattern,
        "format": options.format,
        "schema": json.loads(schema.json()) if schema else None,
        "drop_value": options.drop_value,
        **({"catalog": asdict(_where(options))} if options.format == "iceberg" else {}),
    }


def _starts(
    options: ArchiveOptions, archived: Offsets, origin: Origin, *, is_new: bool
) -> tuple[dict[str, str], Offsets]:
    """Topic ids, and where a query without a checkpoint begins: after what the tables have, else as it was told."""
    with _cluster(options) as cluster:
        found = plan.find(cluster, options.subject)
        ends = plan.ends_of(cluster, found.places, LATEST)
        begins = plan.ends_of(cluster, found.places, EARLIEST) if options.starting == "earliest" else ends
        committed = archive_group.refuse_others(cluster, options.group, origin.id, found.places)
    kept = {topic for topic, _ in archived} if options.format != "parquet" else set(origin.topics)
    for topic in sorted(kept & found.ids.keys()):
        before, now = origin.topics.get(topic, found.ids[topic]), found.ids[topic]
        if before != now:
            raise OperatorError(
                f"topic {topic} was made anew: {options.folder} has records of the one with id {before}, and now its "
                f"id is {now}; give another --to"
            )
    for (topic, partition), end in ends.items():
        if archived.get((topic, partition), 0) > end:
            raise OperatorError(
                f"{topic}-{partition} ends at offset {end}, but {archived[topic, partition]} are archived in "
                f"{options.folder}: the topic has lost records, or was made anew; give another --to"
            )
    if is_new and options.starting == "latest":
        fresh = {place: begins[place] for place in found.places if place not in archived}
        archive_group.refuse_passing_over(options.group, committed, fresh)
    return found.ids, {place: archived.get(place, begins[place]) for place in found.places}


def _rows(spark: SparkSession, options: ArchiveOptions, schema: StructType | None, starts: Offsets) -> DataFrame:
    session.register_source(spark, HeadraceSource)
    subscribed = {"subscribePattern": options.pattern} if options.pattern else {"subscribe": ",".join(options.topics)}
    rows = (
        spark.readStream.format("headrace")
        .option("kafka.bootstrap.servers", options.bootstrap)
        .option("columns", ",".join(RECORD_COLUMNS))
        .option("maxOffsetsPerTrigger", options.max_offsets_per_trigger)
        # The source commits what it has read; only the archive itself commits to its group.
        .option("kafka.group.id", f"{options.group}-reading")
        .option("timeout", f"{BROKER_TIMEOUT_MS}ms")
        .option("failOnDataLoss", not options.accept_loss)
        .option("isolation", "committed")
        .option("startingOffsets", json.dumps(nested(starts)) if starts else options.starting)
        .options(**subscribed)
        .load()
    )
    if schema is None:
        return rows
    return json_columns.decode(rows, schema, drop_value=options.drop_value)


def _start(rows: DataFrame, options: ArchiveOptions, query: Query) -> StreamingQuery:
    if options.format != "parquet":
        session.register_source(rows.sparkSession, ArchiveSink)
        writer = rows.writeStream.format(FORMAT).option("path", str(options.folder)).option("query", query.name)
    else:
        dated = rows.withColumn("date", F.to_date("timestamp"))
        writer = dated.writeStream.format("parquet").option("path", str(options.folder / RECORDS))
        writer = writer.partitionBy("topic", "date").option("compression", "zstd")
    writer = writer.option("checkpointLocation", str(options.checkpoint_folder)).queryName(f"archive-{query.name}")
    if options.follow:
        return writer.trigger(processingTime=f"{options.trigger_s:g} seconds").start()
    return writer.trigger(availableNow=True).start()


class _Followed:
    """How far the query is, told to the group and to who looks on."""

    def __init__(self, options: ArchiveOptions, progress: Progress, reached: Position, origin: Origin) -> None:
        self._options = options
        self._progress = progress
        self._origin = origin
        self._batches = Batches()
        self._may_merge = True
        self._expired_at_s = 0.0
        self.small_files = SmallFiles(options.folder, options.merge) if options.merge else None
        self.records = 0
        self.reached = reached
        self.ends: Offsets = {}

    @property
    def lag(self) -> int:
        return sum(max(0, end - self.reached.offsets.get(place, 0)) for place, end in self.ends.items())

    @property
    def elapsed_s(self) -> float:
        return self._progress.elapsed_s

    def see(self, running: StreamingQuery) -> None:
        """Take in the batches that Spark has finished since the last look."""
        fresh = self._batches.fresh(running)
        for each in fresh:
            self.records += each["numInputRows"]
            end = each["sources"][0]["endOffset"]
            if end:
                self.reached = Position.from_json(end)
        if fresh:
            archive_state.publish(self._options.folder, self._options.checkpoint_folder)
            self._remember()
            self._commit(patient=False)
        left = f"{self.lag:,} to go" if self.ends else "the first batch is under way"
        self._progress.say(f"archived {self.records:,} records, {rate(self.records, self.elapsed_s)}, {left}")
        if self._options.format == "iceberg" and self.elapsed_s - self._expired_at_s >= EXPIRE_EVERY_S:
            self._expired_at_s = self.elapsed_s
            _expire_snapshots(self._options)
        if self.small_files is not None and (fresh or self._may_merge):
            self._may_merge = self.small_files.merge_some()

    def _remember(self) -> None:
        """Topics that have come since the start, by a pattern. Until then the checkpoint has their ids."""
        if self.reached.ids.keys() - self._origin.topics.keys():
            self._origin = replace(self._origin, topics={**self.reached.ids, **self._origin.topics})
            archive_state.remember(self._options.folder, self._origin)

    def commit_last(self) -> None:
        try:
            self._commit(patient=True)
        except HeadraceError as error:
            raise OperatorError(
                f"everything read is archived, but group {self._options.group} could not be told: {error}; "
                "run the archive again"
            ) from None

    def _commit(self, *, patient: bool) -> None:
        """A broker that is away for now is told after the next batch; nothing is told of a topic made anew."""
        try:
            with _cluster(self._options) as cluster:
                found = plan.find(cluster, self._options.subject, missing_ok=True)
                told = archive_group.tell(cluster, self._options.group, self._origin.id, self.reached, found)
                self.ends = plan.ends_of(cluster, told, LATEST)
        except archive_group.NotOurs:
            raise
        except HeadraceError:
            if patient:
                raise


def _run(start: Callable[[], StreamingQuery], followed: _Followed, stopping: threading.Event, folder: Path) -> bool:
    """Run the query to its end. True if interrupted."""
    try:
        return query_watch.run(lambda: [start()], lambda queries: followed.see(queries[0]), stopping)
    except StreamingQueryException as error:
        if NO_SPACE not in str(error):
            raise
        raise OperatorError(
            f"the archive {folder} cannot be written: {NO_SPACE}; make room and run it again, it goes on where it ended"
        ) from None


def _summary(
    options: ArchiveOptions, query: Query, rows: list[dict[str, Any]], followed: _Followed, interrupted: bool
) -> Summary:
    facts = {
        "archive": str(options.folder),
        "records": sum(row["records"] for row in rows),
        "dead_letters": sum(row["dead_letters"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "files": sum(row["files"] for row in rows),
        "lag": followed.lag,
        "lost_offsets": sum(followed.reached.lost.values()),
        "seconds": round(followed.elapsed_s, 1),
        "group": options.group,
        "query": query.name,
    }
    if followed.small_files is not None:
        facts |= {"files_merged": followed.small_files.merged, "files_vacuumed": followed.small_files.removed}
    columns = ("topic", "partition", "records", "dead_letters", "bytes", "files", "first_offset", "next_offset")
    table = Table("partitions", columns, rows)
    return Summary("archive", facts, (table,), ok=options.follow or not interrupted)
