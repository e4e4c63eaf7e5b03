"""Topics as a stream. An offset, in Spark's checkpoint, is that of Spark's Kafka source with topic ids beside it:

    {"orders": {"0": 42, "1": 17}, "topic ids": {"orders": "6f1c..."}}

No topic can bear the name "topic ids", and a checkpoint without it is taken too. All that survives a restart is in the
checkpoint. Progress is committed as a consumer group, for people to see; nothing is read back from it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from headrace.client.groups import commit_offsets
from headrace.client.offsets import EARLIEST, LATEST
from headrace.errors import HeadraceError, SettingError
from headrace.spark import planning, reading
from headrace.spark.connections import cluster_at
from headrace.spark.options import SourceOptions
from headrace.spark.planning import Place, Split

TOPIC_IDS: Final = "topic ids"

StreamOffset = dict[str, dict[str, Any]]


def to_json(offsets: Mapping[Place, int], ids: Mapping[str, str]) -> StreamOffset:
    """Sorted, since Spark compares offsets as text."""
    found: StreamOffset = {}
    for (topic, partition), offset in sorted(offsets.items()):
        found.setdefault(topic, {})[str(partition)] = offset
    found[TOPIC_IDS] = {topic: ids[topic] for topic in sorted(found) if topic in ids}
    return found


def from_json(offset: StreamOffset) -> tuple[dict[Place, int], dict[str, str]]:
    offsets = {
        (topic, int(partition)): at
        for topic, partitions in offset.items()
        if topic != TOPIC_IDS
        for partition, at in partitions.items()
    }
    return offsets, dict(offset.get(TOPIC_IDS, {}))


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, chosen: SourceOptions, asked: StructType) -> None:
        self._options = chosen
        self._how = reading.How.of(chosen)
        self._target: dict[Place, int] | None = None

    def initialOffset(self) -> StreamOffset:
        chosen = self._options
        with cluster_at(chosen.bootstrap, chosen.timeout_ms) as cluster:
            found = planning.find(cluster, chosen.topics)
            starts = planning.resolve(cluster, chosen.start, found.places, "starting", late=chosen.late_start)
        return to_json(starts, found.ids)

    def prepareForTriggerAvailableNow(self) -> None:
        chosen = self._options
        with cluster_at(chosen.bootstrap, chosen.timeout_ms) as cluster:
            found = planning.find(cluster, chosen.topics, missing_ok=True)
            self._target = planning.ends_of(cluster, found.places, LATEST)

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.max_offsets
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: StreamOffset, limit: ReadLimit) -> StreamOffset:
        self.commit(start)
        chosen = self._options
        offsets, ids = from_json(start)
        with cluster_at(chosen.bootstrap, chosen.timeout_ms) as cluster:
            found = planning.find(cluster, chosen.topics, missing_ok=True)
            ends = planning.ends_of(cluster, found.places, LATEST) if self._target is None else self._target
            fresh = [place for place in ends if place not in offsets]
            offsets |= planning.ends_of(cluster, fresh, EARLIEST)
        latest = {place: max(at, ends.get(place, at)) for place, at in offsets.items()}
        if isinstance(limit, ReadMaxRows):
            latest = share(offsets, latest, limit.max_rows)
        return to_json(latest, found.ids | ids)

    def partitions(self, start: StreamOffset, end: StreamOffset) -> list[Split]:
        chosen = self._options
        starts, _ = from_json(start)
        ends, ids = from_json(end)
        with cluster_at(chosen.bootstrap, chosen.timeout_ms) as cluster:
            fresh = [place for place in ends if place not in starts]
            starts |= planning.ends_of(cluster, fresh, EARLIEST)
            spans = {place: (starts[place], at) for place, at in ends.items()}
            return planning.cut(
                cluster, ids, spans, min_partitions=chosen.min_partitions, max_records=chosen.max_records
            )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Split):
            raise SettingError(f"{partition!r} is not a split of this source")
        return reading.read(self._how, partition)

    def commit(self, end: StreamOffset) -> None:
        commit_progress(self._options, from_json(end)[0])


def share(offsets: Mapping[Place, int], ends: Mapping[Place, int], limit: int) -> dict[Place, int]:
    """How far each partition goes when all together may go `limit` offsets: in proportion to what each has waiting."""
    lags = {place: ends[place] - at for place, at in offsets.items()}
    total = sum(lags.values())
    if total <= limit:
        return dict(ends)
    taken = {place: lag * limit // total for place, lag in lags.items()}
    left = limit - sum(taken.values())
    for place in sorted(lags, key=lambda place: lags[place] * limit % total, reverse=True)[:left]:
        taken[place] += 1
    return {place: offsets[place] + taken[place] for place in offsets}


def group_id(chosen: SourceOptions) -> str:
    """The same after every restart of a query; two queries of the same topics need a `kafka.group.id` each."""
    if chosen.group_id:
        return chosen.group_id
    return "spark-headrace-" + hashlib.blake2b(chosen.topics.describe().encode(), digest_size=6).hexdigest()


def commit_progress(chosen: SourceOptions, offsets: Mapping[Place, int]) -> None:
    """Tell the broker how far the query is; a query never fails for want of it."""
    if not offsets:
        return
    try:
        with cluster_at(chosen.bootstrap, chosen.timeout_ms) as cluster:
            commit_offsets(cluster, group_id(chosen), offsets)
    except HeadraceError as error:
        print(f"WARN headrace: progress was not committed: {error}", file=sys.stderr, flush=True)
