"""Clients of three makes in a cluster of three brokers, bootstrapped from any one of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from brokers import wait_for
from clients.records import Record
from clients.with_aiokafka import AioKafka
from clients.with_confluent import ConfluentKafka
from clients.with_kafka_python import KafkaPython
from headrace.wire import api as apis
from kafka_protocol.clustered import SharedCluster
from kafka_protocol.raw import batch_of
from proving import proves

CLIENTS: dict[int, Any] = {1: ConfluentKafka, 2: KafkaPython, 3: AioKafka}


@proves("G15", "G5")
@pytest.mark.parametrize("number", CLIENTS)
def test_a_client_finds_the_leaders_of_all_partitions_from_one_broker(
    cluster: SharedCluster, topic: str, number: int
) -> None:
    names = [f"{topic}-{leader}" for leader in (1, 2, 3)]
    for leader, name in zip((1, 2, 3), names, strict=True):
        cluster.create(name, [[leader, leader % 3 + 1]])
    client, bootstrap = CLIENTS[number](), cluster.broker(number).bootstrap
    for name in names:
        client.produce(bootstrap, name, [Record(b"%d" % n, b"k", partition=0) for n in range(50)])
    read = client.consume(cluster.broker(number % 3 + 1).bootstrap, dict.fromkeys(names, 50))
    assert {name: [record.value for record in records] for name, records in read.items()} == {
        name: [b"%d" % n for n in range(50)] for name in names
    }


@proves("F11", "G15")
def test_a_consumer_with_a_rack_is_served_by_the_broker_that_stands_there(cluster: SharedCluster, topic: str) -> None:
    cluster.create(topic, [[1, 2, 3]])
    raw = cluster.raw(1)
    for n in range(20):
        assert raw.produce(topic, batch_of([b"%d" % n]), acks=-1).error_code == 0
    before = {number: cluster.fetches(number) for number in (1, 2, 3)}
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": topic,
            "client.rack": "rack-3",
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 50,
            "enable.auto.commit": False,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        assert list(_values(consumer, 20)) == [b"%d" % n for n in range(20)]
        # Long enough at the follower's that the count leaves no doubt.
        wait_for("ten fetches at the follower", lambda: consumer.poll(0.05) or cluster.fetches(3) - before[3] >= 10)
        assert raw.produce(topic, batch_of([b"late"]), acks=-1).error_code == 0
        assert list(_values(consumer, 1)) == [b"late"]
    finally:
        consumer.close()
    after = {number: cluster.fetches(number) for number in (1, 2, 3)}
    assert after[3] - before[3] >= 10
    assert after[1] - before[1] <= 3, "the leader was only asked who serves that rack"
    assert after[2] == before[2]


def _values(consumer: Consumer, count: int) -> Iterator[bytes | None]:
    for _ in range(count):
        message = wait_for("a message", lambda: consumer.poll(0.1), 20.0)
        assert message.error() is None, message.error()
        yield message.value()


@proves("G15", "G16")
def test_topics_are_made_with_replicas_and_the_offsets_topic_with_three(cluster: SharedCluster, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    for made in admin.create_topics([NewTopic(topic, 3, 2)]).values():
        made.result(20)
    cluster.wait_in_sync(topic)
    assert sorted(each.leader for each in cluster.state(topic)) == [1, 2, 3]
    assert {len(each.replicas) for each in cluster.state(topic)} == {2}
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": f"{topic}-g"})
    try:
        wait_for("a commit", lambda: _commits(consumer, offsets=[TopicPartition(topic, 0, 0)]))
    finally:
        consumer.close()
    assert {len(each.replicas) for each in cluster.state("__consumer_offsets")} == {3}


class Load:
    """An idempotent producer with acks=-1 that sends numbers until it is told to stop, in a thread of its own."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.acknowledged: list[int] = []
        self.failed: list[str] = []
        self._topic = topic
        self._stop = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 2,
                "message.timeout.ms": 60_000,
                "retry.backoff.ms": 50,
                "topic.metadata.refresh.interval.ms": 500,
                "log_level": 2,
            }
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            self._producer.produce(self._topic, b"%d" % number, on_delivery=self._delivered)
            self._producer.poll(0.002)
            number += 1
        self._producer.flush(60)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is None:
            self.acknowledged.append(int(message.value()))
        else:
            self.failed.append(str(error))

    def wait_for_more(self, count: int) -> None:
        wanted = len(self.acknowledged) + count
        wait_for(f"{count} more acknowledgements", lambda: len(self.acknowledged) >= wanted, 40.0)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(70)
        assert not self._thread.is_alive()


@proves("G5", "G15", "F2")
def test_nothing_acknowledged_is_lost_when_the_leader_is_killed_and_when_it_stops(
    cluster: SharedCluster, topic: str
) -> None:
    cluster.create(topic, [[1, 2, 3]])
    load = Load(cluster.bootstrap, topic)
    try:
        load.wait_for_more(50)
        cluster.broker(1).kill()
        load.wait_for_more(100)
        second = cluster.state(topic, 3)[0].leader
        assert second in (2, 3)
        cluster.broker(1).start()
        cluster.wait_in_sync(topic)
        assert cluster.broker(second).stop() == 0
        load.wait_for_more(100)
    finally:
        load.stop()
    assert load.failed == []
    cluster.broker(second).start()
    cluster.wait_in_sync(topic)
    read = ConfluentKafka().consume(cluster.bootstrap, {topic: len(load.acknowledged)})[topic]
    assert [int(record.value or b"") for record in read] == sorted(load.acknowledged)


@proves("G16")
def test_a_group_goes_on_when_its_coordinator_is_killed(cluster: SharedCluster, topic: str) -> None:
    cluster.create(topic, [[1, 2, 3], [2, 3, 1], [3, 1, 2]])
    bootstrap, group = cluster.bootstrap, f"{topic}-g"
    producer = Producer({"bootstrap.servers": bootstrap, "log_level": 2})
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 2,
            "retry.backoff.ms": 50,
        }
    )
    try:
        consumer.subscribe([topic])
        for n in range(30):
            producer.produce(topic, b"%d" % n, partition=n % 3)
        assert producer.flush(20) == 0
        assert sorted(int(value or b"") for value in _values(consumer, 30)) == list(range(30))
        consumer.commit(asynchronous=False)
        coordinator = _coordinator(cluster, group)
        cluster.broker(coordinator).kill()
        for n in range(30, 60):
            producer.produce(topic, b"%d" % n, partition=n % 3)
        assert producer.flush(30) == 0
        assert sorted(int(value or b"") for value in _values(consumer, 30)) == list(range(30, 60))
        wait_for("a commit at the new coordinator", lambda: _commits(consumer))
        assert _coordinator(cluster, group) != coordinator
        partitions = [TopicPartition(topic, n) for n in range(3)]
        assert [each.offset for each in consumer.committed(partitions, timeout=20)] == [20, 20, 20]
    finally:
        consumer.close()


def _commits(consumer: Consumer, **what: Any) -> bool:
    try:
        return bool(consumer.commit(asynchronous=False, **what))
    except KafkaException:
        consumer.poll(0.1)
        return False


def _coordinator(cluster: SharedCluster, group: str) -> int:
    alive = next(number for number in (1, 2, 3) if cluster.broker(number).process is not None)
    found: int = cluster.raw(alive).call(apis.FIND_COORDINATOR, 2, key=group, key_type=0).node_id
    return found
