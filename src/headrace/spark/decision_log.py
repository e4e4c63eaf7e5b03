"""Where the sink keeps its decisions: the compacted topic `__spark_sink`, a record for each query, its name the key.

A decision is written in a transaction of the query's own transactional id. So a driver is the only one that can write
from the moment it has taken that id over, and what an earlier one was about to write is decided by then, one way or the
other. Readers go up to where the log ended when they asked, and wait until everything up to there is decided: what may
have been acknowledged to anybody is seen. What was read is kept in the process, and only what came since is read again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Position, fetch, list_offsets
from headrace.client.errors import TopicAlreadyExists, UnknownTopic
from headrace.client.fetch_requests import EARLIEST, LATEST, FetchLimits
from headrace.client.producer.producer import Producer
from headrace.cluster.names import TRANSACTIONS_TOPIC
from headrace.errors import OperatorError, RequestTimedOut
from headrace.records import kernel
from headrace.records.isolation import Isolation
from headrace.records.partitioner import partition_for_key
from headrace.spark.decisions import Decision, Ended, Known, driver_id

TOPIC: Final = "__spark_sink"
PARTITIONS: Final = 8
CONFIGS: Final[dict[str, operations.ConfigValue]] = {
    "cleanup.policy": "compact",
    # Whoever comes first reads all of it: what is superseded should go soon.
    "segment.bytes": 4 << 20,
    "min.cleanable.dirty.ratio": 0.1,
    "delete.retention.ms": 86_400_000,
}
UNDECIDED_MAX_MS: Final = 10_000
"""How long a driver that dies in the middle of a decision may hold up those who read after it."""
EMPTY_ANSWERS_MAX: Final = 2
LIMITS: Final = FetchLimits(max_wait_ms=50, min_bytes=1)
"""What is not decided yet is waited for by the broker."""


def make_topic(cluster: Cluster) -> None:
    """That the topic is there, with as many replicas as transactions have."""
    try:
        found = cluster.topic(TOPIC)
    except UnknownTopic:
        states = cluster.topic(TRANSACTIONS_TOPIC, expected=True)
        replicas = len(states.partitions[0].replicas)
        try:
            operations.create_topic(cluster, TOPIC, partitions=PARTITIONS, replicas=replicas, configs=CONFIGS)
        except TopicAlreadyExists:
            cluster.forget()
        found = cluster.topic(TOPIC, expected=True)
    if len(found.partitions) < PARTITIONS:
        raise OperatorError(
            f"topic {TOPIC!r} has {len(found.partitions)} partitions in place of {PARTITIONS}: it was not made by the "
            "sink; delete it if no query has used it"
        )


@dataclass(slots=True)
class _Read:
    """What a process knows of one partition."""

    topic_id: bytes
    next_offset: int
    known: dict[bytes, bytes | None] = field(default_factory=dict)


_seen: Final[dict[tuple[str, int], _Read]] = {}


def read(cluster: Cluster, query: str, timeout_ms: int, *, whole: bool = True) -> Known:
    """What is decided of a query, by everything that was acknowledged before this was called; if not `whole`, as far
    as can be said at once."""
    key = query.encode()
    partition = partition_for_key(key, PARTITIONS)
    try:
        topic_id = cluster.topic(TOPIC).topic_id
    except UnknownTopic:
        return None
    place = ",".join(cluster.bootstrap), partition
    seen = _seen.get(place)
    if seen is None or seen.topic_id != topic_id:
        first = list_offsets(cluster, TOPIC, {partition: EARLIEST})[partition].offset
        seen = _seen[place] = _Read(topic_id, first)
    _catch_up(cluster, partition, seen, timeout_ms if whole else None)
    if key not in seen.known:
        return None
    value = seen.known[key]
    return Ended.ENDED if value is None else Decision.decode(query, value)


def every(cluster: Cluster, timeout_ms: int) -> Iterator[Decision]:
    """What is decided of all queries."""
    for partition in range(PARTITIONS):
        try:
            first = list_offsets(cluster, TOPIC, {partition: EARLIEST})[partition].offset
        except UnknownTopic:
            return
        found = _Read(b"", first)
        _catch_up(cluster, partition, found, timeout_ms)
        for key, value in found.known.items():
            if value is not None:
                yield Decision.decode(key.decode(), value)


def _catch_up(cluster: Cluster, partition: int, seen: _Read, timeout_ms: int | None) -> None:
    before, cluster.isolation = cluster.isolation, Isolation.COMMITTED
    try:
        _read_to_end(cluster, partition, seen, timeout_ms)
    finally:
        cluster.isolation = before


def _read_to_end(cluster: Cluster, partition: int, seen: _Read, timeout_ms: int | None) -> None:
    """To the end of all that is acknowledged, or, without time to wait, to the first that is undecided."""
    deadline = time.monotonic() + (timeout_ms or 0) / 1000
    reached = Isolation.COMMITTED if timeout_ms is None else Isolation.UNCOMMITTED
    end = list_offsets(cluster, TOPIC, {partition: LATEST}, isolation=reached)[partition].offset
    empty_answers = 0
    while seen.next_offset < end:
        (fetched,) = fetch(cluster, [Position(TOPIC, partition, seen.next_offset)], LIMITS)
        before = seen.next_offset
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
                f"{TOPIC}-{partition} cannot be read up to offset {end}: a transaction is open from offset "
                f"{fetched.end_offset} on; `headrace transaction list` shows whose"
            )


class DecisionWriter:
    """The one place where decisions of a query are written: it takes the query over when it is made. TransactionFenced
    from the moment another one is."""

    def __init__(self, cluster: Cluster, query: str, timeout_ms: int) -> None:
        self._key = query.encode()
        self._partition = partition_for_key(self._key, PARTITIONS)
        self._producer = Producer(
            cluster.bootstrap,
            client_id=cluster.pool.client_id,
            transactional_id=driver_id(query),
            codec="zstd",
            interval_ms=0,
            delivery_timeout_ms=timeout_ms,
            transaction_timeout_ms=UNDECIDED_MAX_MS,
            tls=cluster.tls,
        )
        try:
            opened = self._producer.transaction()
            opened.begin()
            opened.abort()
        except BaseException:
            self.close()
            raise

    def write(self, decision: Decision) -> None:
        """It holds when this returns. An error may mean that it does: only who takes the query over knows."""
        self._write(decision.encode())

    def drop(self) -> None:
        """The query is over, and all of it committed."""
        self._write(None)

    def _write(self, value: bytes | None) -> None:
        with self._producer.transaction() as t:
            t.send(TOPIC, value, key=self._key, partition=self._partition)

    def close(self) -> None:
        self._producer.close()
