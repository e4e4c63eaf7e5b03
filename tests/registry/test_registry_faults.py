"""Registries, etcd and brokers that go away, by SIGKILL, while clients are at work."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import kafka
import pytest
from confluent_kafka import Consumer, KafkaError, Producer

import headrace
from brokers import wait_for
from clusters import BrokerCluster
from etcd_nodes import STARTER, etcd_nodes
from headrace.client.admin.cluster import Cluster
from headrace.cluster.keys import CLUSTER_ID
from headrace.errors import SettingError
from headrace.server.registry import Registry as Server
from headrace.settings.values import load
from proving import proves
from registries import Registry, begin

RECORDS = 300
"""That come through between two events."""
START_DEADLINE_S = 120.0


class Traffic:
    """A producer and a consumer of one topic that know registries only, and look up routes all the time."""

    def __init__(self, registries: list[Registry], topic: str) -> None:
        self.errors: list[str] = []
        self.acknowledged: list[bytes] = []
        self.consumed: set[bytes | None] = set()
        self._topic = topic
        self._ending = threading.Event()
        self._all_sent = threading.Event()
        common = {
            "bootstrap.servers": ",".join(registry.bootstrap for registry in registries),
            "topic.metadata.refresh.interval.ms": 100,
            "error_cb": self._error,
            "log_level": 0,
        }
        self._producer = Producer({**common, "enable.idempotence": True, "linger.ms": 5})
        self._consumer = Consumer({**common, "group.id": topic, "auto.offset.reset": "earliest"})
        self._consumer.subscribe([topic])
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._produce, self._consume)]
        for thread in self._threads:
            thread.start()

    def _error(self, error: KafkaError) -> None:
        """A connection that is lost, and made elsewhere, is not an error to the user of a client."""
        if error.code() != KafkaError._TRANSPORT:
            self.errors.append(str(error))

    def _produce(self) -> None:
        number = 0
        while not self._ending.is_set():
            self._producer.produce(self._topic, b"%d" % number, on_delivery=self._delivered)
            number += 1
            self._producer.poll(0.001)
        if self._producer.flush(60):
            self.errors.append("records were not delivered")
        self._all_sent.set()

    def _delivered(self, error: KafkaError | None, message: object) -> None:
        if error is not None:
            self.errors.append(f"delivery: {error}")
        else:
            self.acknowledged.append(message.value())  # type: ignore[attr-defined]

    def _consume(self) -> None:
        while not self._all_sent.is_set() or not self.consumed.issuperset(self.acknowledged):
            for message in self._consumer.consume(500, 0.1):
                if (error := message.error()) is not None:
                    self.errors.append(f"consume: {error}")
                else:
                    self.consumed.add(message.value())

    def go_on(self, count: int) -> None:
        """Return when so many more records have come through."""
        wanted = len(self.consumed) + count
        wait_for(f"{count} more records", lambda: len(self.consumed) >= wanted or self.errors)

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in self._threads), "traffic does not end"
        self._consumer.close()


@pytest.fixture
def traffic(registries: list[Registry], topic: str) -> Iterator[Traffic]:
    running = Traffic(registries, topic)
    yield running
    running.end()


@proves("R1")
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.long)])
def test_clients_do_not_see_that_a_registry_was_killed(
    registries: list[Registry], topic: str, traffic: Traffic, kills: int, proof_report: Callable[..., None]
) -> None:
    for number in range(kills):
        killed = registries[number % len(registries)]
        traffic.go_on(RECORDS)
        killed.kill()
        traffic.go_on(RECORDS)
        late = kafka.KafkaProducer(bootstrap_servers=[registry.bootstrap for registry in registries])
        assert late.partitions_for(topic) == {0, 1}
        late.close()
        killed.start()
    traffic.end()
    assert traffic.errors == []
    assert traffic.consumed == set(traffic.acknowledged)
    if kills > len(registries):
        proof_report(registries=len(registries), kills=kills, records_acknowledged=len(traffic.acknowledged))


@proves("R1")
def test_our_own_client_goes_on_when_a_registry_is_killed(registries: list[Registry], topic: str) -> None:
    """A producer and a member of a group, at work all the time: each registry is killed once, and no call fails."""
    bootstrap = ",".join(registry.bootstrap for registry in registries)
    sent, found = list[bytes](), list[bytes]()

    def go_on() -> None:
        deliveries = []
        for _ in range(RECORDS):
            sent.append(b"%d" % len(sent))
            deliveries.append(producer.send_async(topic, sent[-1]))
        for delivery in deliveries:
            delivery.result(30)
        wait_for("the records", all_found)

    def all_found() -> bool:
        found.extend(record.value for record in consumer.poll(100))
        return len(found) >= len(sent)

    with (
        headrace.Producer(bootstrap, client_id=topic) as producer,
        headrace.Consumer(topic, bootstrap=bootstrap, group=topic, client_id=f"{topic}-reader") as consumer,
    ):
        go_on()
        for number, registry in enumerate(registries):
            registry.kill()
            go_on()
            with headrace.Producer(bootstrap, client_id=f"{topic}-late-{number}") as late:
                sent.append(b"late-%d" % number)
                late.send(topic, sent[-1])
            go_on()
            registry.start()
    assert sorted(found) == sorted(sent)


@proves("R1", "L2", "G13")
def test_a_killed_broker_is_dropped_with_its_lease_or_as_long_after_it_as_is_set(
    cluster: BrokerCluster, registry: Registry, topic: str
) -> None:
    patient = Registry(cluster.folder / "patient", cluster.etcd.uri, registry_drop_after_ms=600_000)
    patient.start()
    try:
        cluster.brokers[1].kill()

        def named(where: Registry) -> set[int]:
            with Cluster(where.bootstrap) as client:
                return set(client.topology([topic]).brokers)

        wait_for("the broker to be dropped", lambda: named(registry) == {1})
        assert [row["broker"] for row in registry.ask("/brokers")["brokers"]] == [1]
        wait_for("its leaderships to move", lambda: {r["leader"] for r in _parts(registry, topic)} == {1})
        wait_for("the other one to hear of it too", lambda: {r["leader"] for r in _parts(patient, topic)} == {1})
        assert named(patient) == {1, 2}, "named for ten minutes more"
        cluster.brokers[1].start()
        wait_for("it to be back", lambda: named(registry) == {1, 2})
    finally:
        patient.kill()


def _parts(registry: Registry, topic: str) -> list[dict[str, int]]:
    found: list[dict[str, int]] = registry.ask(f"/topics/{topic}")["partition_list"]
    return found


@proves("R1", "L2")
def test_without_etcd_a_registry_goes_on_and_says_so_and_then_catches_up(
    cluster: BrokerCluster, registries: list[Registry], topic: str, traffic: Traffic
) -> None:
    registry, paused = registries
    traffic.go_on(100)
    os.kill(paused.pid, signal.SIGSTOP)  # its watch is to fall behind what etcd keeps
    cluster.etcd.kill(0)
    try:
        wait_for("/health to say that etcd is silent", lambda: registry.ask("/health")["etcd"]["status"] == "silent")
        revision = registry.ask("/health")["revision"]
        assert registry.ask("/ready") == {"status": "ready"}
        assert len(_parts(registry, topic)) == 2
        with Cluster(registry.bootstrap) as client:
            assert set(client.topology([topic]).brokers) == {1, 2}
        traffic.go_on(100)
        cluster.etcd.start(0)
        wait_for("etcd to be heard again", lambda: registry.ask("/health")["etcd"]["status"] == "heard")
        cluster.create_topic(f"{topic}-later", 1, 1)
        newest = wait_for("the new topic", lambda: _revision_with(registry, f"{topic}-later"))
        assert newest > revision
        assert cluster.etcd.nodes[0].ask("/v3/kv/compaction", {"revision": newest, "physical": True}) is not None
    finally:
        os.kill(paused.pid, signal.SIGCONT)
    wait_for("the registry that was away to list anew", lambda: _revision_with(paused, f"{topic}-later"))
    traffic.end()
    assert traffic.errors == []


def _revision_with(registry: Registry, topic: str) -> int:
    """The revision that the registry is at, once it knows the topic."""
    found = [row["name"] for row in registry.ask("/topics")["topics"]]
    return int(registry.ask("/health")["revision"]) if topic in found else 0


@proves("R1")
def test_a_start_that_cannot_succeed_says_why(
    cluster: BrokerCluster, registry: Registry, tmp_path: Path, without_etcd: subprocess.Popen[str]
) -> None:
    taken = registry.bootstrap
    running = {
        f"cannot listen on {taken}: the port is in use": begin(Registry(tmp_path / "port", cluster.etcd.uri, taken)),
        "setting cluster.id is 'other'": begin(Registry(tmp_path / "id", cluster.etcd.uri, cluster_id="other")),
        "did not answer, could not read": without_etcd,
    }
    for says, process in running.items():
        _, said = process.communicate(timeout=START_DEADLINE_S)
        assert process.returncode == 1, says
        assert says in said
        assert said.count("\n") == 1, f"one line, no trace: {said}"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"coordination": "embedded"}, "a registry follows a cluster on etcd: give --etcd"),
        ({"coordination": "etcd://127.0.0.1"}, "neither embedded nor etcd://host:port"),
        ({"registry.listen": "127.0.0.1:0,127.0.0.1:0"}, "two listeners are called 'default'"),
        ({"registry.listen": "127.0.0.1"}, "is not host:port"),
    ],
)
def test_settings_that_make_no_registry_are_refused(flags: dict[str, object], says: str) -> None:
    settings = load(environment={}, flags={"coordination": "etcd://127.0.0.1:1", **flags})
    with contextlib.closing(asyncio.new_event_loop()) as loop, pytest.raises(SettingError, match=says):
        Server(settings, loop, lambda error: None)


@proves("R1")
def test_a_registry_makes_no_cluster_and_waits_for_one(tmp_path: Path) -> None:
    with etcd_nodes(tmp_path) as etcd:
        impatient = begin(Registry(tmp_path / "impatient", etcd.uri, coordination_wait_ms=0))
        patient = Registry(tmp_path / "patient", etcd.uri)
        starting = STARTER.submit(patient.start)  # a process dies with the thread that started it
        _, said = impatient.communicate(timeout=START_DEADLINE_S)
        assert impatient.returncode == 1
        assert "start a broker with that coordination first" in said
        wait_for("the other one to wait", lambda: "start a broker with that coordination" in patient.stderr())
        everything = etcd.nodes[0].ask("/v3/kv/range", {"key": "AA==", "range_end": "AA=="})
        assert everything is not None
        assert "kvs" not in everything, "a registry writes nothing of its own"
        etcd.nodes[0].ask("/v3/kv/put", {"key": _coded(CLUSTER_ID), "value": _coded('"made-by-a-broker"')})
        starting.result(START_DEADLINE_S)
        assert patient.ask("/health")["cluster"] == "made-by-a-broker"
        patient.kill()


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
