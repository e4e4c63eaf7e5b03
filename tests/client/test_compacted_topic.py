"""What programs remember in a compacted topic, on a real broker: the last word is found, whatever became of the log."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest

from brokers import Broker
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.compacted_topic import PARTITIONS, CompactedTopic
from headrace.client.admin.fetch import list_offsets
from headrace.client.admin.operations import create_topic, delete_records, delete_topic
from headrace.client.fetch_requests import LATEST
from headrace.client.producer.producer import Producer
from headrace.cluster.names import TRANSACTIONS_TOPIC
from headrace.errors import OperatorError, RequestTimedOut
from proving import proves

TIMEOUT_MS = 10_000
KEY = b"a"


class Scene:
    def __init__(self, broker: Broker) -> None:
        self.cluster = Cluster(broker.bootstrap)
        self.topic = CompactedTopic(f"memory-{uuid.uuid4().hex[:8]}", "the tests", like=TRANSACTIONS_TOPIC)
        self.producer = Producer(broker.bootstrap, transactional_id=f"{self.topic.name}-writer")
        # The topic of transactions is there when one has begun.
        t = self.producer.transaction()
        t.begin()
        t.abort()
        self.topic.make(self.cluster)

    def write(self, value: bytes | None, key: bytes = KEY) -> None:
        with self.producer.transaction() as t:
            t.send(self.topic.name, value, key=key, partition=self.topic.partition_of(key))

    def read(self, key: bytes = KEY, *, whole: bool = True) -> tuple[bytes | None] | None:
        return self.topic.read(self.cluster, key, TIMEOUT_MS, whole=whole)

    def end(self) -> int:
        partition = self.topic.partition_of(KEY)
        return list_offsets(self.cluster, self.topic.name, {partition: LATEST})[partition].offset


@pytest.fixture
def scene(broker: Broker) -> Iterator[Scene]:
    made = Scene(broker)
    yield made
    made.producer.close()
    made.cluster.close()


@proves("S3")
def test_the_last_word_under_a_name_is_read_and_what_is_undecided_is_waited_for(scene: Scene, broker: Broker) -> None:
    assert scene.read() is None
    for value in (b"1", b"2", None):
        scene.write(value)
        scene.write(b"other", b"b")
        assert scene.read() == (value,)
    assert [key for key, _ in scene.topic.every(scene.cluster, TIMEOUT_MS)] == [b"b"]
    with Producer(broker.bootstrap, transactional_id=f"{scene.topic.name}-slow") as slow:
        t = slow.transaction()
        t.begin()
        t.send(scene.topic.name, b"3", key=KEY, partition=scene.topic.partition_of(KEY))
        slow.flush()
        assert scene.read(whole=False) == (None,)
        with pytest.raises(RequestTimedOut, match="a transaction is open from offset"):
            scene.topic.read(scene.cluster, KEY, 200)
        t.commit()
    assert scene.read() == (b"3",)


@proves("S3")
def test_a_reader_goes_on_where_the_log_has_lost_what_came_next(scene: Scene) -> None:
    """Records that it had not read were deleted."""
    scene.write(b"1")
    scene.read()
    ((place, kept),) = [(place, replace(seen, known=dict(seen.known))) for place, seen in scene.topic.seen.items()]
    scene.write(b"2")
    scene.write(b"3")
    delete_records(scene.cluster, scene.topic.name, {place[1]: scene.end() - 2})
    scene.topic.seen[place] = kept
    assert scene.read() == (b"3",)


@proves("S3")
def test_a_reader_begins_anew_when_the_log_has_gone_back(scene: Scene) -> None:
    """As after an election that cost records: its end is below what was read."""
    scene.write(b"1")
    scene.read()
    (seen,) = scene.topic.seen.values()
    seen.next_offset += 10
    scene.write(b"2")
    assert scene.read() == (b"2",)


@proves("S3")
def test_a_topic_that_was_made_anew_is_another_one(scene: Scene) -> None:
    scene.write(b"1")
    assert scene.read() == (b"1",)
    delete_topic(scene.cluster, scene.topic.name)
    scene.cluster.forget()
    assert scene.read() is None
    scene.topic.make(scene.cluster)
    assert scene.read() is None
    scene.write(b"2")
    assert scene.read() == (b"2",)


def test_a_topic_with_too_few_partitions_is_somebody_elses(scene: Scene) -> None:
    create_topic(scene.cluster, f"{scene.topic.name}-small", partitions=PARTITIONS - 1)
    with pytest.raises(OperatorError, match="it was not made by the tests"):
        CompactedTopic(f"{scene.topic.name}-small", "the tests", like=scene.topic.name).make(scene.cluster)
