"""A topic in a Parquet file: a row for each record, with `partition`, `offset`, `timestamp`, `key`, `value`, `headers`.

The file's metadata has the topic's name and its number of partitions. A file of other origin can be sent to a topic
too: it needs a column `value`, and may have `key`, `headers`, `timestamp` and `partition`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.arrow.read import read_span
from headrace.arrow.write import Pending, WriteFailed, Writer
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Span
from headrace.errors import HeadraceError, OperatorError
from headrace.records.arrow import schema

COLUMNS: Final = ("partition", "offset", "timestamp", "key", "value", "headers")
TAKEN: Final = ("key", "value", "headers", "timestamp", "partition")
TOPIC: Final = b"headrace.topic"
PARTITIONS: Final = b"headrace.partitions"
SEND_ROWS: Final = 10_000
SENDS_WAITING: Final = 2
WRITE_ROWS: Final = 100_000

Place = Callable[[pa.RecordBatch], pa.RecordBatch]
"""Gives rows the partitions that they shall go to."""


def write_file(
    cluster: Cluster,
    spans: Iterable[Span],
    path: Path,
    *,
    topic: str,
    partition_count: int,
    until_ms: int | None,
    passed: Callable[[int], None],
) -> Counter[int]:
    """Records by partition. OperatorError unless the file, read again, has as many rows as were written."""
    about = {TOPIC: topic.encode(), PARTITIONS: b"%d" % partition_count}
    written: Counter[int] = Counter()
    with pq.ParquetWriter(path, schema(COLUMNS).with_metadata(about), compression="zstd") as file:
        for span in spans:
            at = span.first_offset
            for rows in read_span(cluster, span, COLUMNS, WRITE_ROWS):
                reached = rows["offset"][-1].as_py() + 1
                if until_ms is not None:
                    rows = rows.filter(pc.less(rows["timestamp"], pa.scalar(until_ms * 1000, rows["timestamp"].type)))
                if len(rows):
                    file.write_batch(rows)
                written[span.partition] += len(rows)
                passed(reached - at)
                at = reached
    found = pq.read_metadata(path).num_rows
    if found != written.total():
        raise OperatorError(f"{path} has {found} rows of {written.total()} that were written: nothing was kept")
    return written


class TopicFile:
    """A Parquet file that is sent to a topic."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise OperatorError(f"{path} is no Parquet file: {error}") from None
        self._path = path
        columns = self._file.schema_arrow
        names = columns.names
        if "value" not in names:
            raise OperatorError(f"{path} has no column 'value'; it has {', '.join(names)}")
        _check_types(path, columns)
        self._columns = [name for name in TAKEN if name in names]
        self.row_count: int = self._file.metadata.num_rows

    @property
    def partition_count(self) -> int | None:
        """How many partitions the topic had, or as many as the rows name; None where they name none."""
        told = (self._file.schema_arrow.metadata or {}).get(PARTITIONS)
        if told is not None and told.isdigit():
            return int(told)
        most = self.partition_bounds()[1]
        return None if most is None else most + 1

    def partition_bounds(self) -> tuple[int | None, int | None]:
        """The least and the greatest partition that a row names."""
        if "partition" not in self._columns:
            return None, None
        with self._reading():
            found = [pc.min_max(rows["partition"]).as_py() for rows in self._file.iter_batches(columns=["partition"])]
        numbers = [number for each in found for number in each.values() if number is not None]
        return min(numbers, default=None), max(numbers, default=None)

    def send(self, writer: Writer, place: Place, *, skip: int, stop: Callable[[], bool]) -> Iterator[Sent]:
        """What became of the rows behind the first `skip`, in their order, until `stop()` says that it is enough."""
        waiting: deque[Pending] = deque()
        unsent: HeadraceError | None = None
        batches = self._batches(skip)
        while not stop():
            try:
                with self._reading():
                    if (rows := next(batches, None)) is None:
                        break
                    waiting.append(writer.submit(place(rows)))
            except HeadraceError as error:
                unsent = error  # told behind what was sent before it
                break
            if len(waiting) > SENDS_WAITING:
                yield _await(waiting.popleft())
        while waiting:
            yield _await(waiting.popleft())
        if unsent is not None:
            raise unsent

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise OperatorError(f"{self._path} cannot be read any further: {error}") from None

    def _batches(self, skip: int) -> Iterator[pa.RecordBatch]:
        for rows in self._file.iter_batches(batch_size=SEND_ROWS, columns=self._columns):
            if skip < len(rows):
                yield rows.slice(skip)
            skip = max(0, skip - len(rows))


def _check_types(path: Path, columns: pa.Schema) -> None:
    """Before anything is sent."""
    for name, fits, wanted in (
        ("partition", pa.types.is_integer, "whole numbers"),
        ("timestamp", lambda kind: pa.types.is_timestamp(kind) or pa.types.is_integer(kind), "times, or numbers of ms"),
        ("headers", lambda kind: pa.types.is_list(kind) or pa.types.is_large_list(kind), "lists of name and value"),
    ):
        if name in columns.names and not (fits(kind := columns.field(name).type) or pa.types.is_null(kind)):
            raise OperatorError(f"{path}: column {name!r} has {wanted}, not {kind}; nothing was sent")


class Sent:
    """Rows that were sent: how many, how many of them to each partition were acknowledged, and what went wrong."""

    def __init__(self, written: pa.RecordBatch, failure: HeadraceError | None) -> None:
        self.count = len(written)
        self.failure = failure
        acknowledged = written.filter(pc.is_valid(written["offset"]))
        counted = pc.value_counts(acknowledged["partition"]).to_pylist()
        self.partitions = Counter({each["values"]: each["counts"] for each in counted})


def _await(pending: Pending) -> Sent:
    try:
        return Sent(pending.result(), None)
    except WriteFailed as failed:
        return Sent(failed.written, failed)
