"""A broker that does not coordinate the archive's group knows how far the archive has come."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Coroutine
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from brokers import wait_for
from headrace.cluster.image import Image, Topic
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.limits import CoordinatorLimits, GroupLimits
from headrace.server.archive_progress import ArchivedOffsets
from headrace.storage.log import TopicPartition as Where
from headrace.virtual.clock import VirtualClock
from kafka_protocol.clustered import SharedCluster
from kafka_protocol.raw import batch_of
from partitions.led import Led

OLD, NEW = b"o" * 16, b"n" * 16


def nothing_is_asked(work: Coroutine[Any, Any, None]) -> None:
    raise AssertionError(work)


def test_an_answer_counts_when_the_one_before_it_was_about_the_same_topic() -> None:
    clock = VirtualClock()
    limits = CoordinatorLimits(GroupLimits(1000, 60_000, max_size=50, initial_rebalance_delay_ms=0))
    groups = GroupCoordinator(clock, lambda *_: None, 1, str, limits, lambda _: OLD)
    image = Image("/headrace/c/", topics={"t": Topic("t", OLD, ())})
    archived = ArchivedOffsets(
        clock, Led().partitions, groups, lambda: image, lambda: "archive", "127.0.0.1:1", nothing_is_asked
    )
    where = Where("t", 0)
    archived.heard("archive", {"t": OLD}, {("t", 0): 5})
    assert archived.offset(where) == 0, "it may be about a topic of that name that is gone"
    archived.heard("archive", {"t": OLD}, {("t", 0): 9, ("unknown", 0): 3})
    assert archived.offset(where) == 5
    image = Image("/headrace/c/", topics={"t": Topic("t", NEW, ())})
    archived.heard("archive", {"t": NEW}, {("t", 0): 9})
    assert archived.offset(where) == 0
    archived.heard("archive", {"t": NEW}, {})
    assert archived.offset(where) == 0
    archived.heard("other", {"t": NEW}, {("t", 0): 9})
    archived.heard("other", {"t": NEW}, {("t", 0): 9})
    assert archived.offset(where) == 0, "of another group"
    archived.tick()


@pytest.mark.long
def test_every_replica_hears_what_was_archived(cluster: SharedCluster, topic: str) -> None:
    cluster.create(topic, [[1, 2, 3]], retention_archived="true")
    raw = cluster.raw(1)
    for n in range(4):
        assert raw.produce(topic, batch_of([b"%d" % n]), acks=-1).error_code == 0
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "headrace-archive"})
    try:
        consumer.commit(offsets=[TopicPartition(topic, 0, 3)], asynchronous=False)
    finally:
        consumer.close()

    def known(number: int) -> int:
        with urllib.request.urlopen(f"{cluster.broker(number).http}/topics/{topic}", timeout=10) as page:
            found: int = json.load(page)["partition_list"][0]["archived_offset"]
            return found

    wait_for("all brokers to know", lambda: [known(number) for number in (1, 2, 3)] == [3, 3, 3], 60.0, 0.5)
