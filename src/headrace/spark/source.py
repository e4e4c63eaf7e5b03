"""`format("headrace")`: topics as a batch source, a streaming source and a sink.

    spark.read.format("headrace").option("bootstrap", "127.0.0.1:9092").option("subscribe", "orders").load()

The rows are those of Spark's Kafka source: key, value, topic, partition, offset, timestamp, timestampType, and headers
with `includeHeaders`. Option `columns` names the columns, so that no others are sent to Spark; it can ask for more
(see `headrace.records.arrow.TYPES`). Options are those of Spark's Kafka source; `headrace.spark.options` has them all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from headrace.errors import SettingError
from headrace.records.arrow import schema
from headrace.spark import options, planning, reading
from headrace.spark.connections import cluster_at
from headrace.spark.planning import Split
from headrace.spark.stream import StreamReader


class HeadraceSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "headrace"

    def schema(self) -> StructType:
        return from_arrow_schema(schema(options.columns_of(self.options)))

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(options.parse(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(options.parse(self.options, streaming=True), schema)


class BatchReader(DataSourceReader):
    def __init__(self, chosen: options.SourceOptions, asked: StructType) -> None:
        self._options = chosen
        self._how = reading.How.of(chosen)

    def partitions(self) -> list[Split]:
        chosen = self._options
        with cluster_at(chosen.bootstrap, chosen.timeout_ms) as cluster:
            found = planning.find(cluster, chosen.topics)
            starts = planning.resolve(cluster, chosen.start, found.places, "starting", late=chosen.late_start)
            ends = planning.resolve(cluster, chosen.end, found.places, "ending")
            spans = {place: (starts[place], ends[place]) for place in found.places}
            splits = planning.cut(
                cluster, found.ids, spans, min_partitions=chosen.min_partitions, max_records=chosen.max_records
            )
        return splits or [Split("", 0, 0, 0, "")]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Split):
            raise SettingError(f"{partition!r} is not a split of this source")
        return reading.read(self._how, partition)
