"""Topics as a stream: which offsets the next batch has, what of them is gone, and how it is cut for the tasks.

Planning runs in a process beside the driver, one for each query. All that survives a restart is in Spark's checkpoint
(`headrace.spark.progress` has its form). Spark plans a batch only after the one before is complete, so the offset that
planning starts from is what the query has done with. It is committed then, as the progress of a consumer group, if
`headrace.spark.group_commits` has not done so when the batch was complete: only the driver hears of that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from headrace.client.admin.cluster import Cluster
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.records.isolation import Isolation
from headrace.spark import loss, plan, progress, split_reader
from headrace.spark.connections import cluster_at
from headrace.spark.options import SourceOptions
from headrace.spark.plan import Place, TopicsFound
from headrace.spark.progress import Position, StreamOffset

if TYPE_CHECKING:
    from headrace.spark.history import Past

SIZES_FOR_S: Final = 60.0
"""How long the mean size of a partition's records is taken to be as it was."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, chosen: SourceOptions) -> None:
        self._options = chosen
        self._group_id = chosen.group_id or progress.default_group_id(chosen.topics, chosen.group_prefix)
        self._committed: dict[Place, int] = {}
        self._target: dict[Place, int] | None = None
        self._latest: StreamOffset | None = None
        self._record_bytes: dict[Place, float] = {}
        self._sized_at_s: float | None = None
        self._planned_at_s: float | None = None
        self._reached = False

    def initialOffset(self) -> StreamOffset:
        chosen = self._options
        with self._cluster() as cluster:
            found = plan.find(cluster, chosen.topics)
            past = past_of(cluster, chosen, found)
            starts = plan.resolve(cluster, chosen.start, found.places, "starting", late=chosen.late_start, past=past)
        return Position(starts, found.ids).to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        with self._cluster() as cluster:
            found = plan.find(cluster, self._options.topics, missing_ok=True)
            self._target = plan.ends_of(cluster, found.places, LATEST)

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        if self._options.min_offsets is not None:
            return ReadMinRows(self._options.min_offsets)
        return ReadAllAvailable()

    def latestOffset(self, start: StreamOffset, limit: ReadLimit) -> StreamOffset:
        before = Position.from_json(start)
        with self._cluster() as cluster:
            found = plan.find(cluster, self._options.topics, missing_ok=True)
            self._commit(cluster, before, found)
            log_ends = plan.ends_of(cluster, found.places, LATEST)
            topic_ends = Position(log_ends, found.ids)
            target = log_ends if self._target is None else self._target
            ends = {place: min(end, target[place]) for place, end in log_ends.items() if place in target}
            if (before.offsets == ends and before.ids == found.ids) or self._is_too_early(before, ends, limit):
                self._report(topic_ends, before, before)
                return start
            log_starts = plan.ends_of(cluster, ends, EARLIEST)
            self._size(cluster, log_starts, log_ends)
            if past := self._past(cluster, found, before, log_starts):
                log_starts |= {place: floor for place, floor in past.floors().items() if place in log_starts}
            if any(at > log_ends.get(place, at) for place, at in before.offsets.items()):
                # Of a query that read uncommitted records before, what lies above open transactions is not gone.
                log_ends = plan.ends_of(cluster, found.places, LATEST, Isolation.UNCOMMITTED)
        begin = loss.settle(before, found, log_starts, log_ends, fail=self._options.fail_on_data_loss)
        self._planned_at_s = time.monotonic()
        latest = {place: max(at, ends[place]) for place, at in begin.offsets.items()}
        if isinstance(limit, ReadMaxRows):
            latest = share(begin.offsets, latest, limit.max_rows)
        reached = Position(latest, found.ids, begin.lost)
        self._report(topic_ends, begin, reached)
        return reached.to_json()

    def reportLatestOffset(self) -> StreamOffset | None:
        """Asked for after each `latestOffset`."""
        return self._latest

    def _report(self, ends: Position, begin: Position, reached: Position) -> None:
        told = self._group_id, self._options.bootstrap
        self._latest = progress.ends_report(ends, begin, reached, self._record_bytes, *told)

    def _size(self, cluster: Cluster, log_starts: Mapping[Place, int], log_ends: Mapping[Place, int]) -> None:
        """How large records are, looked up now and then: a batch is small, and this is asked of every broker."""
        now_s = time.monotonic()
        if self._sized_at_s is None or now_s - self._sized_at_s > SIZES_FOR_S or log_starts.keys() - self._record_bytes:
            self._record_bytes = plan.record_bytes(cluster, log_starts, log_ends)
            self._sized_at_s = now_s

    def partitions(self, start: StreamOffset, end: StreamOffset) -> list[InputPartition]:
        before, after = Position.from_json(start), Position.from_json(end)
        chosen = self._options
        archived: list[InputPartition] = []
        with self._cluster() as cluster:
            found = plan.find(cluster, chosen.topics, missing_ok=True)
            moved = [place for place in loss.moved(before, after) if place in found.places]
            log_starts = plan.ends_of(cluster, moved, EARLIEST)
            past = self._past(cluster, found, before, log_starts)
            if past is not None:
                log_starts |= {place: floor for place, floor in past.floors().items() if place in log_starts}
            spans = loss.spans(before, after, found, log_starts, fail=chosen.fail_on_data_loss)
            of_broker: tuple[Mapping[Place, tuple[int, int]], ...] = (spans,)
            if past is not None:
                of_archive, of_broker = past.divide(spans, fail=chosen.fail_on_data_loss, only_deleted=True)
                archived += past.splits(of_archive)
            splits = plan.cut_all(
                cluster, found.ids, of_broker, min_partitions=chosen.min_partitions, max_records=chosen.max_records
            )
        return [*archived, *splits]

    def _past(
        self, cluster: Cluster, found: TopicsFound, before: Position, log_starts: Mapping[Place, int]
    ) -> Past | None:
        """The archive, where the broker has not all any more."""
        behind = any(before.offsets.get(place, 0) < start for place, start in log_starts.items())
        return past_of(cluster, self._options, found) if behind else None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return split_reader.read(self._options, partition)

    def commit(self, end: StreamOffset) -> None:
        """Spark calls it after the next batch is planned, when this is mostly known."""
        done = Position.from_json(end)
        if done.offsets != self._committed:
            with self._cluster() as cluster:
                self._commit(cluster, done, plan.find(cluster, self._options.topics, missing_ok=True))

    @contextmanager
    def _cluster(self) -> Iterator[Cluster]:
        """Patient once the broker was reached: a query outlives the restart of a broker."""
        chosen = self._options
        with cluster_at(
            chosen.bootstrap, chosen.timeout_ms, patient=self._reached, isolation=chosen.isolation
        ) as cluster:
            yield cluster
        self._reached = True

    def _commit(self, cluster: Cluster, done: Position, found: TopicsFound) -> None:
        known = done.still_there(found)
        if known != self._committed and progress.commit(cluster, self._group_id, known):
            self._committed = known

    def _is_too_early(self, before: Position, ends: Mapping[Place, int], limit: ReadLimit) -> bool:
        """Whether fewer offsets wait than a batch is to have at least, and not for too long."""
        least = self._options.min_offsets
        if least is None or self._target is not None or isinstance(limit, ReadAllAvailable):
            return False
        waiting = sum(max(0, end - before.offsets.get(place, 0)) for place, end in ends.items())
        if waiting >= least or self._planned_at_s is None:
            return False
        return time.monotonic() - self._planned_at_s < self._options.trigger_delay_ms / 1000


def past_of(cluster: Cluster, chosen: SourceOptions, found: TopicsFound) -> Past | None:
    """The archive of a query that asks for the whole history."""
    if not chosen.history:
        return None
    # Brought in when it is asked for: it needs more of Arrow than planning does.
    from headrace.spark.history import Past

    past = Past(cluster, chosen.history, found.ids, found.places)
    past.check(chosen.columns)
    return past


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
