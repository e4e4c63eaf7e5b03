"""Everything that a broker or cluster serves, as a value that JSON can hold: taken down when old data was made, and
taken again from what opens it.

    topics    by name: the settings given to it; per partition start, end and every record
    groups    by name: state, and committed offsets with their metadata, by topic and partition
    brokers   by id: the settings that were given while it ran

A record is [offset, leader epoch, kind of timestamp, timestamp, key, value, headers]. Bytes are text in latin-1, long
ones their digest. Only confluent-kafka and sockets are used here, nothing of Headrace: whatever becomes of the code,
this asks the same.
"""

from __future__ import annotations

import hashlib
import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    ConfigSource,
    ResourceType,
)

from brokers import wait_for

DEADLINE_S: Final = 120.0
SHOWN_BYTES_MAX: Final = 40
INTERNAL: Final = "__consumer_offsets"
QUIET: Final = {"log_level": 0, "topic.metadata.refresh.interval.ms": 500}
DAY_MS: Final = 86_400_000
KEEP: Final[Mapping[str, object]] = {
    "retention.check.ms": DAY_MS,
    "log.cleaner.backoff.ms": DAY_MS,
    "log.retention.ms": -1,
    "offsets.retention.ms": 1000 * 365 * DAY_MS,
    "producer.expire.ms": 1000 * 365 * DAY_MS,
}
"""Settings of a broker that takes nothing away, however old it is."""

Content = dict[str, Any]


def content(bootstrap: str, groups: Collection[str] = ()) -> Content:
    """Waits for those groups: one whose coordinator is not elected yet is not listed."""
    admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})
    found = admin.list_topics(timeout=DEADLINE_S)
    names = {name: sorted(topic.partitions) for name, topic in found.topics.items() if name != INTERNAL}
    records = _records(bootstrap, [(name, index) for name in names for index in names[name]])
    return {
        "cluster_id": found.cluster_id,
        "topics": {
            name: {
                "settings": _settings(admin, ResourceType.TOPIC, name, ConfigSource.DYNAMIC_TOPIC_CONFIG),
                "partitions": {str(index): records[name, index] for index in names[name]},
            }
            for name in sorted(names)
        },
        "groups": _groups(admin, groups),
        "brokers": {
            str(broker): _settings(admin, ResourceType.BROKER, str(broker), ConfigSource.DYNAMIC_BROKER_CONFIG)
            for broker in sorted(found.brokers)
        },
    }


def shown(data: bytes | None) -> str | None:
    if data is None or len(data) <= SHOWN_BYTES_MAX:
        return None if data is None else data.decode("latin-1")
    return f"{len(data)} bytes, {hashlib.blake2b(data, digest_size=8).hexdigest()}"


def _settings(admin: AdminClient, kind: ResourceType, name: str, source: ConfigSource) -> dict[str, str]:
    (answer,) = admin.describe_configs([ConfigResource(kind, name)], request_timeout=DEADLINE_S).values()
    return {entry.name: entry.value for _, entry in sorted(answer.result().items()) if entry.source == source.value}


def _records(bootstrap: str, places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], dict[str, Any]]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader of everything",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 20,
            **QUIET,
        }
    )
    try:
        bounds = {place: _bounds(consumer, TopicPartition(*place)) for place in places}
        read: dict[tuple[str, int], dict[str, Any]] = {
            place: {"start": start, "end": end, "records": []} for place, (start, end) in bounds.items()
        }
        consumer.assign([TopicPartition(*place, start) for place, (start, _) in bounds.items()])
        left = set(places)
        while left:
            message = consumer.poll(DEADLINE_S)  # which is false if its value is empty
            assert message is not None, f"neither records nor the end of {sorted(left)}"
            place, error = (str(message.topic()), int(message.partition() or 0)), message.error()
            if error is None:
                read[place]["records"].append(_record(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                left.discard(place)
            else:
                raise KafkaException(error)
        return read
    finally:
        consumer.close()


def _bounds(consumer: Consumer, partition: TopicPartition) -> tuple[int, int]:
    """A leader that has just been elected may have no answer yet."""

    def asked() -> tuple[int, int] | None:
        try:
            bounds: tuple[int, int] | None = consumer.get_watermark_offsets(partition, timeout=5.0)
        except KafkaException as error:
            if error.args[0].retriable() or error.args[0].code() == KafkaError._TIMED_OUT:
                return None
            raise
        return bounds

    return wait_for(f"the bounds of {partition.topic}-{partition.partition}", asked, DEADLINE_S)


def _record(message: Any) -> list[Any]:
    kind, timestamp_ms = message.timestamp()
    headers = [[name, shown(value)] for name, value in message.headers() or ()]
    return [
        message.offset(),
        message.leader_epoch(),
        kind,
        timestamp_ms,
        shown(message.key()),
        shown(message.value()),
        headers,
    ]


def _groups(admin: AdminClient, wanted: Collection[str]) -> dict[str, Any]:
    def listed() -> Any | None:
        answer = admin.list_consumer_groups(request_timeout=DEADLINE_S).result()
        complete = not answer.errors and {group.group_id for group in answer.valid}.issuperset(wanted)
        return answer if complete else None

    groups: dict[str, Any] = {}
    found = wait_for(f"the groups {', '.join(wanted)}", listed, DEADLINE_S)
    for group in sorted(found.valid, key=lambda group: str(group.group_id)):
        asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group.group_id)])
        offsets: dict[str, dict[str, list[Any]]] = {}
        for each in asked[group.group_id].result(DEADLINE_S).topic_partitions:
            offsets.setdefault(each.topic, {})[str(each.partition)] = [each.offset, each.metadata]
        groups[group.group_id] = {"state": group.state.name, "offsets": offsets}
    return groups


def produce_raw(bootstrap: str, topic: str, batch: bytes) -> tuple[int, int]:
    """Send a record batch as it is to partition 0, by Produce version 3 and acks=-1; (error code, base offset)."""
    found = AdminClient({"bootstrap.servers": bootstrap, **QUIET}).list_topics(topic, timeout=DEADLINE_S)
    leader = found.brokers[found.topics[topic].partitions[0].leader]
    name = topic.encode()
    body = struct.pack(">hhih3s", 0, 3, 1, 3, b"raw") + struct.pack(">hhi", -1, -1, 30_000)
    body += struct.pack(f">ih{len(name)}s", 1, len(name), name) + struct.pack(">iii", 1, 0, len(batch)) + batch
    address = (leader.host, leader.port)
    with socket.create_connection(address, DEADLINE_S) as connection, connection.makefile("rb") as answers:
        connection.sendall(struct.pack(">i", len(body)) + body)
        (size,) = struct.unpack(">i", answers.read(4))
        answer = answers.read(size)
    # Correlation id, one topic with its name, one partition, its index.
    error_code, base_offset = struct.unpack_from(">hq", answer, 4 + 4 + 2 + len(name) + 4 + 4)
    return error_code, base_offset
