"""The stores that an audit looks into: topics at a broker, data folders, an archive; all as rows of one schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import functions as F

from headrace.arrow.locations import location
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.groups import fetch_offsets
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.errors import CorruptBatch, OperatorError
from headrace.pipelines import archive_state, archive_tables
from headrace.pipelines.accounting import STORE_COLUMNS
from headrace.pipelines.archive_tables import DEAD_LETTERS, RECORDS
from headrace.pipelines.judgement import Bound
from headrace.records.arrow import digests
from headrace.records.isolation import Isolation
from headrace.spark.log_plan import segment_files
from headrace.spark.options import Topics
from headrace.spark.plan import ends_of, find
from headrace.storage import checkpoint, folder
from headrace.storage.commitlog.queuefile import GONE, Entry
from headrace.storage.offline.commitlog_survey import Folder
from headrace.storage.offline.verify import layout_of
from headrace.storage.scan import Headers, walk, walk_checked
from headrace.system.disk import SystemDisk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COMMITTED: Final = "committed"
ISOLATIONS: Final = (COMMITTED, "uncommitted")
SENT_COLUMNS: Final = ("key", "value", "headers")


@dataclass(frozen=True, slots=True)
class Store:
    """Rows of STORE_COLUMNS, and what can be expected of them; that is asked for after the rows have been read."""

    name: str
    rows: DataFrame
    bounds: Callable[[], Sequence[Bound]]


def topics_at_broker(
    spark: SparkSession, bootstrap: str, topics: Sequence[str], isolation: str = COMMITTED, name: str = "topics"
) -> Store:
    """As readers see them who leave out what is not committed, or who do not."""
    reader = spark.read.format("headrace").option("bootstrap", bootstrap).option("subscribe", ",".join(topics))
    rows = reader.option("isolation", isolation).option("columns", ",".join(STORE_COLUMNS)).load()
    return Store(name, rows, lambda: _log_starts(bootstrap, topics))


def data_folder(spark: SparkSession, data: str, topics: Sequence[str]) -> Store:
    """Batches that cannot be read are left out: what they held is missing from the store, and is told so."""
    reader = spark.read.format("headrace-log").option("topics", ",".join(topics)).option("mode", "PERMISSIVE")
    rows = reader.option("columns", ",".join(STORE_COLUMNS)).load(data)
    return Store(f"data {data}", rows, lambda: list(_kept_in(Path(data), topics)))


def archive(spark: SparkSession, path: str, topics: Sequence[str], bootstrap: str | None, group_id: str) -> Store:
    """Records and dead letters; their digests are made anew. Without a broker all of the ledger has to be there."""
    where = location(path)
    identity = archive_state.known_identity(where)
    if identity and identity.get("drop_value"):
        raise OperatorError(f"the archive {path} keeps no values as they were sent: it cannot be audited")
    # Before the files are listed: an archive that runs commits what it has written, so the list has all of it.
    bounds = [] if bootstrap is None else _archived_until(bootstrap, topics, group_id)
    kept = _archived(spark, where).where(F.col("topic").isin(*topics))
    return Store(f"archive {path}", with_digests(kept, STORE_COLUMNS[:-1]), lambda: bounds)


def put_aside(spark: SparkSession, path: str) -> DataFrame:
    """The dead letters of an archive."""
    dead = archive_tables.frame(spark, location(path), DEAD_LETTERS)
    if dead is None:
        raise OperatorError(f"the archive {path} has no dead letters")
    return dead


def _archived(spark: SparkSession, archive: Path) -> DataFrame:
    """What an archive has of each record; the type of a dead letter's timestamp is not known."""
    columns = (*STORE_COLUMNS[:-1], *SENT_COLUMNS)
    records = archive_tables.frame(spark, archive, RECORDS)
    if records is None and (archive / RECORDS / "_spark_metadata").is_dir():
        records = spark.read.parquet(str(archive / RECORDS))
    if records is None:
        raise OperatorError(f"{archive} has no archive; `headrace pipeline archive --to {archive}` makes one")
    dead = archive_tables.frame(spark, archive, DEAD_LETTERS)
    if dead is None:
        return records.select(*columns)
    dead = dead.withColumn("timestampType", F.lit(None).cast("int"))
    return records.select(*columns).unionAll(dead.select(*columns))


