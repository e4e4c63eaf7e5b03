"""What is in a topic, read by the plain client."""

from __future__ import annotations

from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Position, fetch, list_offsets
from headrace.client.fetch_requests import LATEST, FetchLimits
from headrace.records import kernel
from headrace.records.record import Record


def read_partition(cluster: Cluster, topic: str, partition: int) -> list[Record]:
    """All records, compacted or not."""
    end = list_offsets(cluster, topic, {partition: LATEST})[partition].offset
    found: list[Record] = []
    at = 0
    while at < end:
        (fetched,) = fetch(cluster, [Position(topic, partition, at)], FetchLimits(max_wait_ms=100))
        for header, view in fetched.whole_batches():
            found += [record for record in kernel.records(view) if record.offset >= at]
            at = header.next_offset
    return found


def read_topic(cluster: Cluster, topic: str) -> dict[int, list[Record]]:
    count = len(cluster.topic(topic).partitions)
    return {partition: read_partition(cluster, topic, partition) for partition in range(count)}
