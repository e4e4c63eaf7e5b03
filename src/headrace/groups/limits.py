"""What the operator's settings say about groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.queues.messages import ShareGroupConfig
from headrace.queues.retry_backoff import backoff_table
from headrace.records.isolation import Isolation
from headrace.settings.values import BrokerSettings


@dataclass(frozen=True, slots=True)
class GroupLimits:
    min_session_timeout_ms: int = 1000
    max_session_timeout_ms: int = 1_800_000
    max_size: int = 1000
    initial_rebalance_delay_ms: int = 3000


@dataclass(frozen=True, slots=True)
class ModernLimits:
    """Of groups whose coordinator assigns. Timeouts here are the broker's; a group may have its own."""

    session_timeout_ms: int = 45_000
    min_session_timeout_ms: int = 1000
    max_session_timeout_ms: int = 1_800_000
    heartbeat_interval_ms: int = 5000
    min_heartbeat_interval_ms: int = 100
    max_heartbeat_interval_ms: int = 60_000
    max_size: int = 10_000

    def session_ms(self, own: str | None) -> int:
        """What a group's own setting comes to."""
        wanted = self.session_timeout_ms if own is None else int(own)
        return min(max(wanted, self.min_session_timeout_ms), self.max_session_timeout_ms)

    def heartbeat_ms(self, own: str | None) -> int:
        wanted = self.heartbeat_interval_ms if own is None else int(own)
        return min(max(wanted, self.min_heartbeat_interval_ms), self.max_heartbeat_interval_ms)


@dataclass(frozen=True, slots=True)
class ConsumerLimits(ModernLimits):
    """Of groups of the consumer protocol."""

    assignors: tuple[str, ...] = ("uniform", "range")
    migration_policy: str = "bidirectional"

    @property
    def upgrades(self) -> bool:
        """Whether a classic group becomes one of the consumer protocol while it has members."""
        return self.migration_policy in ("bidirectional", "upgrade")

    @property
    def downgrades(self) -> bool:
        return self.migration_policy in ("bidirectional", "downgrade")


@dataclass(frozen=True, slots=True)
class ShareLimits(ModernLimits):
    """Of share groups."""

    max_size: int = 200
    lock_ms: int = 30_000
    min_lock_ms: int = 1000
    max_lock_ms: int = 3_600_000
    delivery_count_limit: int = 5
    record_locks_max: int = 2000

    def config(self, own: Mapping[str, str]) -> ShareGroupConfig:
        """What holds for the deliveries of a group with these settings of its own."""
        wanted = int(own.get("share.record.lock.duration.ms", self.lock_ms))
        committed = own.get("share.isolation.level") == "read_committed"
        return ShareGroupConfig(
            Isolation.COMMITTED if committed else Isolation.UNCOMMITTED,
            own.get("share.auto.offset.reset", "latest"),
            min(max(wanted, self.min_lock_ms), self.max_lock_ms),
            self.max_lock_ms,
            self.delivery_count_limit,
            self.record_locks_max,
            own.get("errors.deadletterqueue.topic.name", ""),
            own.get("errors.deadletterqueue.copy.record.enable", "").lower() == "true",
            backoff_table(own.get("share.retry.backoff.ms", "")),
        )


@dataclass(frozen=True, slots=True)
class CoordinatorLimits:
    group: GroupLimits = field(default_factory=GroupLimits)
    groups_max: int = 100_000
    metadata_max_bytes: int = 4096
    retention_ms: int = 604_800_000
    expiry_check_ms: int = 600_000
    archive_group: str = "headrace-archive"
    """Its offsets never expire: retention of archived topics depends on them."""
    consumer: ConsumerLimits = field(default_factory=ConsumerLimits)
    share: ShareLimits = field(default_factory=ShareLimits)


def limits_from(settings: BrokerSettings) -> CoordinatorLimits:
    return CoordinatorLimits(
        GroupLimits(
            settings["group.min.session.timeout.ms"],
            settings["group.max.session.timeout.ms"],
            settings["group.max.size"],
            settings["group.initial.rebalance.delay.ms"],
        ),
        settings["groups.max"],
        settings["offsets.metadata.max.bytes"],
        settings["offsets.retention.ms"],
        archive_group=settings["archive.group"],
        consumer=ConsumerLimits(
            settings["group.consumer.session.timeout.ms"],
            settings["group.consumer.min.session.timeout.ms"],
            settings["group.consumer.max.session.timeout.ms"],
            settings["group.consumer.heartbeat.interval.ms"],
            settings["group.consumer.min.heartbeat.interval.ms"],
            settings["group.consumer.max.heartbeat.interval.ms"],
            settings["group.consumer.max.size"],
            tuple(settings["group.consumer.assignors"]) or ("uniform",),
            settings["group.consumer.migration.policy"],
        ),
        share=ShareLimits(
            settings["group.share.session.timeout.ms"],
            settings["group.share.min.session.timeout.ms"],
            settings["group.share.max.session.timeout.ms"],
            settings["group.share.heartbeat.interval.ms"],
            settings["group.share.min.heartbeat.interval.ms"],
            settings["group.share.max.heartbeat.interval.ms"],
            settings["group.share.max.size"],
            settings["group.share.record.lock.duration.ms"],
            settings["group.share.min.record.lock.duration.ms"],
            settings["group.share.max.record.lock.duration.ms"],
            settings["group.share.delivery.count.limit"],
            settings["group.share.partition.max.record.locks"],
        ),
    )
