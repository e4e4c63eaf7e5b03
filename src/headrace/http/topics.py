"""GET /topics and GET /topics/{topic}: what there is, where it is, and how much of it.

Offsets and sizes are those of the replica that the broker asked holds, whatever its role.
"""

from __future__ import annotations

import uuid
from typing import Any

from headrace.cluster.image import PartitionState, Topic
from headrace.errors import UnknownPartition
from headrace.http.exchange import Exchange
from headrace.http.message import Response, json_response
from headrace.http.services import HttpServices
from headrace.partitions.partition import Partition


def list_topics(exchange: Exchange) -> Response:
    topics = exchange.services.image().topics
    return json_response({"topics": [_summary(topics[name]) for name in sorted(topics)]})


def describe_topic(exchange: Exchange) -> Response:
    topic = known_topic(exchange.services, exchange.request.parameters["topic"])
    partitions = [_describe_partition(exchange.services, topic, state) for state in topic.partitions]
    return json_response({**_summary(topic), "overrides": dict(topic.overrides), "partition_list": partitions})


def known_topic(services: HttpServices, name: str) -> Topic:
    topic = services.image().topics.get(name)
    if topic is None:
        raise UnknownPartition(f"there is no topic {name[:249]!r}; GET /topics lists those there are")
    return topic


def _summary(topic: Topic) -> dict[str, Any]:
    return {
        "name": topic.name,
        "id": str(uuid.UUID(bytes=topic.id)),
        "partitions": len(topic.partitions),
        "internal": topic.internal,
    }


def _describe_partition(services: HttpServices, topic: Topic, state: PartitionState) -> dict[str, Any]:
    described: dict[str, Any] = {
        "partition": state.index,
        "leader": state.leader,
        "leader_epoch": state.leader_epoch,
        "in_sync": list(state.isr),
        "replicas": list(state.replicas),
    }
    partition = services.partitions.find_replica(topic.name, state.index)
    if partition is not None:
        described |= _positions(partition)
        keys = services.key_indexes.get(partition.topic_partition)
        if keys is not None:
            described["key_index"] = {
                "next_offset": keys.next_offset,
                "behind": keys.behind,
                "size_bytes": keys.size_bytes,
                "error": None if keys.error is None else str(keys.error),
            }
    return described


def _positions(partition: Partition) -> dict[str, Any]:
    log = partition.log
    archived = {"archived_offset": log.archived_offset(), "held_bytes": log.held_bytes}
    return {
        "role": "leader" if partition.leading else "follower",
        "start_offset": log.start_offset,
        "high_watermark": partition.high_watermark,
        "end_offset": log.end_offset,
        "durable_offset": log.durable_offset,
        "size_bytes": log.size_bytes,
        "durability": log.settings.durability,
        "offline": None if log.offline is None else str(log.offline),
    } | (archived if log.settings.retention_archived else {})
