"""A broker of the shared layout that has lost everything but its commit log starts with all records and answers."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable

import pytest

from brokers import Broker
from headrace.client.admin import operations, query
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Span, list_offsets, record_sets
from headrace.client.admin.produce import Produced, produce
from headrace.client.fetch_requests import LATEST
from headrace.client.producer.request import Outgoing
from headrace.records import kernel
from proving import proves

BATCH_RECORDS = 100
KEYS = 500
QUERIES = 40
TIME_MS = 1_790_000_000_000


def fill(cluster: Cluster, topics: list[str], records: int) -> None:
    """Rounds over all topics, so that the commit log has them mixed."""
    for first in range(0, records, BATCH_RECORDS):
        outgoing = [
            Outgoing(
                topic,
                0,
                kernel.build(
                    [
                        (TIME_MS + n, b"key %d" % (n * 7919 % KEYS), b"%s %d" % (topic.encode(), n), [])
                        for n in range(first, first + BATCH_RECORDS)
                    ]
                ),
            )
            for topic in topics
        ]
        assert all(isinstance(answer, Produced) for answer in produce(cluster, outgoing))


def contents(cluster: Cluster, topics: list[str], records: int) -> dict[str, str]:
    """A digest of every byte of each topic."""
    found = {}
    for topic in topics:
        digest = hashlib.sha256()
        for part in record_sets(cluster, Span(topic, 0, 0, records)):
            digest.update(part.records)
        found[topic] = digest.hexdigest()
    return found


def answers(cluster: Cluster, topics: list[str], seed: int) -> list[tuple[str, bytes, list[bytes | None]]]:
    draw = random.Random(seed)
    found = []
    for _ in range(QUERIES):
        topic, key = draw.choice(topics), b"key %d" % draw.randrange(KEYS)
        rows = query.find(cluster, query.RecordQuery(topic, key), newest_first=False)
        found.append((topic, key, [record.value for _, record in rows]))
    return found


def lose_and_start(broker: Broker, topics: list[str], records: int, seed: int) -> dict[str, object]:
    with Cluster(broker.bootstrap) as cluster:
        for topic in topics:
            operations.create_topic(cluster, topic, partitions=1, configs={"key.index": "true"})
        fill(cluster, topics, records)
        before, asked = contents(cluster, topics, records), answers(cluster, topics, seed)
    assert all(rows for _, _, rows in asked)
    broker.stop()
    broker.start()
    whole_s = broker.start_s
    broker.stop()
    lost = [path for kind in ("*.queue", "*.keys") for path in broker.data.rglob(kind)]
    assert {path.suffix for path in lost} == {".queue", ".keys"}
    for path in lost:
        path.unlink()
    broker.start()
    with Cluster(broker.bootstrap) as cluster:
        for topic in topics:
            assert list_offsets(cluster, topic, {0: LATEST})[0].offset == records
        assert contents(cluster, topics, records) == before
        began = time.monotonic()
        assert answers(cluster, topics, seed) == asked
        return {
            "records": records * len(topics),
            "topics": len(topics),
            "files_deleted": len(lost),
            "start_with_all_files_s": round(whole_s, 2),
            "start_without_them_s": round(broker.start_s, 2),
            "first_queries_s": f"{QUERIES} in {time.monotonic() - began:.2f}",
        }


@proves("R2", "L5", "F10", "R3")
def test_queues_and_key_indexes_are_made_again_from_the_commit_log(
    fresh_broker: Callable[..., Broker], seed: int
) -> None:
    broker = fresh_broker(settings={"log.layout": "shared", "commitlog.file.bytes": 1 << 20})
    lose_and_start(broker, [f"t{n}" for n in range(20)], 2000, seed)


@pytest.mark.long
def test_a_million_records_over_a_hundred_topics(
    fresh_broker: Callable[..., Broker], seed: int, proof_report: Callable[..., None]
) -> None:
    broker = fresh_broker(settings={"log.layout": "shared"})
    proof_report(**lose_and_start(broker, [f"t{n}" for n in range(100)], 10_000, seed))
