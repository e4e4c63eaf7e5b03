"""Topics, settings, log folders and the cluster itself: what an operator asks and changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from headrace.client.admin.cluster import Cluster
from headrace.client.connection.metadata import Broker, Topic
from headrace.client.errors import check
from headrace.errors import ErrorCode, InvalidRequest
from headrace.ports.network import Address
from headrace.settings.declared import text_of
from headrace.wire import api as apis
from headrace.wire.message import Message

DEFAULT_COUNT: Final = -1
"""As many partitions or replicas as the broker's settings say."""

# A client waits a little longer than the broker was told to, so that the broker's own answer arrives.
_MARGIN_MS: Final = 5_000

ResourceKind = Literal["topic", "broker", "group", "cluster"]
"""What has settings. Those of the cluster are for all its brokers, and have no name."""
ConfigValue = str | int | float | bool
"""Of a setting, as one writes it in Python; brokers are sent text."""
_RESOURCE_TYPES: Final[dict[str, int]] = {"topic": 2, "broker": 4, "group": 32, "cluster": 4}
_STATIC: Final = 4
_GIVEN: Final = ("flag", "environment", "file")
_SOURCES: Final = {
    1: "topic",
    2: "broker",
    3: "all brokers",
    _STATIC: "static",
    5: "default",
    6: "logger",
    8: "group",
}
_SET: Final = 0
_UNSET: Final = 1


@dataclass(frozen=True, slots=True)
class Config:
    """A setting that is in force, and where its value comes from."""

    name: str
    value: str | None
    source: str
    read_only: bool
    sensitive: bool
    meaning: str


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """A cluster, the broker that decides for it, and all brokers that are up."""

    cluster_id: str
    controller_id: int
    brokers: tuple[Broker, ...]


@dataclass(frozen=True, slots=True)
class LogSize:
    broker_id: int
    folder: str
    topic: str
    partition: int
    size_bytes: int
    offset_lag: int


def list_topics(cluster: Cluster, *, internal: bool = False) -> list[Topic]:
    """All topics, by name; those that brokers keep for themselves only if asked for."""
    topics = cluster.retry(cluster.topology).topics
    return [topic for _, topic in sorted(topics.items()) if internal or not topic.is_internal]


def create_topic(
    cluster: Cluster,
    name: str,
    *,
    partitions: int = DEFAULT_COUNT,
    replicas: int = DEFAULT_COUNT,
    configs: Mapping[str, ConfigValue] | None = None,
    timeout_ms: int = 30_000,
) -> None:
    """Create a topic and wait until it can be used."""
    topic = Message(
        name=name,
        num_partitions=partitions,
        replication_factor=replicas,
        configs=[Message(name=key, value=text_of(value)) for key, value in (configs or {}).items()],
    )

    def create() -> None:
        request = Message(topics=[topic], timeout_ms=timeout_ms)
        (result,) = cluster.call(cluster.controller(), apis.CREATE_TOPICS, request, timeout_ms + _MARGIN_MS).topics
        check(result.error_code, f"create topic {name!r}", result.error_message)

    cluster.retry(create)
    cluster.topic(name, expected=True)


def delete_topic(cluster: Cluster, name: str, *, timeout_ms: int = 30_000) -> None:
    cluster.topology([name])
    cluster.topic(name)

    def delete() -> None:
        request = Message(topics=[Message(name=name)], timeout_ms=timeout_ms)
        (result,) = cluster.call(cluster.controller(), apis.DELETE_TOPICS, request, timeout_ms + _MARGIN_MS).responses
        check(result.error_code, f"delete topic {name!r}", result.error_message)

    cluster.retry(delete)
    cluster.forget()


def create_partitions(cluster: Cluster, name: str, count: int, *, timeout_ms: int = 30_000) -> None:
    """Raise the number of partitions of a topic to `count`."""
    cluster.topic(name)

    def create() -> None:
        request = Message(topics=[Message(name=name, count=count, assignments=None)], timeout_ms=timeout_ms)
        (result,) = cluster.call(cluster.controller(), apis.CREATE_PARTITIONS, request, timeout_ms + _MARGIN_MS).results
        check(result.error_code, f"add partitions to topic {name!r}", result.error_message)

    cluster.retry(create)
    cluster.forget()


