"""Where the sink keeps its decisions: the compacted topic `__spark_sink`, a record for each query, its name the key.

A decision is written in a transaction of the query's own transactional id. So a driver is the only one that can write
from the moment it has taken that id over, and what an earlier one was about to write is decided by then, one way or the
other. Who reads sees all that was decided before it asked (`client.admin.compacted_topic`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from headrace.client.admin.cluster import Cluster
from headrace.client.admin.compacted_topic import CompactedTopic
from headrace.client.connection.metadata import SINK_TOPIC
from headrace.client.producer.producer import Producer
from headrace.cluster.names import TRANSACTIONS_TOPIC
from headrace.spark.decisions import Decision, Ended, Known, driver_id

TOPIC: Final = SINK_TOPIC
UNDECIDED_MAX_MS: Final = 10_000
"""How long a driver that dies in the middle of a decision may hold up those who read after it."""

_decisions: Final = CompactedTopic(TOPIC, "the sink", like=TRANSACTIONS_TOPIC)


def make_topic(cluster: Cluster) -> None:
    """That the topic is there, with as many replicas as transactions have."""
    _decisions.make(cluster)


def read(cluster: Cluster, query: str, timeout_ms: int, *, whole: bool = True) -> Known:
    """What is decided of a query, by everything that was acknowledged before this was called; if not `whole`, as far
    as can be said at once."""
    found = _decisions.read(cluster, query.encode(), timeout_ms, whole=whole)
    if found is None:
        return None
    (value,) = found
    return Ended.ENDED if value is None else Decision.decode(query, value)


def every(cluster: Cluster, timeout_ms: int) -> Iterator[Decision]:
    """What is decided of all queries."""
    for key, value in _decisions.every(cluster, timeout_ms):
        yield Decision.decode(key.decode(), value)


class DecisionWriter:
    """The one place where decisions of a query are written: it takes the query over when it is made. TransactionFenced
    from the moment another one is."""

    def __init__(self, cluster: Cluster, query: str, timeout_ms: int) -> None:
        self._key = query.encode()
        self._partition = _decisions.partition_of(self._key)
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
