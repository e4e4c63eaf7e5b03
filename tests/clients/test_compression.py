"""`compression.type` of a topic: whatever a client sends is stored in the topic's codec, and read by every client."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from brokers import Broker
from clients.records import Client
from clients.topics import MakeTopic
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Position, fetch
from headrace.records.codecs import Codec

DEADLINE_S = 120.0
COUNT = 200
READERS = ("confluent-kafka", "kafka-python", "aiokafka")
SENT_AND_STORED = [("none", "zstd"), ("zstd", "gzip"), ("gzip", "snappy"), ("snappy", "lz4"), ("lz4", "uncompressed")]


def codecs_of(broker: Broker, topic: str) -> set[int]:
    found: set[int] = set()
    with Cluster(broker.bootstrap) as cluster:
        offset = 0
        while offset < COUNT:
            (fetched,) = fetch(cluster, [Position(topic, 0, offset)])
            for header, _ in fetched.whole_batches():
                found.add(header.codec)
                offset = header.next_offset
    return found


@pytest.mark.parametrize(("sent", "stored"), SENT_AND_STORED)
def test_what_a_client_compressed_is_stored_in_the_topics_codec(
    broker: Broker, topic: MakeTopic, clients: dict[str, Client], sent: str, stored: str
) -> None:
    name = topic()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    entry = ConfigEntry("compression.type", stored, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, name, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(DEADLINE_S)
    failed: list[object] = []
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "compression.type": sent,
            "enable.idempotence": True,
            "linger.ms": 1,
            "batch.num.messages": 7,
        }
    )
    for n in range(COUNT):
        producer.produce(
            name,
            b"value %d " % n * 20,
            partition=0,
            on_delivery=lambda error, _: failed.append(error) if error else None,
        )
        producer.poll(0)
    assert not producer.flush(DEADLINE_S)
    assert not failed
    assert codecs_of(broker, name) == {Codec.NONE if stored == "uncompressed" else Codec[stored.upper()]}
    for client in (clients[reader] for reader in READERS):
        read = client.consume(broker.bootstrap, {name: COUNT})[name]
        assert [record.value for record in read] == [b"value %d " % n * 20 for n in range(COUNT)]
