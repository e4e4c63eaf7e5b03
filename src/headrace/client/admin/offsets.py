"""Where a partition begins and ends, and which offset a moment in time has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.client.admin.cluster import Cluster, Request
from headrace.client.connection.broker_connection import Link
from headrace.client.errors import check
from headrace.client.fetch_requests import LATEST, offsets_request
from headrace.errors import HeadraceError
from headrace.wire import api as apis


@dataclass(frozen=True, slots=True)
class TimedOffset:
    """`offset` is -1 when no record is as late as the time asked for."""

    offset: int
    timestamp_ms: int


def list_offsets(
    cluster: Cluster, topic: str, times: Mapping[int, int], *, timeout_ms: int = 30_000
) -> dict[int, TimedOffset]:
    """Partition to offset, for EARLIEST, LATEST, MAX_TIMESTAMP or the first record not before a time in ms."""

    def ask() -> dict[int, TimedOffset]:
        by_leader: dict[Link, dict[tuple[str, int], int]] = {}
        for partition, time_ms in times.items():
            by_leader.setdefault(cluster.leader(topic, partition), {})[topic, partition] = time_ms
        asked = [
            (leader, Request(apis.LIST_OFFSETS, offsets_request(moments, timeout_ms)))
            for leader, moments in by_leader.items()
        ]
        found: dict[int, TimedOffset] = {}
        for answer in cluster.exchange(asked):
            if isinstance(answer, HeadraceError):
                raise answer
            for partition in answer.topics[0].partitions:
                check(partition.error_code, f"offsets of {topic}-{partition.partition_index}")
                found[partition.partition_index] = TimedOffset(partition.offset, partition.timestamp)
        return found

    return cluster.retry(ask)


def offsets_at(cluster: Cluster, topic: str, partitions: Iterable[int], time_ms: int) -> dict[int, int]:
    """Partition to offset for one time; a partition with nothing so late answers its end."""
    wanted = list(partitions)
    found = {n: timed.offset for n, timed in list_offsets(cluster, topic, dict.fromkeys(wanted, time_ms)).items()}
    missing = [n for n in wanted if found[n] < 0]
    if missing:
        ends = list_offsets(cluster, topic, dict.fromkeys(missing, LATEST))
        found.update((n, ends[n].offset) for n in missing)
    return found