def describe_configs(cluster: Cluster, kind: ResourceKind, name: str) -> list[Config]:
    """All settings of a topic, broker or group that are in force, with where each comes from; of the cluster those
    that were set for all brokers."""
    resource = Message(resource_type=_resource_type(kind, name), resource_name=name, configuration_keys=None)
    if kind == "topic":
        cluster.topic(name)

    def describe() -> list[Config]:
        request = Message(resources=[resource], include_documentation=True, include_synonyms=True)
        if kind == "broker":
            answer = cluster.call(cluster.broker(int(name)), apis.DESCRIBE_CONFIGS, request)
        else:
            answer = cluster.ask(apis.DESCRIBE_CONFIGS, request)
        (result,) = answer.results
        check(result.error_code, f"settings of {kind} {name!r}", result.error_message)
        return [
            Config(
                entry.name,
                entry.value,
                _source(entry),
                entry.read_only,
                entry.is_sensitive,
                entry.documentation or "",
            )
            for entry in sorted(result.configs, key=lambda entry: str(entry.name))
        ]

    return cluster.retry(describe)


def _source(entry: Message) -> str:
    """Of what was given when the broker started, Headrace says where; others only that it was then."""
    given = (each.name for each in entry.synonyms if each.source == _STATIC)
    told = next((name for name in given if name.partition(" ")[0] in _GIVEN), None)
    return told or _SOURCES.get(entry.config_source, "unknown")


def alter_configs(
    cluster: Cluster,
    kind: ResourceKind,
    name: str,
    *,
    values: Mapping[str, ConfigValue] | None = None,
    unset: Iterable[str] = (),
) -> None:
    """Set some settings, and bring others back to their defaults; those not named stay."""
    changes = [Message(name=key, config_operation=_SET, value=text_of(value)) for key, value in (values or {}).items()]
    changes += [Message(name=key, config_operation=_UNSET, value=None) for key in unset]
    resource = Message(resource_type=_resource_type(kind, name), resource_name=name, configs=changes)
    if kind == "topic":
        cluster.topic(name)

    def alter() -> None:
        whom = cluster.broker(int(name)) if kind == "broker" else cluster.controller()
        (result,) = cluster.call(whom, apis.INCREMENTAL_ALTER_CONFIGS, Message(resources=[resource])).responses
        check(result.error_code, f"settings of {kind} {name!r}", result.error_message)

    cluster.retry(alter)


def _resource_type(kind: ResourceKind, name: str) -> int:
    if kind not in _RESOURCE_TYPES:
        raise InvalidRequest(f"{kind!r} has no settings; {', '.join(_RESOURCE_TYPES)} have")
    if (kind == "cluster") == bool(name) or (kind == "broker" and not name.isdecimal()):
        raise InvalidRequest(
            f"{name!r} names no {kind}: a topic or group has a name, a broker a number, the cluster none"
        )
    return _RESOURCE_TYPES[kind]


def delete_records(
    cluster: Cluster, topic: str, before: Mapping[int, int], *, timeout_ms: int = 30_000
) -> dict[int, int]:
    """Raise the start of partitions to an offset (-1: their end); answers the new start of each."""
    starts = {}
    for partition, offset in before.items():
        asked = Message(name=topic, partitions=[Message(partition_index=partition, offset=offset)])
        request = Message(topics=[asked], timeout_ms=timeout_ms)

        def delete(partition: int = partition, request: Message = request) -> int:
            answer = cluster.call(
                cluster.leader(topic, partition), apis.DELETE_RECORDS, request, timeout_ms + _MARGIN_MS
            )
            result = answer.topics[0].partitions[0]
            check(result.error_code, f"delete records of {topic}-{partition}")
            return int(result.low_watermark)

        starts[partition] = cluster.retry(delete)
    return starts


