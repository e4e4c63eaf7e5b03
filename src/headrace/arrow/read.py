"""Reading topics into Arrow batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.bulk import Span, record_sets
from headrace.client.cluster import Cluster
from headrace.client.offsets import EARLIEST, LATEST, list_offsets
from headrace.records.arrow import BATCH_ROWS, DEFAULT_COLUMNS, Decoder, schema


def read(
    topic: str,
    *,
    bootstrap: str = DEFAULT_BOOTSTRAP,
    partitions: Iterable[int] | None = None,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    batch_rows: int = BATCH_ROWS,
) -> pa.RecordBatchReader:
    """All records that the topic has now."""

    def rows() -> Iterable[pa.RecordBatch]:
        with Cluster(bootstrap) as cluster:
            chosen = range(len(cluster.topic(topic).partitions)) if partitions is None else list(partitions)
            starts = list_offsets(cluster, topic, dict.fromkeys(chosen, EARLIEST))
            ends = list_offsets(cluster, topic, dict.fromkeys(chosen, LATEST))
            for partition in chosen:
                span = Span(topic, partition, starts[partition].offset, ends[partition].offset)
                decoder = Decoder(topic, partition, columns, batch_rows=batch_rows)
                for records in record_sets(cluster, span):
                    yield from decoder.decode(records, span.first_offset, span.next_offset)

    return pa.RecordBatchReader.from_batches(schema(columns), rows())
