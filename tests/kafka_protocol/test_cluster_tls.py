"""Links between brokers under TLS: both ends show a certificate of the cluster's own authority."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from brokers import wait_for
from certificates import self_signed
from clusters import BrokerCluster
from headrace.errors import SettingError
from headrace.kafka import listeners
from headrace.settings.values import load
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw, batch_of
from proving import proves


def is_refused(address: tuple[str, int], certificate: Path) -> bool:
    """Whether a peer that knows the authority, and shows no certificate of it, is turned away."""
    context = ssl.create_default_context(cafile=str(certificate))
    try:
        with (
            socket.create_connection(address, 10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as link,
        ):
            link.sendall(b"hello")
            return link.recv(1) == b""
    except OSError:
        return True


@proves("G13")
def test_replicas_are_copied_under_tls_and_strangers_are_refused(tmp_path: Path) -> None:
    made = self_signed(tmp_path)
    settings = {
        "tls.certificate": made.certificate_path,
        "tls.key": made.key_path,
        "replication.tls.ca": made.certificate_path,
    }
    with BrokerCluster(tmp_path / "cluster", brokers=2, etcd=1, settings=settings) as cluster:
        raw = Raw(cluster.brokers[0].host_port)
        asked = Message(
            name="t", num_partitions=-1, replication_factor=-1, configs=[],
            assignments=[Message(partition_index=0, broker_ids=[1, 2])],
        )  # fmt: skip
        created = raw.call(apis.CREATE_TOPICS, 7, topics=[asked], timeout_ms=5000, validate_only=False)
        assert created.topics[0].error_code == 0
        answer = wait_for(
            "a leader with both replicas",
            lambda: (given := raw.produce("t", batch_of([b"v"]), acks=-1)).error_code in (0, 20) and given,
        )
        assert answer.error_code == 0, answer.error_message
        follower = Raw(cluster.brokers[1].host_port)
        wait_for("the record at the follower", lambda: follower.fetch("t", 0).high_watermark == 1)
        host, _, port = str(cluster.brokers[0].settings["replication.listen"]).rpartition(":")
        assert is_refused((host, int(port)), made.certificate_path)
        raw.close()
        follower.close()


@proves("T1")
def test_brokers_with_listeners_under_tls_alone_end_transactions_at_each_other(tmp_path: Path) -> None:
    """The listeners want to see certificates, and brokers judge those of each other by their own authority."""
    made = self_signed(tmp_path)
    settings: dict[str, object] = {
        "tls.certificate": made.certificate_path,
        "tls.key": made.key_path,
        "tls.client.ca": made.certificate_path,
        "offsets.topic.partitions": 1,
        "transaction.state.log.num.partitions": 1,
        "replication.tls.ca": made.certificate_path,
    }
    cluster = BrokerCluster(tmp_path / "cluster", brokers=2, etcd=1, settings=settings)
    addresses = [broker.listen[0] for broker in cluster.brokers]
    for broker, address in zip(cluster.brokers, addresses, strict=True):
        broker.listen = [f"tls://{address}"]
    client: dict[str, str | int | float | bool] = {
        "bootstrap.servers": ",".join(addresses),
        "security.protocol": "ssl",
        "ssl.ca.location": str(made.certificate_path),
        "ssl.certificate.location": str(made.certificate_path),
        "ssl.key.location": str(made.key_path),
        "ssl.endpoint.identification.algorithm": "none",
    }
    with cluster:
        admin = AdminClient(client)
        given = NewTopic("t", 4, 1)
        wait_for("the topic", lambda: admin.create_topics([given])["t"].exception(30) is None)
        producer = Producer({**client, "transactional.id": "tx"})
        producer.init_transactions(60)
        for _ in range(2):
            producer.begin_transaction()
            for index in range(4):
                producer.produce("t", b"v", partition=index)
            producer.commit_transaction(60)
        consumer = Consumer({**client, "group.id": "g", "isolation.level": "read_committed"})
        consumer.assign([TopicPartition("t", index, 0) for index in range(4)])
        found = consumer.consume(8, 60)
        consumer.close()
        assert [message.value() for message in found] == [b"v"] * 8


def test_tls_between_brokers_needs_a_certificate_to_show(tmp_path: Path) -> None:
    made = self_signed(tmp_path)
    with pytest.raises(SettingError, match="needs the settings tls"):
        listeners.replication_tls(load(flags={"replication.tls.ca": str(made.certificate_path)}, environment={}))
    with pytest.raises(SettingError, match="cannot use"):
        listeners.replication_tls(load(flags={"replication.tls.ca": str(tmp_path / "none.pem")}, environment={}))
    assert listeners.replication_tls(load(environment={})) is None


def test_a_port_for_brokers_on_every_address_has_to_say_which_one_they_use() -> None:
    with pytest.raises(SettingError, match=r"replication\.advertise"):
        listeners.replication(load(flags={"replication.listen": "0.0.0.0:9192"}, environment={}), clustered=True)
    given = {"replication.listen": "0.0.0.0:9192", "replication.advertise": "10.0.0.1:9192"}
    listen, told = listeners.replication(load(flags=given, environment={}), clustered=True)
    assert (str(listen), str(told)) == ("0.0.0.0:9192", "10.0.0.1:9192")
    assert listeners.replication(load(environment={}), clustered=False) == (None, None)
