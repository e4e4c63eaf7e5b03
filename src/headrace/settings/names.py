"""Names of settings by the type of their value, for a type checker: `BrokerSettings` answers by them.

The tables say what is a setting and of what kind; a test holds these names against them. Defaults for topics
(`log.<name>`) are read as LogSettings, so only those that servers ask for one by one are here.
"""

from __future__ import annotations

from typing import Literal

Number = Literal[
    "background.threads", "broker.lease.ms", "checkpoint.ms", "commitlog.file.bytes", "connection.idle.ms",
    "connection.queued.bytes", "connection.requests.max", "connections.max", "coordination.wait.ms",
    "default.replication.factor", "fetch.max.bytes", "follower.replication.throttled.rate", "frame.max.bytes",
    "group.consumer.heartbeat.interval.ms", "group.consumer.max.heartbeat.interval.ms",
    "group.consumer.max.session.timeout.ms", "group.consumer.max.size",
    "group.consumer.min.heartbeat.interval.ms", "group.consumer.min.session.timeout.ms",
    "group.consumer.session.timeout.ms", "group.initial.rebalance.delay.ms",
    "group.max.session.timeout.ms", "group.max.size",
    "group.min.session.timeout.ms", "group.share.delivery.count.limit", "group.share.heartbeat.interval.ms",
    "group.share.max.heartbeat.interval.ms", "group.share.max.record.lock.duration.ms",
    "group.share.max.session.timeout.ms", "group.share.max.share.sessions",
    "group.share.max.size", "group.share.min.heartbeat.interval.ms",
    "group.share.min.record.lock.duration.ms", "group.share.min.session.timeout.ms",
    "group.share.partition.max.record.locks", "group.share.record.lock.duration.ms",
    "group.share.session.timeout.ms", "groups.max", "http.body.max.bytes", "key.index.entries", "key.index.slots",
    "leader.rebalance.ms", "log.cleaner.backoff.ms", "log.cleaner.threads", "max.incremental.fetch.session.cache.slots",
    "node.id", "num.io.threads", "num.network.threads", "num.partitions", "num.recovery.threads.per.data.dir",
    "num.replica.fetchers", "offsets.metadata.max.bytes", "offsets.retention.ms", "offsets.topic.partitions",
    "offsets.topic.replication.factor", "partitions.max", "producer.expire.ms", "receive.buffer.total.bytes",
    "registry.drop.after.ms", "replica.alter.log.dirs.io.max.bytes.per.second", "replica.catchup.bytes.per.second",
    "replica.lag.time.max.ms", "replica.link.timeout.ms", "replica.round.max.ms", "replica.window.bytes",
    "request.timeout.max.ms", "retention.check.ms", "sasl.kerberos.min.time.before.relogin",
    "share.coordinator.state.topic.num.partitions", "share.coordinator.state.topic.replication.factor",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms", "transaction.max.timeout.ms",
    "transaction.remove.expired.transaction.cleanup.interval.ms", "transaction.state.log.num.partitions",
    "transaction.state.log.replication.factor", "transactional.id.expiration.ms",
    "transactional.id.two.phase.expiration.ms", "transactional.ids.max", "transactions.open.max",
]  # fmt: skip
Fraction = Literal["commitlog.rewrite.share"]
Flag = Literal[
    "auto.create.topics.enable", "errors.deadletterqueue.auto.create.topics.enable", "log.follower.reads",
    "sync.helper", "transaction.two.phase.commit.enable",
]  # fmt: skip
Text = Literal[
    "archive.group", "cluster.id", "coordination", "data", "etcd.tls.ca", "etcd.tls.cert", "etcd.tls.key",
    "errors.deadletterqueue.topic.name.prefix", "etcd.user", "group.consumer.migration.policy",
    "http.listen", "log.format", "log.layout", "log.level", "log.placement", "rack",
    "registry.http.listen", "replication.advertise", "replication.listen", "replication.tls.ca", "tls.certificate",
    "tls.client.ca", "tls.key",
]  # fmt: skip
TextList = Literal[
    "advertise",
    "group.consumer.assignors",
    "listen",
    "offsets.loss.accepted",
    "registry.listen",
    "share.state.loss.accepted",
    "transactions.loss.accepted",
]  # fmt: skip
Hidden = Literal["etcd.password"]
