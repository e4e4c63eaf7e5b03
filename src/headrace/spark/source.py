"""`format("headrace")`: topics as a batch source, a streaming source and a sink.

    spark.read.format("headrace").option("bootstrap", "127.0.0.1:9092").option("subscribe", "orders").load()

The rows are those of Spark's Kafka source: key, value, topic, partition, offset, timestamp, timestampType, and headers
with `includeHeaders`. Option `columns` names the columns, so that no others are sent to Spark; it can ask for more
(see `headrace.records.arrow.TYPES`). Options are those of Spark's Kafka source; `headrace.spark.options` has them all.

A batch DataFrame is planned when it is first used, and reads the same offsets ever after; `load()` anew for what came
since. Option `pushFilters` hands filters on topic, partition, offset and timestamp down to the scan. It is for a
DataFrame that is used in one place of one query: Spark (4.1 to 4.3) keeps one plan per `load()`, so the filters of the
last query that was planned would hold for every other use of the same DataFrame. The bounds in the options have no such
catch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from headrace.client.admin.cluster import Cluster
from headrace.client.fetch_requests import EARLIEST
from headrace.errors import SettingError
from headrace.records.arrow import TYPES, schema
from headrace.spark import catalog_table, filters, loss, options, plan, split_reader
from headrace.spark.connections import cluster_at
from headrace.spark.options import SourceOptions
from headrace.spark.plan import Place, Split
from headrace.spark.session import SETTINGS
from headrace.spark.stream import StreamReader, past_of

if TYPE_CHECKING:
    from headrace.spark.history import Past

log = logging.getLogger(__name__)

_hinted: list[bool] = []


class HeadraceSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "headrace"

    def schema(self) -> StructType:
        _hint()
        table = catalog_table.options_of(self.options)
        given = self.options if table is None else catalog_table.reader_options({}, table)
        columns = from_arrow_schema(schema(options.parse(given, streaming=False).columns))
        return columns if table is None else catalog_table.with_options(columns, table)

    def reader(self, schema: StructType) -> DataSourceReader:
        chosen = options.parse(self._to_read(schema), streaming=False, columns=_columns(schema))
        return FilteringReader(chosen) if chosen.push_filters else BatchReader(chosen)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(options.parse(self._to_read(schema), streaming=True, columns=_columns(schema)))

    def _to_read(self, schema: StructType) -> dict[str, str]:
        return catalog_table.reader_options(self.options, catalog_table.remembered(schema))

    def _to_write(self, schema: StructType) -> dict[str, str]:
        return catalog_table.writer_options(self.options, catalog_table.remembered(schema))

    # The sink is brought in when it is asked for: most of the processes that Spark starts for a source only read.
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from headrace.spark import sink

        return sink.BatchWriter(sink.parse(self._to_write(schema)), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from headrace.spark import sink

        return sink.StreamWriter(sink.parse(self._to_write(schema), streaming=True), schema, overwrite)


def _hint() -> None:
    """One line for whoever made a session without our settings; workers see this one of them."""
    if os.environ.get("PYTHON_UNIX_DOMAIN_ENABLED", "").lower() != "true" and not _hinted:
        _hinted.append(True)
        settings = ", ".join(f"{key}={value}" for key, value in SETTINGS.items() if "arrow.max" in key or "unix" in key)
        log.warning("headrace: Spark is faster with %s; headrace.spark.start sets them", settings)


def _columns(asked: StructType) -> tuple[str, ...]:
    """The columns of a schema, the user's own included, which may name some of them."""
    for field in asked:
        there = from_arrow_schema(schema([field.name])) if field.name in TYPES else None
        if there is None or there[0].dataType != field.dataType:
            told = f"is {there[0].dataType.simpleString()}" if there else "is not there"
            raise SettingError(
                f"column {field.name!r} of the schema {told}; columns are {', '.join(TYPES)}, to be cast after load()"
            )
    return tuple(asked.fieldNames())


class BatchReader(DataSourceReader):
    def __init__(self, chosen: SourceOptions) -> None:
        self._options = chosen
        self._pushed = filters.Pushed()

    def partitions(self) -> list[InputPartition]:
        chosen = self._options
        archived: list[InputPartition] = []
        with cluster_at(chosen.bootstrap, chosen.timeout_ms, isolation=chosen.isolation) as cluster:
            found = plan.find(cluster, chosen.topics)
            past = past_of(cluster, chosen, found)
            spans = self._filtered(cluster, self._bounds(cluster, found.places, past), past)
            of_broker: tuple[Mapping[Place, tuple[int, int]], ...] = (spans,)
            if past is not None:
                of_archive, of_broker = past.divide(spans, fail=chosen.fail_on_data_loss)
                archived += past.splits(of_archive, self._pushed.from_ms)
            splits = plan.cut_all(
                cluster, found.ids, of_broker, min_partitions=chosen.min_partitions, max_records=chosen.max_records
            )
        # Without any, Spark would make one of its own.
        return [*archived, *splits] or [Split("", 0, 0, 0, "")]

    def _bounds(self, cluster: Cluster, places: tuple[Place, ...], past: Past | None) -> dict[Place, tuple[int, int]]:
        chosen = self._options
        starts = plan.resolve(cluster, chosen.start, places, "starting", late=chosen.late_start, past=past)
        ends = plan.resolve(cluster, chosen.end, places, "ending", past=past)
        gone = []
        if chosen.start.offsets is not None:
            floors = plan.ends_of(cluster, places, EARLIEST) if past is None else past.floors()
            for place, log_start in floors.items():
                if starts[place] < log_start and starts[place] < ends[place]:
                    gone.append(loss.deleted(place, starts[place], ends[place], log_start))
                    starts[place] = min(log_start, ends[place])
        loss.report(gone, fail=chosen.fail_on_data_loss)
        for (topic, partition), start in starts.items():
            if chosen.start.offsets and chosen.end.offsets and start > ends[topic, partition]:
                raise SettingError(
                    f"{topic}-{partition}: startingOffsets {start} is after endingOffsets {ends[topic, partition]}"
                )
        return {place: (starts[place], ends[place]) for place in places}

    def _filtered(
        self, cluster: Cluster, bounds: dict[Place, tuple[int, int]], past: Past | None
    ) -> Mapping[Place, tuple[int, int]]:
        pushed = self._pushed
        spans = {place: pushed.span(*bound) for place, bound in bounds.items() if pushed.takes(*place)}
        spans = {place: span for place, span in spans.items() if span[0] < span[1]}
        if pushed.from_ms is not None and pushed.from_ms > 0:
            firsts = plan.first_at(cluster, dict.fromkeys(spans, pushed.from_ms), past)
            spans = {
                place: (max(start, first), end)
                for place, (start, end) in spans.items()
                if (first := firsts[place]) is not None
            }
        return spans

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return split_reader.read(self._options, partition)


class FilteringReader(BatchReader):
    """Spark refuses it, and names the setting, where `spark.sql.python.filterPushdown.enabled` is off."""

    def pushFilters(self, filters_: list[Filter]) -> list[Filter]:
        self._pushed, left = filters.push(filters_)
        return left
