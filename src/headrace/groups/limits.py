"""What the operator's settings say about groups."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.settings.values import BrokerSettings


@dataclass(frozen=True, slots=True)
class GroupLimits:
    min_session_timeout_ms: int = 1000
    max_session_timeout_ms: int = 1_800_000
    max_size: int = 1000
    initial_rebalance_delay_ms: int = 3000


@dataclass(frozen=True, slots=True)
class CoordinatorLimits:
    group: GroupLimits = field(default_factory=GroupLimits)
    groups_max: int = 100_000
    metadata_max_bytes: int = 4096
    retention_ms: int = 604_800_000
    expiry_check_ms: int = 600_000
    archive_group: str = "headrace-archive"
    """Its offsets never expire: retention of archived topics depends on them."""


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
    )
