"""A small compacted topic in which programs remember something by its name: what a sink decided, how far a replay is.

Readers go up to where the log ended when they asked, and wait until everything up to there is decided: what may have
been acknowledged to anybody is seen. What was read is kept in the process, and only what came since is read again;
from the beginning, if the log has gone back, or no longer has what comes next.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Position, fetch, list_offsets
from headrace.client.errors import TopicAlreadyExists, UnknownTopic
from headrace.client.fetch_requests import EARLIEST, LATEST, FetchLimits
from headrace.errors import ErrorCode, HeadraceError, OperatorError, RequestTimedOut
from headrace.records import kernel
from headrace.records.isolation import Isolation
from headrace.records.partitioner import partition_for_key

PARTITIONS: Final = 8
CONFIGS: Final[Mapping[str, operations.ConfigValue]] = {
    "cleanup.policy": "compact",
    # Whoever comes first reads all of it: what is superseded should go soon.
    "segment.bytes": 4 << 20,
    "min.cleanable.dirty.ratio": 0.1,
    "delete.retention.ms": 86_400_000,
}
EMPTY_ANSWERS_MAX: Final = 2
LIMITS: Final = FetchLimits(max_wait_ms=50, min_bytes=1)
"""What is not decided yet is waited for by the broker."""


@dataclass(slots=True)
class _Read:
    """What a process knows of one partition."""

    topic_id: bytes
    next_offset: int
    known: dict[bytes, bytes | None] = field(default_factory=dict)


class CompactedTopic:
    """One topic of some name, at any cluster: with as many replicas as another one that is as dear. `owner` says who
    makes it, for messages."""

    def __init__(self, name: str, owner: str, *, like: str) -> None:
        self.name = name
        self._like = like
        self._owner = owner
        self.seen: Final[dict[tuple[str, int], _Read]] = {}
        """By cluster and partition; a cache alone."""

    def make(self, cluster: Cluster) -> None:
        """That the topic is there."""
        try:
            found = cluster.topic(self.name)
        except UnknownTopic:
            replicas = len(cluster.topic(self._like, expected=True).partitions[0].replicas)
            try:
                operations.create_topic(
                    cluster, self.name, partitions=PARTITIONS, replicas=replicas, configs=dict(CONFIGS)
                )
            except TopicAlreadyExists:
                cluster.forget()
            found = cluster.topic(self.name, expected=True)
        if len(found.partitions) < PARTITIONS:
            raise OperatorError(
                f"topic {self.name!r} has {len(found.partitions)} partitions in place of {PARTITIONS}: it was not made "
                f"by {self._owner}; delete it if nobody has used it"
            )

    def partition_of(self, key: bytes) -> int:
        return partition_for_key(key, PARTITIONS)

    def read(self, cluster: Cluster, key: bytes, timeout_ms: int, *, whole: bool = True) -> tuple[bytes | None] | None:
        """The last value under a key, in a tuple, by everything that was acknowledged before this was called; if not
        `whole`, as far as can be said at once. None if there is none."""
        partition = self.partition_of(key)
        place = ",".join(cluster.bootstrap), partition
        try:
            seen = self._seen_at(cluster, place)
            self._catch_up(cluster, partition, seen, timeout_ms if whole else None)
            if seen is not (anew := self._seen_at(cluster, place)):
                # On the way it was told that the topic had been deleted, and made again.
                seen = anew
                self._catch_up(cluster, partition, seen, timeout_ms if whole else None)
        except UnknownTopic:
            return None
        return (seen.known[key],) if key in seen.known else None

    def _seen_at(self, cluster: Cluster, place: tuple[str, int]) -> _Read:
        topic_id, seen = cluster.topic(self.name).topic_id, self.seen.get(place)
        if seen is None or seen.topic_id != topic_id:
            seen = self.seen[place] = _Read(topic_id, self._start(cluster, place[1]))
        return seen

    def every(self, cluster: Cluster, timeout_ms: int) -> Iterator[tuple[bytes, bytes]]:
        """All keys that have a value, with it."""
        for partition in range(PARTITIONS):
            try:
                found = _Read(b"", self._start(cluster, partition))
            except UnknownTopic:
                return
            self._catch_up(cluster, partition, found, timeout_ms)
            yield from ((key, value) for key, value in found.known.items() if value is not None)

    def _start(self, cluster: Cluster, partition: int) -> int:
        return list_offsets(cluster, self.name, {partition: EARLIEST})[partition].offset

    def _catch_up(self, cluster: Cluster, partition: int, seen: _Read, timeout_ms: int | None) -> None:
        before, cluster.isolation = cluster.isolation, Isolation.COMMITTED
        try:
            self._read_to_end(cluster, partition, seen, timeout_ms)
        finally:
            cluster.isolation = before

    def _read_to_end(self, cluster: Cluster, partition: int, seen: _Read, timeout_ms: int | None) -> None:
        """To the end of all that is acknowledged, or, without time to wait, to the first that is undecided."""
        deadline = time.monotonic() + (timeout_ms or 0) / 1000
        last = list_offsets(cluster, self.name, {partition: LATEST}, isolation=Isolation.UNCOMMITTED)[partition].offset
        if last < seen.next_offset:
            # The log lost its end, and has, or will have, something else there.
            seen.next_offset = self._start(cluster, partition)
        end = last
        if timeout_ms is None:
            end = list_offsets(cluster, self.name, {partition: LATEST})[partition].offset
        empty_answers = 0
        while seen.next_offset < end:
            before = seen.next_offset
            try:
                (fetched,) = fetch(cluster, [Position(self.name, partition, before)], LIMITS)
            except HeadraceError as error:
                seen.next_offset = self._start(cluster, partition)
                if error.kafka_code != ErrorCode.OFFSET_OUT_OF_RANGE or seen.next_offset <= before:
                    raise
                continue
            for header, batch in fetched.shown_batches():
                if batch is not None:
                    seen.known.update((record.key or b"", record.value) for record in kernel.records(batch))
                seen.next_offset = header.next_offset
            if seen.next_offset > before:
                empty_answers = 0
            elif fetched.end_offset >= end and (empty_answers := empty_answers + 1) >= EMPTY_ANSWERS_MAX:
                seen.next_offset = end  # compaction took what was there
            elif time.monotonic() > deadline:
                raise RequestTimedOut(
                    f"{self.name}-{partition} cannot be read up to offset {end}: a transaction is open from offset "
                    f"{fetched.end_offset} on; `headrace transaction list` shows whose"
                )
