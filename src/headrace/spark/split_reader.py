"""Reading one split: raw record sets from the broker, decoded into Arrow batches, no object per record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Span, TopicReplaced, check_topic, record_sets
from headrace.client.errors import UnknownTopic
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.errors import CorruptBatch, ErrorCode, HeadraceError, InvalidRecord
from headrace.records.arrow import PASSED_ON_BYTES, Decoder
from headrace.records.batch import batches
from headrace.spark import loss
from headrace.spark.connections import begin_task, cluster_at
from headrace.spark.options import SourceOptions
from headrace.spark.plan import Split, ends_of

_GONE: Final = (ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)


def read(options: SourceOptions, split: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a split, in a task."""
    begin_task()
    if isinstance(split, Split):
        return _read(options, split)
    from headrace.spark import history

    assert isinstance(split, history.HistorySplit)
    return history.read(split, options.columns)


def _read(options: SourceOptions, split: Split) -> Iterator[pa.RecordBatch]:
    """Retention may overtake the reader: what it took is read where it is archived, if the query has its history, else
    reported as the query asks for."""
    # The address was right when the query was planned.
    with cluster_at(options.bootstrap, options.timeout_ms, patient=True, isolation=options.isolation) as cluster:
        decoder = Decoder(split.topic, split.partition, options.columns, batch_bytes=PASSED_ON_BYTES)
        at, end = split.first_offset, split.next_offset
        while at < end:
            last: memoryview | None = None
            try:
                for fetched in record_sets(cluster, _span(split, at, end)):
                    yield from decoder.decode(fetched.records, at, end, hidden=fetched.hidden)
                    last = fetched.records
                return
            except (CorruptBatch, InvalidRecord) as error:
                raise _named(error, split, at if last is None else _end_of(last)) from None
            except HeadraceError as error:
                if error.kafka_code not in _GONE:
                    raise
                at = at if last is None else _end_of(last)
                if options.history and (reached := _deleted_up_to(cluster, split, at, end)) > at:
                    from headrace.spark.history import archived_since

                    place, fail = (split.topic, split.partition), options.fail_on_data_loss
                    rows = archived_since(options.history, place, at, reached, options.columns, fail=fail)
                    if rows is not None:
                        yield from rows
                        at = reached
                        continue
                left = _left(cluster, _span(split, at, end), fail=options.fail_on_data_loss)
                if left == (at, end):
                    raise
                at, end = left


def _span(split: Split, at: int, end: int) -> Span:
    return Span(split.topic, split.partition, at, end, bytes.fromhex(split.topic_id))


def _deleted_up_to(cluster: Cluster, split: Split, at: int, end: int) -> int:
    """How far the topic, if it is still the same, has deleted what is left to be read."""
    try:
        check_topic(cluster, _span(split, at, end))
        place = split.topic, split.partition
        return min(end, ends_of(cluster, [place], EARLIEST)[place])
    except (UnknownTopic, TopicReplaced):
        return at


def _end_of(records: memoryview) -> int:
    end = 0
    for header, _ in batches(records):
        end = header.next_offset
    return end


def _left(cluster: Cluster, span: Span, *, fail: bool) -> tuple[int, int]:
    """What is left to read after the log was found not to have all of a span; all of it, if the log has it now."""
    place = (span.topic, span.partition)
    at, end = span.first_offset, span.next_offset
    try:
        check_topic(cluster, span)
        log_start, log_end = ends_of(cluster, [place], EARLIEST)[place], ends_of(cluster, [place], LATEST)[place]
    except (UnknownTopic, TopicReplaced):
        told = f"{span}: offsets {at} to {end - 1} are gone; the topic was deleted"
        at = end
    else:
        if log_start > at:
            told = loss.deleted(place, at, end, log_start)
            at = min(log_start, end)
        elif log_end < end:
            told = f"{span}: offsets {max(at, log_end)} to {end - 1} are gone; the log was cut off"
            end = max(at, log_end)
        else:
            return at, end
    loss.report([told], fail=fail)
    return at, end


def _named(error: HeadraceError, split: Split, at: int) -> HeadraceError:
    where = f"{split.topic}-{split.partition}"
    return error if where in str(error) else type(error)(f"{where} at offset {at} or after: {error}")
