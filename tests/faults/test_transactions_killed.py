"""Consume, transform, produce in transactions, with offsets in them, while brokers of a cluster are killed: what comes
out is what went in, each record once.

A killed broker is back before its lease ends, so that no Metadata leaves it out: librdkafka 2.16 may then wait for ever
for its own thread, in whatever call it is ("Handle is terminating", over and over), when that broker was a coordinator.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from brokers import wait_for
from clusters import BrokerCluster
from faults.chaos_load import connect
from headrace.cluster.names import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from proving import proves

SOURCE, TARGET = "taken", "given"
PARTITIONS = 4
GROUP = "transformers"
TIMEOUT_S = 60.0
SETTINGS: dict[str, object] = {
    "broker.lease.ms": 15_000,
    "replica.lag.time.max.ms": 1000,
    "offsets.topic.partitions": 2,
    "transaction.state.log.num.partitions": 2,
    "group.initial.rebalance.delay.ms": 50,
}


class Transformer:
    """Reads what was not transformed yet and writes it in transactions, every fourth of which it aborts; it begins
    anew, as a new producer of the same transactional id, after whatever error."""

    def __init__(self, bootstrap: str, per_transaction: int) -> None:
        self.committed = 0
        self.restarts = 0
        self._bootstrap = bootstrap
        self._per_transaction = per_transaction
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transformer")
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._transform()
            except KafkaException:
                self.restarts += 1

    def _transform(self) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": GROUP,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "session.timeout.ms": 6000,
                "log_level": 0,
            }
        )
        producer = Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "transactional.id": "transformer",
                "transaction.timeout.ms": 30_000,
                "log_level": 0,
            }
        )
        consumer.subscribe([SOURCE])
        try:
            producer.init_transactions(TIMEOUT_S)
            for number in range(1 << 30):
                taken = [message for message in consumer.consume(self._per_transaction, 0.5) if message.error() is None]
                if self._stopped.is_set():
                    return
                if not taken:
                    continue
                producer.begin_transaction()
                for message in taken:
                    producer.produce(TARGET, message.value(), key=message.key())
                places = consumer.position(consumer.assignment())
                offsets = [place for place in places if place.offset >= 0]
                producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), TIMEOUT_S)
                if number % 4 == 3:
                    producer.abort_transaction(TIMEOUT_S)
                    return
                producer.commit_transaction(TIMEOUT_S)
                self.committed += len(taken)
        finally:
            consumer.close()


def fill(bootstrap: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 0})
    for number in range(count):
        producer.produce(SOURCE, b"%d" % number, key=b"%d" % number)
        if number % 1000 == 0:
            producer.poll(0)
    assert producer.flush(TIMEOUT_S) == 0


def read_committed(bootstrap: str) -> Counter[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(TARGET, index, 0) for index in range(PARTITIONS)])
    found: Counter[bytes] = Counter()
    ended: set[int] = set()
    deadline = time.monotonic() + TIMEOUT_S
    while len(ended) < PARTITIONS and time.monotonic() < deadline:
        message = consumer.poll(1)
        if message is None:
            continue
        error = message.error()
        if error is None:
            found[message.value() or b""] += 1
        elif error.name() == "_PARTITION_EOF":
            ended.add(message.partition() or 0)
    consumer.close()
    assert len(ended) == PARTITIONS, "the last stable offset hangs"
    return found


def leader_of(cluster: BrokerCluster, topic: str, index: int = 0) -> int:
    with connect(cluster.bootstrap) as client:
        return client.topic(topic).partitions[index].leader_id


def run(cluster: BrokerCluster, count: int, kills: list[str], per_transaction: int) -> dict[str, object]:
    for topic in (SOURCE, TARGET):
        cluster.create_topic(topic, PARTITIONS, 3, min_insync_replicas=2)
    cluster.wait_in_sync({SOURCE: PARTITIONS, TARGET: PARTITIONS})
    fill(cluster.bootstrap, count)
    transformer = Transformer(cluster.bootstrap, per_transaction)
    try:
        for nth, topic in enumerate(kills, 1):
            wait_for(
                f"transactions before kill {nth}",
                lambda nth=nth: transformer.committed >= nth * count // (len(kills) + 2),  # type: ignore[misc]
                120,
            )
            wait_for(f"a leader of {topic}", lambda topic=topic: leader_of(cluster, topic) > 0, 60)  # type: ignore[misc]
            killed = cluster.brokers[leader_of(cluster, topic) - 1]
            killed.kill()
            killed.start()
        wait_for("all is transformed", lambda: sum(read_committed(cluster.bootstrap).values()) >= count, 180)
    finally:
        transformer.stop()
    found = read_committed(cluster.bootstrap)
    assert found == Counter(b"%d" % number for number in range(count))
    return {"records": count, "kills": len(kills), "begun_anew": transformer.restarts}


@proves("T1", "T2")
def test_records_are_transformed_once_while_leader_and_coordinators_are_killed(tmp_path: Path) -> None:
    with BrokerCluster(tmp_path, etcd=1, settings=SETTINGS) as cluster:
        run(cluster, 3000, [TARGET, TRANSACTIONS_TOPIC, OFFSETS_TOPIC], 100)


@proves("T2")
@pytest.mark.long
def test_records_are_transformed_once_over_many_kills(tmp_path: Path, proof_report: object) -> None:
    with BrokerCluster(tmp_path, etcd=1, settings=SETTINGS) as cluster:
        figures = run(cluster, 40_000, [TARGET, TRANSACTIONS_TOPIC, OFFSETS_TOPIC, SOURCE] * 5, 200)
    assert callable(proof_report)
    proof_report(**figures)