def with_digests(rows: DataFrame, columns: Sequence[str]) -> DataFrame:
    """These columns, and the digest of key, value and headers."""
    wanted = rows.select(*dict.fromkeys((*columns, *SENT_COLUMNS)))
    outcome = rows.select(*columns).schema.add("digest", "long")
    return wanted.mapInArrow(partial(_add_digests, tuple(columns)), outcome)


def _add_digests(columns: Sequence[str], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for rows in batches:
        arrays = [*(rows[name] for name in columns), digests(rows.select(list(SENT_COLUMNS)))]
        yield pa.RecordBatch.from_arrays(arrays, names=[*columns, "digest"])


def _log_starts(bootstrap: str, topics: Sequence[str]) -> list[Bound]:
    compacted = {}
    with Cluster(bootstrap) as cluster:
        for topic in topics:
            policy = {each.name: each.value for each in operations.describe_configs(cluster, "topic", topic)}
            compacted[topic] = "compact" in (policy.get("cleanup.policy") or "")
        starts = ends_of(cluster, find(cluster, Topics(tuple(topics))).places, EARLIEST)
    return [Bound(*place, start, compacted=compacted[place[0]]) for place, start in starts.items()]


def _kept_in(data: Path, topics: Sequence[str]) -> Iterator[Bound]:
    """What was deleted is below the first segment, or the start in the checkpoint; compacted segments have sums."""
    disk = SystemDisk()
    if layout_of(disk, str(data)) == folder.SHARED:
        yield from _kept_in_shared(disk, str(data), topics)
        return
    points = checkpoint.read(disk, str(data)) or {}
    for where, path in folder.partitions(disk, str(data)):
        files = segment_files(disk, path) if where.topic in topics else []
        if not files:
            continue
        point, topic_id = points.get(where), folder.read_topic_id(disk, path)
        # Else the point speaks of a topic that had the same name.
        is_its = point is not None and isinstance(topic_id, bytes) and point.topic_id == topic_id.hex()
        start = point.start_offset if point is not None and is_its else 0
        compacted = any(file.sparse for file in files)
        yield Bound(where.topic, where.partition, max(start, files[0].base_offset), compacted=compacted)


def _kept_in_shared(disk: SystemDisk, data: str, topics: Sequence[str]) -> Iterator[Bound]:
    found = Folder(disk, data)
    found.open()
    for where, each in found.partitions.items():
        if where.topic in topics:
            compacted = any(_has_gaps(found, entry) for entry in each.state.queue.entries(each.start_offset))
            yield Bound(where.topic, where.partition, each.start_offset, compacted=compacted)


def _has_gaps(found: Folder, entry: Entry) -> bool:
    """Whether compaction has removed records that an entry spoke for. Damage does not look like it: headers that say
    so have to be whole."""
    if not entry.has_batches:
        return entry.size == GONE and entry.offset < entry.next_offset
    at, end = entry.byte, entry.byte + entry.size
    try:
        file = found.commit_log.file(entry.number)
        return _is_thin(walk(file, at, end), entry) and _is_thin(walk_checked(file, at, end), entry)
    except (CorruptBatch, FileNotFoundError):  # or a running broker has removed it
        return False


def _is_thin(headers: Headers, entry: Entry) -> bool:
    expected, records = entry.offset, 0
    for _, header in headers:
        if header.base_offset != expected:
            return False  # no gap is inside an entry
        expected, records = header.next_offset, records + header.record_count
    return records < entry.next_offset - entry.offset


def _archived_until(bootstrap: str, topics: Sequence[str], group_id: str) -> list[Bound]:
    """What the archive has not committed is not in it yet, and what the broker has deleted will never be.

    Log starts and ends are asked for first: a topic may let go of what the archive commits in between.
    """
    with Cluster(bootstrap, isolation=Isolation.COMMITTED) as cluster:
        places = find(cluster, Topics(tuple(topics))).places
        starts, ends = ends_of(cluster, places, EARLIEST), ends_of(cluster, places, LATEST)
        committed = fetch_offsets(cluster, group_id, list(starts))
    unknown = sorted(set(topics) - {topic for topic, _ in committed})
    if unknown:
        raise OperatorError(
            f"group {group_id!r} has committed no offset of {', '.join(unknown)}, so nobody knows how far the archive "
            "is: give its group with --archive-group, or the topics that it archives with --topics"
        )
    return [
        Bound(
            *place,
            next_offset=max(committed.get(place, 0), log_start),
            complete=place in ends and committed.get(place, 0) >= ends[place],
        )
        for place, log_start in starts.items()
    ]
