"""Reading one split: raw record sets from the broker, decoded into Arrow batches, no object per record.

What the log no longer has is never skipped in silence: the read fails and says what is missing, or, where the query
allows it, says so in the log and goes on behind the gap.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from headrace.client.bulk import Span, record_sets
from headrace.client.cluster import Cluster
from headrace.client.offsets import EARLIEST
from headrace.errors import Code, HeadraceError
from headrace.records.arrow import Decoder
from headrace.records.batch import batches
from headrace.spark.connections import cluster_at
from headrace.spark.options import SourceOptions
from headrace.spark.planning import Split, ends_of


class DataLoss(HeadraceError):
    """Records that a query was to read are not there any more."""


ADVICE = "set failOnDataLoss=false to go on without them"


@dataclass(frozen=True, slots=True)
class How:
    """What a task has to know beside its split."""

    bootstrap: str
    timeout_ms: int
    columns: tuple[str, ...]
    fail_on_data_loss: bool

    @classmethod
    def of(cls, options: SourceOptions) -> How:
        return cls(options.bootstrap, options.timeout_ms, options.columns, options.fail_on_data_loss)


def read(how: How, split: Split) -> Iterator[pa.RecordBatch]:
    with cluster_at(how.bootstrap, how.timeout_ms) as cluster:
        decoder = Decoder(split.topic, split.partition, how.columns)
        at = split.first_offset
        while at < split.next_offset:
            last: memoryview | None = None
            try:
                for records in record_sets(cluster, Span(split.topic, split.partition, at, split.next_offset)):
                    _check_same_topic(cluster, split, at)
                    yield from decoder.decode(records, at, split.next_offset)
                    last = records
                return
            except HeadraceError as error:
                if error.kafka_code != Code.OFFSET_OUT_OF_RANGE:
                    raise
                at = _behind_gap(cluster, how, split, at if last is None else _end_of(last))


def _check_same_topic(cluster: Cluster, split: Split, at: int) -> None:
    if split.topic_id and cluster.topic(split.topic).topic_id.hex() != split.topic_id:
        raise DataLoss(
            f"topic {split.topic!r} was deleted and created again while partition {split.partition} was read "
            f"at offset {at}; its records before that are gone"
        )


def _end_of(records: memoryview) -> int:
    end = 0
    for header, _ in batches(records):
        end = header.next_offset
    return end


def _behind_gap(cluster: Cluster, how: How, split: Split, at: int) -> int:
    """The offset to go on at after the log was found not to have `at`."""
    start = ends_of(cluster, [(split.topic, split.partition)], EARLIEST)[split.topic, split.partition]
    where = f"{split.topic}-{split.partition}"
    if start > at:
        to = min(start, split.next_offset)
        told = f"{where}: offsets {at} to {to - 1} were deleted before they were read; the log begins at {start}"
    else:
        to = split.next_offset
        told = f"{where}: offsets {at} to {to - 1} are not there; the log was cut off or made anew"
    report_loss([told], fail=how.fail_on_data_loss)
    return to


def report_loss(told: Sequence[str], *, fail: bool) -> None:
    """Fail with what is lost, or say it on standard error, which is where Spark keeps its log."""
    if not told:
        return
    if fail:
        raise DataLoss(f"{'; '.join(told)}; {ADVICE}")
    for line in told:
        print(f"WARN headrace: data loss: {line}", file=sys.stderr, flush=True)
