"""GET /topics and GET /topics/{topic}: what there is, where it is, how much of it, and with which settings.

Offsets and sizes are those of the replica that the broker asked holds, whatever its role. `overrides` are the topic's
own settings, `settings` all that are in effect, as text.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

from headrace.cluster.image import PartitionState, Topic
from headrace.errors import UnknownPartition
from headrace.http.description import (
    BROKER,
    COUNT,
    OFFSET,
    PARTITION,
    TEXT,
    TRUTH,
    Answer,
    Operation,
    choice,
    closed,
    list_of,
    map_of,
    nullable,
    number,
)
from headrace.http.exchange import Exchange
from headrace.http.message import Response, json_response
from headrace.http.services import HttpServices
from headrace.partitions.partition import Partition
from headrace.settings.values import text_of

_SUMMARY: Final = {"name": TEXT, "id": {"type": "string", "format": "uuid"}, "partitions": number(1), "internal": TRUTH}
_KEY_INDEX: Final = closed(
    {"next_offset": OFFSET, "behind": COUNT, "size_bytes": COUNT, "error": nullable(TEXT)}, title="KeyIndex"
)
_PARTITION: Final = closed(
    {
        "partition": PARTITION,
        "leader": BROKER,
        "leader_epoch": number(-1),
        "in_sync": list_of(BROKER),
        "replicas": list_of(BROKER),
    },
    {
        "role": choice("leader", "follower"),
        "start_offset": OFFSET,
        "high_watermark": OFFSET,
        "last_stable_offset": nullable(OFFSET),
        "end_offset": OFFSET,
        "durable_offset": OFFSET,
        "size_bytes": COUNT,
        "durability": TEXT,
        "offline": nullable(TEXT),
        "archived_offset": OFFSET,
        "held_bytes": COUNT,
        "key_index": _KEY_INDEX,
    },
    title="Partition",
)
TOPIC: Final = closed(
    {**_SUMMARY, "overrides": map_of(TEXT), "settings": map_of(TEXT), "partition_list": list_of(_PARTITION)},
    title="Topic",
)
LIST: Final = Operation(
    "The topics that there are",
    {200: Answer.json("By name.", closed({"topics": list_of(closed(_SUMMARY, title="TopicSummary"))}))},
)
DESCRIBE: Final = Operation(
    "One topic: its settings, and where its partitions are", {200: Answer.json("The topic.", TOPIC)}, errors=(404,)
)


def list_topics(exchange: Exchange) -> Response:
    topics = exchange.services.image().topics
    return json_response({"topics": [_summary(topics[name]) for name in sorted(topics)]})


def describe_topic(exchange: Exchange) -> Response:
    topic = known_topic(exchange.services, exchange.request.parameters["topic"])
    return json_response(shown_topic(exchange.services, topic))


def shown_topic(services: HttpServices, topic: Topic) -> dict[str, Any]:
    partitions = [_describe_partition(services, topic, state) for state in topic.partitions]
    defaults = {name: text_of(value) for name, value in services.effective_settings().topic_defaults().items()}
    return {
        **_summary(topic),
        "overrides": dict(topic.overrides),
        "settings": defaults | dict(topic.overrides),
        "partition_list": partitions,
    }


def known_topic(services: HttpServices, name: str) -> Topic:
    topic = services.image().topics.get(name)
    if topic is None:
        raise UnknownPartition(f"there is no topic {name[:249]!r}; GET /topics lists those there are")
    return topic


def http_of(services: HttpServices, number: int) -> str:
    """Where another broker serves HTTP, as far as it is known."""
    broker = services.image().brokers.get(number)
    return f"at http://{broker.http.host}:{broker.http.port}" if broker is not None and broker.http else "there"


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
        "last_stable_offset": partition.stable_offset_or_none(),
        "end_offset": log.end_offset,
        "durable_offset": log.durable_offset,
        "size_bytes": log.size_bytes,
        "durability": log.settings.durability,
        "offline": None if log.offline is None else str(log.offline),
    } | (archived if log.settings.retention_archived else {})
