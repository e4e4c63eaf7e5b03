"""Delayed records of a cluster whose brokers are killed: each is delivered once, wherever its partition is led then."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from brokers import Broker, wait_for
from clusters import BrokerCluster
from headrace.client.admin.cluster import Cluster
from headrace.records.delayed import DELAYED_DUE, DELIVER_AFTER
from proving import proves

TOPIC, PARTITIONS = "reminders", 3
DEADLINE_S = 120.0
DELAY_MOST_MS = 6000
SETTINGS: dict[str, object] = {"broker.lease.ms": 3000, "replica.lag.time.max.ms": 1000}


class Writer:
    """Writes numbers until it is told to stop, most of them delayed."""

    def __init__(self, bootstrap: str, seed: int) -> None:
        self.acknowledged: set[bytes] = set()
        self.failed: list[str] = []
        self._random = random.Random(seed)
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5, "log_level": 0}
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stopped.wait(0.01):
            for _ in range(5):
                delay = b"%d" % self._random.randrange(DELAY_MOST_MS)
                headers: Any = [(DELIVER_AFTER, delay)] if self._random.random() < 0.8 else []
                self._producer.produce(
                    TOPIC, b"%d" % number, partition=number % PARTITIONS, headers=headers, on_delivery=self._heard
                )
                number += 1
            self._producer.poll(0)

    def _heard(self, error: Any, message: Any) -> None:
        if error is None:
            self.acknowledged.add(message.value())
        else:
            self.failed.append(str(error))

    def stop(self) -> set[bytes]:
        self._stopped.set()
        self._thread.join()
        assert self._producer.flush(DEADLINE_S) == 0
        assert not self.failed
        return self.acknowledged


class Reader:
    """All that was delivered, from the beginning."""

    def __init__(self, bootstrap: str) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False, "log_level": 0}
        )
        self._consumer.assign([TopicPartition(TOPIC, each, 0) for each in range(PARTITIONS)])
        self.read: Counter[bytes] = Counter()
        self.early: list[bytes] = []

    def has(self, values: set[bytes]) -> bool:
        for message in self._consumer.consume(1000, 0.2):
            if message.error() is not None:
                continue
            value = message.value() or b""
            self.read[value] += 1
            due = dict(message.headers() or []).get(DELAYED_DUE)
            if due is not None and message.timestamp()[1] < int(due):
                self.early.append(value)
        return self.read.keys() >= values

    def close(self) -> None:
        self._consumer.close()


def leader_of(cluster: BrokerCluster, partition: int) -> Broker:
    with Cluster(cluster.bootstrap) as client:
        return cluster.brokers[client.topology([TOPIC]).topics[TOPIC].partitions[partition].leader_id - 1]


@proves("R12", "Q2")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_delayed_records_are_delivered_once_though_leaders_die(tmp_path: Path, layout: str, seed: int) -> None:
    with BrokerCluster(tmp_path, settings={**SETTINGS, "log.layout": layout}) as cluster:
        cluster.create_topic(TOPIC, PARTITIONS, replicas=3, headrace_delay_enable="true")
        cluster.wait_in_sync({TOPIC: PARTITIONS})
        writer, reader = Writer(cluster.bootstrap, seed), Reader(cluster.bootstrap)
        for partition in (0, 1):
            wanted = set(writer.acknowledged)
            wait_for("deliveries", lambda wanted=wanted: reader.has(wanted), DEADLINE_S)  # type: ignore[misc]
            killed = leader_of(cluster, partition)
            killed.kill()
            before = len(writer.acknowledged)
            wait_for("records taken again", lambda before=before: len(writer.acknowledged) > before + 300, DEADLINE_S)  # type: ignore[misc]
            killed.start()
            cluster.wait_in_sync({TOPIC: PARTITIONS})
        acknowledged = writer.stop()
        wait_for("every acknowledged record", lambda: reader.has(acknowledged), DEADLINE_S)
        reader.has(set())
        reader.close()
        assert {value: count for value, count in reader.read.items() if count > 1} == {}
        assert set(reader.read) == acknowledged
        assert not reader.early
