"""What a client knows of a cluster: brokers, topics, leaders. Plain values, made from one Metadata answer each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.client.errors import Refusal
from headrace.errors import Code
from headrace.ports.network import Address
from headrace.wire.message import Message

NO_LEADER = -1


@dataclass(frozen=True, slots=True)
class Broker:
    broker_id: int
    address: Address
    rack: str


@dataclass(frozen=True, slots=True)
class Partition:
    index: int
    leader_id: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    offline: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Topic:
    name: str
    topic_id: bytes
    is_internal: bool
    partitions: tuple[Partition, ...]
    """By index, without gaps."""


@dataclass(frozen=True, slots=True)
class Topology:
    cluster_id: str
    controller_id: int
    brokers: dict[int, Broker]
    topics: dict[str, Topic]
    refused: dict[str, Refusal]
    """Topics that were asked for and are not there, or not readable now."""


def read_topology(answer: Message) -> Topology:
    """The contents of a Metadata answer."""
    topics: dict[str, Topic] = {}
    refused: dict[str, Refusal] = {}
    for topic in answer.topics:
        if topic.error_code != Code.NONE:
            refused[topic.name] = Refusal(topic.error_code, f"topic {topic.name!r}")
        else:
            topics[topic.name] = Topic(topic.name, topic.topic_id, topic.is_internal, _partitions(topic.partitions))
    brokers = {
        broker.node_id: Broker(broker.node_id, Address(broker.host, broker.port), broker.rack or "")
        for broker in answer.brokers
    }
    return Topology(answer.cluster_id or "", answer.controller_id, brokers, topics, refused)


def _partitions(partitions: Iterable[Message]) -> tuple[Partition, ...]:
    return tuple(
        Partition(
            partition.partition_index,
            partition.leader_id,
            partition.leader_epoch,
            tuple(partition.replica_nodes),
            tuple(partition.isr_nodes),
            tuple(partition.offline_replicas),
        )
        for partition in sorted(partitions, key=lambda partition: int(partition.partition_index))
    )
