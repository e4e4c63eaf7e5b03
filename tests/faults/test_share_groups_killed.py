"""Share groups of a cluster of which a broker is killed: what was accepted and kept comes no more, all else comes."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka import Producer

from brokers import DIES_WITH_PARENT, Broker, wait_for
from clients import with_java
from clients.sharing import DEADLINE_S, QUICK, accept, member, poll, share_group, values
from clusters import BrokerCluster
from headrace import ShareConsumer
from headrace.client.admin.cluster import Cluster
from headrace.cluster.names import OFFSETS_TOPIC, SHARE_STATE_TOPIC
from proving import proves

TOPIC, PARTITIONS, MEMBERS = "orders", 3, 4
LOCK_MS = 8000
SETTINGS: dict[str, object] = {
    **QUICK,
    "broker.lease.ms": 3000,
    "replica.lag.time.max.ms": 1000,
    "offsets.topic.partitions": 2,
    "share.coordinator.state.topic.num.partitions": 3,
}


class Course:
    """What has happened to each value, in its order."""

    def __init__(self) -> None:
        self.delivered: Counter[str] = Counter()
        self.kept: set[str] = set()
        self.unsure: set[str] = set()
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def tell(self, event: str, value: str, *more: str) -> None:
        with self._lock:
            if event == "delivered":
                self.delivered[value] += 1
                if value in self.kept:
                    self.faults.append(f"{value} was delivered again ({more}) though it was kept")
            elif event == "kept":
                self.kept.add(value)
            elif event == "unsure":
                self.unsure.add(value)

    def wait_kept(self, more: int) -> None:
        enough = len(self.kept) + more
        wait_for(f"{more} more acknowledgements", lambda: len(self.kept) >= enough, 2 * DEADLINE_S)

    @property
    def settled(self) -> set[str]:
        return self.kept | self.unsure


class Writer:
    """Writes numbers, each acknowledged by all replicas, until it is told to stop."""

    def __init__(self, bootstrap: str) -> None:
        self.written: set[str] = set()
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
                self._producer.produce(TOPIC, b"%d" % number, partition=number % PARTITIONS)
                self.written.add(str(number))
                number += 1
            self._producer.poll(0)

    def stop(self) -> set[str]:
        self._stopped.set()
        self._thread.join()
        assert self._producer.flush(DEADLINE_S) == 0
        return self.written


class JavaMembers:
    def __init__(self, bootstrap: str, group: str, course: Course) -> None:
        jars = with_java.maven_jars("java-clients", "kafka-clients", "kafka-streams")
        classpath = f"{with_java.compiled('ShareMembers', jars)}:{jars}/*"
        arguments = [bootstrap, group, TOPIC, str(MEMBERS)]
        self._course = course
        self._process = subprocess.Popen(
            [*DIES_WITH_PARENT, "java", "-Xmx256m", "-cp", classpath, "ShareMembers", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event, value, *more = line.split()
            self._course.tell(event, value, *more)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)


class LibrdkafkaMembers:
    def __init__(self, bootstrap: str, group: str, course: Course) -> None:
        self._course = course
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._consume, args=(bootstrap, group)) for _ in range(MEMBERS)]
        for thread in self._threads:
            thread.start()

    def _consume(self, bootstrap: str, group: str) -> None:
        consumer = member(bootstrap, group, TOPIC, max_poll_records=20)
        while not self._stopped.is_set():
            found = poll(consumer, 0.5)
            for message in found:
                self._course.tell("delivered", *values([message]))
            accept(consumer, found)
            if not found:
                continue
            failed = {place.partition: error for place, error in consumer.commit_sync(30).items() if error is not None}
            for message in found:
                self._course.tell("unsure" if message.partition() in failed else "kept", *values([message]))
        consumer.close()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()


class HeadraceMembers:
    """Our own share consumers, as many as `MEMBERS`, each in its thread."""

    def __init__(self, bootstrap: str, group: str, course: Course) -> None:
        self._course = course
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._consume, args=(bootstrap, group)) for _ in range(MEMBERS)]
        for thread in self._threads:
            thread.start()

    def _consume(self, bootstrap: str, group: str) -> None:
        with ShareConsumer(
            TOPIC, bootstrap=bootstrap, group=group, acknowledgement="explicit", max_poll_records=20
        ) as consumer:
            while not self._stopped.is_set():
                found = consumer.poll(500)
                for record in found:
                    self._course.tell("delivered", record.value.decode())
                consumer.acknowledge(found)
                results = consumer.commit() if found else {}
                for record in found:
                    failed = results[TOPIC, record.partition] is not None
                    self._course.tell("unsure" if failed else "kept", record.value.decode())

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()


def leader_of(cluster: BrokerCluster, topic: str) -> Broker:
    """Of its first partition."""
    with Cluster(cluster.bootstrap) as client:
        number = client.topology([topic]).topics[topic].partitions[0].leader_id
    return cluster.brokers[number - 1]


@proves("Q1")
@pytest.mark.parametrize(
    ("layout", "led"), [("partitioned", TOPIC), ("shared", SHARE_STATE_TOPIC)], ids=["data", "state"]
)
def test_what_is_kept_comes_no_more_after_a_broker_died(tmp_path: Path, layout: str, led: str) -> None:
    with BrokerCluster(tmp_path, settings={**SETTINGS, "log.layout": layout}) as cluster:
        cluster.create_topic(TOPIC, PARTITIONS, replicas=3)
        group = share_group(cluster.bootstrap, share_record_lock_duration_ms=LOCK_MS)
        course = Course()
        members = JavaMembers(cluster.bootstrap, group, course)
        writer = Writer(cluster.bootstrap)
        course.wait_kept(300)
        cluster.wait_in_sync({TOPIC: PARTITIONS, OFFSETS_TOPIC: 2, SHARE_STATE_TOPIC: 3})
        leader_of(cluster, led).kill()
        course.wait_kept(600)
        written = writer.stop()
        wait_for("everything", lambda: course.settled >= written, 2 * DEADLINE_S)
        members.stop()
        assert not course.faults, cluster.said()
        assert set(course.delivered) == written
        assert_nothing_is_left(cluster, group, course)


@proves("Q1")
@pytest.mark.parametrize(
    ("layout", "led"),
    [("partitioned", TOPIC), ("shared", TOPIC), ("shared", OFFSETS_TOPIC)],
    ids=["data", "data-shared", "group"],
)
def test_our_client_goes_on_after_a_broker_died(tmp_path: Path, layout: str, led: str) -> None:
    with BrokerCluster(tmp_path, settings={**SETTINGS, "log.layout": layout}) as cluster:
        cluster.create_topic(TOPIC, PARTITIONS, replicas=3)
        group = share_group(cluster.bootstrap, share_record_lock_duration_ms=LOCK_MS)
        course = Course()
        members = HeadraceMembers(cluster.bootstrap, group, course)
        writer = Writer(cluster.bootstrap)
        course.wait_kept(300)
        cluster.wait_in_sync({TOPIC: PARTITIONS, OFFSETS_TOPIC: 2, SHARE_STATE_TOPIC: 3})
        leader_of(cluster, led).kill()
        course.wait_kept(600)
        written = writer.stop()
        wait_for("everything", lambda: course.settled >= written, 2 * DEADLINE_S)
        members.stop()
        assert not course.faults, cluster.said()
        assert set(course.delivered) == written
        assert_nothing_is_left(cluster, group, course)


@proves("Q1")
def test_what_is_kept_comes_no_more_after_brokers_were_killed_in_turn(tmp_path: Path) -> None:
    """Each is back before its lease ends: see `test_transactions_killed`."""
    with BrokerCluster(tmp_path, settings={**SETTINGS, "broker.lease.ms": 15_000}) as cluster:
        cluster.create_topic(TOPIC, PARTITIONS, replicas=3)
        group = share_group(cluster.bootstrap, share_record_lock_duration_ms=LOCK_MS)
        course = Course()
        members = LibrdkafkaMembers(cluster.bootstrap, group, course)
        writer = Writer(cluster.bootstrap)
        for broker in cluster.brokers:
            course.wait_kept(300)
            cluster.wait_in_sync({TOPIC: PARTITIONS, OFFSETS_TOPIC: 2, SHARE_STATE_TOPIC: 3})
            broker.restart(clean=False)
        written = writer.stop()
        wait_for("everything", lambda: course.settled >= written, 2 * DEADLINE_S)
        members.stop()
        assert not course.faults, cluster.said()
        assert set(course.delivered) == written
        assert_nothing_is_left(cluster, group, course)


def assert_nothing_is_left(cluster: BrokerCluster, group: str, course: Course) -> None:
    """But what members could not know whether it was kept, when their locks have run out."""
    consumer = member(cluster.bootstrap, group, TOPIC)
    end = time.monotonic() + 1.5 * LOCK_MS / 1000
    while time.monotonic() < end:
        found = poll(consumer, 1.0)
        assert not set(values(found)) & course.kept
        accept(consumer, found)
    consumer.close()
