"""Committed reads from a follower, on the wire: up to its own last stable offset, and with its own aborted list."""

from __future__ import annotations

import uuid
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from brokers import wait_for
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.clustered import SharedCluster
from kafka_protocol.raw import Raw
from proving import proves

LEADER, FOLLOWER = 1, 2
WAIT_MS = 60_000


def send_fetch(raw: Raw, topic: str, offset: int = 0, *, isolation: int = 1, wait_ms: int = 0) -> None:
    asked = Message(
        partition=0,
        current_leader_epoch=-1,
        fetch_offset=offset,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=1 << 20,
    )
    raw.send(
        apis.FETCH,
        12,
        replica_id=-1,
        max_wait_ms=wait_ms,
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=isolation,
        session_id=0,
        session_epoch=-1,
        topics=[Message(topic=topic, topic_id=bytes(16), partitions=[asked])],
        forgotten_topics_data=[],
        rack_id="",
    )


def fetched(raw: Raw) -> Any:
    row = raw.receive(apis.FETCH, 12)[1].responses[0].partitions[0]
    assert row.error_code == 0
    return row


def fetch(raw: Raw, topic: str, offset: int = 0, **how: int) -> Any:
    send_fetch(raw, topic, offset, **how)
    return fetched(raw)


def transactional(cluster: SharedCluster) -> Producer:
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": str(uuid.uuid4()), "linger.ms": 0})
    producer.init_transactions(60)
    return producer


def write(producer: Producer, topic: str, value: bytes) -> None:
    producer.produce(topic, value, partition=0)
    assert producer.flush(30) == 0


def follower_reached(raw: Raw, topic: str, watermark: int) -> Any:
    def row() -> Any:
        found = fetch(raw, topic)
        return found if found.high_watermark == watermark else None

    return wait_for("the follower's watermark", row)


@proves("F11", "T2")
def test_a_follower_serves_what_is_committed_up_to_its_own_last_stable_offset(
    cluster: SharedCluster, topic: str
) -> None:
    cluster.create(topic, [[LEADER, FOLLOWER]])
    first, second = transactional(cluster), transactional(cluster)
    first.begin_transaction()
    write(first, topic, b"aborted")
    first.abort_transaction(30)  # its marker is at 1
    first.begin_transaction()
    write(first, topic, b"committed")
    second.begin_transaction()
    write(second, topic, b"open")
    first.commit_transaction(30)
    follower = cluster.raw(FOLLOWER)
    row = follower_reached(follower, topic, 5)
    assert row.last_stable_offset == 3
    assert [each.first_offset for each in row.aborted_transactions] == [0]
    uncommitted = fetch(follower, topic, isolation=0)
    assert len(uncommitted.records) > len(row.records)
    assert uncommitted.aborted_transactions is None
    # Who waits at a follower is woken by the marker that comes there.
    send_fetch(follower, topic, 3, wait_ms=WAIT_MS)
    second.abort_transaction(30)
    woken = fetched(follower)
    assert woken.records
    assert [each.first_offset for each in woken.aborted_transactions] == [3]
    assert follower_reached(follower, topic, 6).last_stable_offset == 6


@proves("F11", "T2")
def test_a_consumer_of_its_rack_reads_committed_records_from_the_follower(cluster: SharedCluster, topic: str) -> None:
    cluster.create(topic, [[LEADER, FOLLOWER]])
    producer = transactional(cluster)
    for nth in range(10):
        producer.begin_transaction()
        write(producer, topic, b"%d" % nth)
        if nth % 2:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)
    follower_reached(cluster.raw(FOLLOWER), topic, 20)
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": topic,
            "client.rack": f"rack-{FOLLOWER}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    before, found = cluster.fetches(FOLLOWER), list[bytes | None]()

    def read() -> bool:
        message = consumer.poll(1)
        if message is not None and message.error() is None:
            found.append(message.value())
        return len(found) == 5

    wait_for("the committed records", read)
    consumer.close()
    assert found == [b"0", b"2", b"4", b"6", b"8"]
    assert cluster.fetches(FOLLOWER) > before
