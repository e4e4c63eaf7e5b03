"""The table of a registry's own settings, and which of a broker's it uses too: one file can serve both."""

from __future__ import annotations

from typing import Final

from headrace.settings.declared import Setting

REGISTRY_SETTINGS: Final[tuple[Setting, ...]] = (
    Setting(
        "registry.listen",
        "list",
        ("127.0.0.1:9080",),
        "Kafka listeners of a registry: [name=][tls://]host:port; a name is that of the brokers' listeners to tell of",
    ),
    Setting("registry.http.listen", "str", "127.0.0.1:8083", "HTTP port of a registry: host:port, or off"),
    Setting(
        "registry.drop.after.ms",
        "int",
        0,
        "how long a registry goes on naming a broker after the end of its lease (broker.lease.ms)",
        "ms",
        0,
        600_000,
    ),
)

USED_BY_REGISTRY: Final = (
    "cluster.id",
    "coordination",
    "coordination.wait.ms",
    "etcd.tls.ca",
    "etcd.tls.cert",
    "etcd.tls.key",
    "etcd.user",
    "etcd.password",
    "tls.certificate",
    "tls.key",
    "tls.client.ca",
    "log.format",
    "log.level",
    "auto.create.topics.enable",
    "num.partitions",
    "default.replication.factor",
    "partitions.max",
    "log.placement",
    "log.follower.reads",
    "offsets.topic.partitions",
    "offsets.topic.replication.factor",
    "frame.max.bytes",
    "connections.max",
    "connection.requests.max",
    "connection.queued.bytes",
    "connection.idle.ms",
    "request.timeout.max.ms",
    "receive.buffer.total.bytes",
    "http.body.max.bytes",
)
"""Settings of brokers that a registry heeds; those about topics should be the same as the brokers'."""
