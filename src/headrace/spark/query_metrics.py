"""What Spark's report of a batch says of topics: rows, offsets, bytes and lag, of every partition.

    for source in query_metrics.sources(query.lastProgress):
        print(source.group_id, source.rows, source.lag)

Spark (4.3) takes metrics from sources and sinks in Java alone; the lists `metrics` of its reports stay empty for those
in Python. What is here is read from the offsets in the report, and from what our source puts beside the ends of the
topics (`headrace.spark.progress`). Rows are counted by Spark; offsets are those that the batch goes over, which include
markers of transactions and what compaction took; bytes are about as many as that part of the log has on disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace.client.admin.groups import SPARK_QUERY
from headrace.metrics import Family, Sample
from headrace.spark.progress import BATCH_BYTES, BATCH_OFFSETS, BEHIND, GROUP, Position, flat

_QUERY: Final = ("query", "name")
_PLACE: Final = ("query", "group", "topic", "partition")

BATCHES: Final = Family("headrace_spark_batches_total", "counter", "Batches that a query has completed.", _QUERY)
ROWS_IN: Final = Family("headrace_spark_input_rows_total", "counter", "Rows that its sources have given.", _QUERY)
ROWS_OUT: Final = Family("headrace_spark_output_rows_total", "counter", "Rows that its sink has taken.", _QUERY)
BATCH_SECONDS: Final = Family("headrace_spark_batch_seconds", "gauge", "How long the last batch took.", _QUERY)
OFFSETS: Final = Family("headrace_spark_offsets_total", "counter", "Offsets that batches went over.", _PLACE)
BYTES: Final = Family("headrace_spark_bytes_total", "counter", "Bytes of log that they went over, about.", _PLACE)
LAG: Final = Family("headrace_spark_lag", "gauge", "Offsets that came after those of the last batch.", _PLACE)


@dataclass(frozen=True, slots=True)
class PartitionBatch:
    """What a batch has of one partition."""

    topic: str
    partition: int
    next_offset: int
    offsets: int
    bytes: int
    """About."""
    lag: int
    """Offsets that were there when the batch was planned, and come after it."""


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """What a batch has of the topics of one source."""

    group_id: str
    bootstrap: str
    rows: int
    reached: Position
    partitions: tuple[PartitionBatch, ...]

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.partitions)

    @property
    def lag(self) -> int:
        return sum(each.lag for each in self.partitions)


def sources(progress: Mapping[str, Any]) -> list[SourceBatch]:
    """The sources of format `headrace` in a report of Spark, `StreamingQuery.lastProgress` or of a listener.

    A batch that is run again after a restart is not planned anew, and has none of it.
    """
    return [found for each in progress["sources"] if (found := _source(each)) is not None]


def author(progress: Mapping[str, Any]) -> str:
    """Which query it is, as commits to its group say it."""
    name = progress["name"]
    return f"{SPARK_QUERY}{progress['id']}" + (f" {name}" if name else "")


def _source(told: Mapping[str, Any]) -> SourceBatch | None:
    ends, reached = _parsed(told["latestOffset"]), _parsed(told["endOffset"])
    if ends is None or reached is None or GROUP not in ends:
        return None
    end = Position.from_json(reached)
    counts, sizes, behind = (flat(ends.get(key, {})) for key in (BATCH_OFFSETS, BATCH_BYTES, BEHIND))
    partitions = tuple(
        PartitionBatch(*place, at, counts.get(place, 0), sizes.get(place, 0), behind.get(place, 0))
        for place, at in sorted(end.offsets.items())
    )
    group = ends[GROUP]
    return SourceBatch(group["id"], group["bootstrap"], int(told["numInputRows"]), end, partitions)


def _parsed(offset: Any) -> dict[str, Any] | None:
    """An offset as a report has it: JSON, as text or read already; what is not there may be the word None."""
    try:
        found = json.loads(offset) if isinstance(offset, str) else offset
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class Totals:
    """Counts over the batches of queries, as samples for Prometheus. A query that has ended is forgotten.

    Added to by one thread and read by others: what is read is never half of a sample.
    """

    def __init__(self) -> None:
        self._counted: dict[str, dict[tuple[Family, tuple[str, ...]], float]] = {}

    def add(self, progress: Mapping[str, Any]) -> None:
        query, name = str(progress["id"]), progress["name"] or ""
        mine = self._counted.setdefault(query, {})

        def count(family: Family, labels: tuple[str, ...], value: float) -> None:
            before = mine.get((family, labels), 0) if family.kind == "counter" else 0
            mine[family, labels] = before + value

        if "addBatch" in progress["durationMs"]:
            count(BATCHES, (query, name), 1)
            count(ROWS_IN, (query, name), max(0, progress["numInputRows"] or 0))
            # Spark says -1 of a sink that does not count.
            count(ROWS_OUT, (query, name), max(0, progress["sink"]["numOutputRows"] or 0))
            count(BATCH_SECONDS, (query, name), progress["batchDuration"] / 1000)
        for source in sources(progress):
            for each in source.partitions:
                labels = query, source.group_id, each.topic, str(each.partition)
                count(OFFSETS, labels, each.offsets)
                count(BYTES, labels, each.bytes)
                count(LAG, labels, each.lag)

    def forget(self, query: str) -> None:
        self._counted.pop(query, None)

    def samples(self) -> Iterator[Sample]:
        for mine in list(self._counted.values()):
            for (family, labels), value in list(mine.items()):
                yield Sample(family, labels, value)


totals: Final = Totals()
"""Of all queries of this process."""