def recall(cluster: Cluster, topic: str, partition: int, offset: int) -> bool:
    """See `Admin.recall`."""
    cluster.topic(topic)
    asked = Message(topic=topic, partition_index=partition, offset=offset)

    def ask() -> bool:
        answer = cluster.call(cluster.leader(topic, partition), apis.RECALL_RECORDS, Message(records=[asked]))
        (result,) = answer.records
        if result.error_code == ErrorCode.INVALID_RECORD_STATE:
            return False
        check(result.error_code, f"recall offset {offset} of {topic}-{partition}", result.error_message)
        return True

    return cluster.retry(ask)


def describe_cluster(cluster: Cluster) -> ClusterDescription:
    def describe() -> ClusterDescription:
        answer = cluster.ask(apis.DESCRIBE_CLUSTER, Message())
        check(answer.error_code, "describe cluster", answer.error_message)
        brokers = tuple(
            Broker(broker.broker_id, Address(broker.host, broker.port), broker.rack or "")
            for broker in sorted(answer.brokers, key=lambda broker: int(broker.broker_id))
        )
        return ClusterDescription(answer.cluster_id, answer.controller_id, brokers)

    return cluster.retry(describe)


def describe_log_folders(
    cluster: Cluster, topics: Sequence[str] | None = None, brokers: Iterable[int] | None = None
) -> list[LogSize]:
    """What every partition takes on the disks of every broker, or of those named."""
    asked = None
    if topics is not None:
        counts = {name: len(cluster.topic(name).partitions) for name in topics}
        asked = [Message(topic=name, partitions=list(range(count))) for name, count in counts.items()]

    def describe(broker_id: int) -> list[LogSize]:
        answer = cluster.call(cluster.broker(broker_id), apis.DESCRIBE_LOG_DIRS, Message(topics=asked))
        check(answer.error_code, f"log folders of broker {broker_id}")
        sizes = []
        for folder in answer.results:
            check(folder.error_code, f"log folder {folder.log_dir} of broker {broker_id}")
            for topic in folder.topics:
                sizes += [
                    LogSize(
                        broker_id,
                        folder.log_dir,
                        topic.name,
                        part.partition_index,
                        part.partition_size,
                        part.offset_lag,
                    )
                    for part in topic.partitions
                ]
        return sizes

    broker_ids = sorted(cluster.retry(lambda: cluster.topology([])).brokers if brokers is None else brokers)
    found = [size for broker_id in broker_ids for size in cluster.retry(partial(describe, broker_id))]
    return sorted(found, key=lambda size: (size.topic, size.partition, size.broker_id))


@dataclass(frozen=True, slots=True)
class MetadataDifference:
    kind: str
    """vanished: no key has the partition any more; elsewhere: its key has it on other brokers; epoch: its key is older
    than the log."""
    topic: str
    partition: int
    topic_id: bytes
    detail: str


@dataclass(frozen=True, slots=True)
class MetadataDoubt:
    """What one broker knows that the metadata does not."""

    broker_id: int
    seen_revision: int
    found_revision: int
    at_ms: int
    difference_count: int
    differences: tuple[MetadataDifference, ...]
    """The first of them."""


def metadata_doubts(cluster: Cluster, *, accept: bool = False) -> list[MetadataDoubt]:
    """By broker; empty if nobody doubts the metadata. With `accept` it holds from now on as it is."""

    def ask() -> list[MetadataDoubt]:
        answer = cluster.ask(apis.ACCEPT_METADATA, Message(dry_run=not accept))
        check(answer.error_code, "accept the metadata", answer.error_message)
        return [
            MetadataDoubt(
                row.broker_id,
                row.seen_revision,
                row.found_revision,
                row.at_ms,
                row.difference_count,
                tuple(
                    MetadataDifference(each.kind, each.topic, each.partition_index, each.topic_id, each.detail)
                    for each in row.differences
                ),
            )
            for row in sorted(answer.doubts, key=lambda row: int(row.broker_id))
        ]

    return cluster.retry(ask)
