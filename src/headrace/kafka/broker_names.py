"""Broker settings under the names that Kafka gives them, beside our own: tools and clients ask for those.

ALIASES are settings that mean the same; where ours can be altered while running, it can be by either name, and is kept
under ours. Others are told only: a value in another unit or form, or something that is always so here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from headrace.cluster.image import Image
from headrace.kafka import listeners
from headrace.settings.values import BROKER_BY_NAME, BrokerSettings, Setting

ALIASES: Final = {
    "broker.id": "node.id",
    "broker.rack": "rack",
    "broker.session.timeout.ms": "broker.lease.ms",
    "compression.gzip.level": "log.compression.gzip.level",
    "compression.lz4.level": "log.compression.lz4.level",
    "compression.type": "log.compression.type",
    "compression.zstd.level": "log.compression.zstd.level",
    "connections.max.idle.ms": "connection.idle.ms",
    "leader.replication.throttled.rate": "replica.catchup.bytes.per.second",
    "log.cleaner.delete.retention.ms": "log.delete.retention.ms",
    "log.cleaner.max.compaction.lag.ms": "log.max.compaction.lag.ms",
    "log.cleaner.min.cleanable.ratio": "log.min.cleanable.dirty.ratio",
    "log.cleaner.min.compaction.lag.ms": "log.min.compaction.lag.ms",
    "log.dir": "data",
    "log.dirs": "data",
    "log.flush.interval.messages": "log.flush.messages",
    "log.flush.interval.ms": "log.flush.ms",
    "log.index.size.max.bytes": "log.segment.index.bytes",
    "log.retention.check.interval.ms": "retention.check.ms",
    "log.roll.jitter.ms": "log.segment.jitter.ms",
    "log.roll.ms": "log.segment.ms",
    "log.segment.delete.delay.ms": "log.file.delete.delay.ms",
    "max.connections": "connections.max",
    "message.max.bytes": "log.max.message.bytes",
    "min.insync.replicas": "log.min.insync.replicas",
    "offset.metadata.max.bytes": "offsets.metadata.max.bytes",
    "offsets.topic.num.partitions": "offsets.topic.partitions",
    "producer.id.expiration.ms": "producer.expire.ms",
    "socket.request.max.bytes": "frame.max.bytes",
    "unclean.leader.election.enable": "log.unclean.leader.election.enable",
}

DerivedSetting = tuple[Setting, str, str]
"""A setting by Kafka's name, its value, and the name of ours whose source is its own; "" for none."""


def ours(name: str) -> str:
    """The name that a broker setting has here."""
    return ALIASES.get(name, name)


def aliased() -> Iterator[tuple[Setting, str]]:
    """Each alias as a setting, with the name of ours."""
    for name, known in ALIASES.items():
        yield replace(BROKER_BY_NAME[known], name=name), known


def derived(settings: BrokerSettings, image: Image, broker: int) -> Iterator[DerivedSetting]:
    """What has another unit or form in Kafka, or is always so here."""
    specs = listeners.parse_unadvertised(settings["listen"], "listen")
    kinds = {spec.name: "SSL" if spec.tls else "PLAINTEXT" for spec in specs}
    meant = image.brokers.get(broker)
    advertised = [] if meant is None else [(name, f"{at.host}:{at.port}") for name, at in meant.listeners.items()]
    listened = [(spec.name, str(spec.address)) for spec in specs]
    yield _text("listeners", "where this broker listens"), _listed(listened, kinds), "listen"
    yield _text("advertised.listeners", "what clients are told"), _listed(advertised, kinds), "advertise"
    protocols = ",".join(f"{_name(name, kinds)}:{kind}" for name, kind in kinds.items())
    yield _text("listener.security.protocol.map", "which listeners use TLS"), protocols, "listen"
    minutes = str(settings["offsets.retention.ms"] // 60_000)
    yield (
        Setting("offsets.retention.minutes", "int", 0, "offsets.retention.ms in minutes"),
        minutes,
        "offsets.retention.ms",
    )
    interval_ms = settings["leader.rebalance.ms"]
    yield (
        Setting("auto.leader.rebalance.enable", "bool", True, "whether leaderships go back to preferred leaders"),
        "true" if interval_ms else "false",
        "leader.rebalance.ms",
    )
    yield (
        Setting("leader.imbalance.check.interval.seconds", "int", 300, "leader.rebalance.ms in seconds"),
        str(interval_ms // 1000),
        "leader.rebalance.ms",
    )
    for name, value, meaning in (
        ("delete.topic.enable", "true", "topics can be deleted"),
        ("log.cleaner.enable", "true", "topics are compacted where their cleanup.policy says so"),
        (
            "replica.selector.class",
            "org.apache.kafka.common.replica.RackAwareReplicaSelector",
            "a consumer that names its rack is sent to a follower there",
        ),
    ):
        yield _text(name, meaning, value), value, ""


def _text(name: str, meaning: str, default: str = "") -> Setting:
    return Setting(name, "bool" if default == "true" else "str", default, meaning)


def _listed(addresses: Iterable[tuple[str, str]], kinds: dict[str, str]) -> str:
    return ",".join(f"{_name(name, kinds)}://{address}" for name, address in addresses)


def _name(listener: str, kinds: dict[str, str]) -> str:
    """A listener without a name of its own is called as Kafka calls it, by its protocol."""
    return kinds.get(listener, "PLAINTEXT") if listener == listeners.DEFAULT_NAME else listener.upper()
