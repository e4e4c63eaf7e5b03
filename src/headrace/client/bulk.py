"""Reading a span of a partition from its first to its last record, as fast as the socket allows.

Record sets are handed out as they came, slices of the answer. What the log no longer has is told, never skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from headrace.client.cluster import Cluster
from headrace.client.fetch import FetchLimits, Position, fetch
from headrace.errors import OffsetOutOfRange

SET_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets of one partition from `first_offset` up to but not `next_offset`."""

    topic: str
    partition: int
    first_offset: int
    next_offset: int


def record_sets(cluster: Cluster, span: Span, set_bytes: int = SET_BYTES) -> Iterator[memoryview]:
    """Whole batches that together hold every record of the span that the log has; the ends may reach beyond it.

    OffsetOutOfRange if the log begins after the span does, or ends before it.
    """
    limits = FetchLimits(max_bytes=set_bytes, partition_max_bytes=set_bytes)
    at = span.first_offset
    while at < span.next_offset:
        (fetched,) = fetch(cluster, [Position(span.topic, span.partition, at)], limits)
        end = at
        for header, _ in fetched.whole_batches():
            end = header.next_offset
        if end == at:
            raise OffsetOutOfRange(f"{span.topic}-{span.partition} has nothing at offset {at}")
        yield fetched.records
        at = end
