"""What a registry tells: clients that know nothing else, the wire, the HTTP port."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

import kafka
import pytest
from confluent_kafka import Consumer, Producer

from brokers import wait_for
from certificates import self_signed
from clusters import BrokerCluster
from headrace.client.admin.cluster import Cluster
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw
from kafka_protocol.test_cluster_routing import fetch, produce
from proving import proves
from registries import Registry

NOT_LEADER, NOT_COORDINATOR = 6, 16
RECORDS = 200


@proves("R1", "G17")
def test_librdkafka_bootstraps_from_registries_alone(registries: list[Registry], topic: str) -> None:
    bootstrap = ",".join(registry.bootstrap for registry in registries)
    failures: list[object] = []
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for number in range(RECORDS):
        producer.produce(topic, b"%d" % number, on_delivery=lambda error, _: failures.append(error) if error else None)
    assert producer.flush(30) == 0
    assert failures == []
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        found: set[bytes | None] = set()

        def complete() -> bool:
            messages = consumer.consume(RECORDS, 0.2)
            assert [message.error() for message in messages if message.error()] == []
            found.update(message.value() for message in messages)
            return len(found) == RECORDS

        wait_for("all records", complete)
    finally:
        consumer.close()


@proves("R1", "G17")
def test_kafka_python_bootstraps_from_a_registry_and_has_its_topic_made(registry: Registry, topic: str) -> None:
    made = f"{topic}-made"
    producer = kafka.KafkaProducer(bootstrap_servers=[registry.bootstrap])
    try:
        assert producer.send(made, b"first").get(30).offset == 0
    finally:
        producer.close()
    consumer = kafka.KafkaConsumer(
        made,
        bootstrap_servers=[registry.bootstrap],
        group_id=made,
        auto_offset_reset="earliest",
        consumer_timeout_ms=30_000,
    )
    try:
        assert next(iter(consumer)).value == b"first"
    finally:
        consumer.close()
    assert len(registry.ask(f"/topics/{made}")["partition_list"]) == 1


@proves("R1", "L2")
def test_a_registry_tells_what_every_broker_tells(cluster: BrokerCluster, registry: Registry, topic: str) -> None:
    def told(address: str) -> Any:
        with Cluster(address) as client:
            found = client.topology([topic])
            return found.cluster_id, found.controller_id, found.brokers, found.topics

    answers = [told(broker.bootstrap) for broker in cluster.brokers]
    wait_for("a registry that agrees with the brokers", lambda: told(registry.bootstrap) == answers[0] == answers[1])


@proves("R1")
def test_who_wants_records_or_groups_here_is_told_who_has_them(
    cluster: BrokerCluster, registry: Registry, topic: str
) -> None:
    raw = Raw(registry.host_port)
    found = next(iter(raw.call(apis.METADATA, 12, **_metadata(topic)).topics))
    leader = found.partitions[0].leader_id
    port = int(cluster.brokers[leader - 1].bootstrap.rpartition(":")[2])
    told = fetch(raw, topic, found.topic_id, 16)
    row = told.responses[0].partitions[0]
    assert (row.error_code, row.current_leader.leader_id) == (NOT_LEADER, leader)
    assert [(end.node_id, end.port) for end in told.node_endpoints] == [(leader, port)]
    sent = produce(raw, topic, found.topic_id, 10)
    assert sent.responses[0].partition_responses[0].error_code == NOT_LEADER
    beat = raw.call(apis.HEARTBEAT, 4, group_id="g", generation_id=1, member_id="m", group_instance_id=None)
    assert beat.error_code == NOT_COORDINATOR
    folders = raw.call(apis.DESCRIBE_LOG_DIRS, 4, topics=None)
    assert (folders.error_code, folders.results) == (0, [])
    where = raw.call(apis.FIND_COORDINATOR, 4, key_type=0, coordinator_keys=["g"]).coordinators[0]
    assert (where.error_code, where.node_id in (1, 2)) == (0, True)
    raw.close()


def _metadata(topic: str) -> dict[str, Any]:
    return {
        "topics": [Message(name=topic, topic_id=bytes(16))],
        "allow_auto_topic_creation": False,
        "include_topic_authorized_operations": False,
    }


@proves("R1")
def test_each_listener_tells_of_the_brokers_listeners_of_its_name(
    cluster: BrokerCluster, topic: str, tmp_path: Path
) -> None:
    made = self_signed(tmp_path)
    registry = Registry(
        tmp_path / "registry",
        cluster.etcd.uri,
        "tls://127.0.0.1:0",
        tls_certificate=made.certificate_path,
        tls_key=made.key_path,
    )
    registry.listen += ["inside=127.0.0.1:0", "outside=127.0.0.1:0"]
    registry.start()
    try:

        def told(listener: str, tls: ssl.SSLContext | None = None) -> set[str]:
            with Cluster(registry.addresses[listener], tls=tls) as client:
                return {str(broker.address) for broker in client.topology([topic]).brokers.values()}

        assert told("kafka", made.client_context()) == {broker.addresses["kafka"] for broker in cluster.brokers}
        assert told("kafka.inside") == {broker.addresses["kafka.inside"] for broker in cluster.brokers}
        assert told("kafka.outside") == set()
        assert "no broker has a listener 'outside'" in registry.stderr()
        assert registry.stop() == 0
    finally:
        registry.kill()


@proves("R1", "G15")
def test_brokers_ring_and_both_placement_views_over_http(
    cluster: BrokerCluster, registry: Registry, topic: str
) -> None:
    brokers = registry.ask("/brokers")
    assert {row["listeners"]["default"] for row in brokers["brokers"]} == {each.bootstrap for each in cluster.brokers}
    assert brokers["controller"] in (1, 2)
    assert topic in [row["name"] for row in registry.ask("/topics")["topics"]]
    parts = {row["partition"]: row for row in registry.ask(f"/topics/{topic}")["partition_list"]}
    by_topic = [row for row in registry.ask("/placement/topics")["partitions"] if row["topic"] == topic]
    assert {row["partition"]: row["leader"] for row in by_topic} == {n: row["leader"] for n, row in parts.items()}
    by_broker = {row["broker"]: row for row in registry.ask("/placement/brokers")["brokers"]}
    for number, row in parts.items():
        held = [(each["topic"], each["partition"]) for each in by_broker[row["leader"]]["leads"]]
        assert (topic, number) in held
    ring = registry.ask("/ring")
    assert len(ring["points"]) == 2 * ring["points_a_broker"]
    assert sum(ring["shares"].values()) == pytest.approx(1, abs=0.001)
    placed = registry.ask(f"/ring?topic={topic}&partition=0&replicas=2")
    after = [broker for mark, broker in ring["points"] if mark >= placed["point"]] or [ring["points"][0][1]]
    assert placed["replicas"][0] == after[0]
    health = registry.ask("/health")
    assert (health["status"], health["etcd"]["status"], health["brokers"]) == ("alive", "heard", 2)


@proves("R1")
def test_what_cannot_be_read_does_no_harm_on_either_port(registry: Registry, topic: str) -> None:
    kafka_port, http_port = registry.host_port, int(registry.http.rpartition(":")[2])
    junk = (
        b"\xff" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
        (10).to_bytes(4, "big") + b"\x7f\xff" * 5,
        (20).to_bytes(4, "big") + apis.METADATA.to_bytes(2, "big") + b"\x00\x0c" + b"\xee" * 16,
        (1 << 30).to_bytes(4, "big") + b"\x00" * 100,
    )
    for sent in junk:
        raw = Raw(kafka_port)
        raw.socket.sendall(sent)
        assert raw.closed_by_broker()
        raw.close()
    for sent in (
        b"\x00\x01\x02\r\n\r\n",
        b"PUT /settings/a HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", http_port), 20) as peer:
            peer.sendall(sent)
            assert peer.recv(20).startswith(b"HTTP/1.1 4")
    for path, method, body, status in (
        ("/settings/no%2Fname", "PUT", "x", 400),
        ("/settings/large", "PUT", "x" * (1 << 17), 400),
        ("/settings/a?revision=-1", "DELETE", None, 400),
        ("/settings/a?revisoin=1", "DELETE", None, 400),
        ("/settings", "POST", "x", 405),
        ("/ring?topic=t", "GET", None, 400),
        ("/ring?topic=t&partition=0&replicas=9", "GET", None, 400),
        ("/topics/absent", "GET", None, 404),
    ):
        assert registry.ask(path, method, body)["status"] == status, path
    assert topic in [row["name"] for row in registry.ask("/topics")["topics"]]
    registry.check_alive()
