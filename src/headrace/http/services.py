"""What the HTTP port may use; server/node.py fills it in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from headrace.cluster.config import Configs
from headrace.cluster.image import Image
from headrace.cluster.topics import Topics
from headrace.coordinators.peers import Ask
from headrace.coordinators.state_partitions import ClosedPartition
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.descriptions import Lag
from headrace.metrics import Metrics
from headrace.partitions.partitions import Partitions
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk
from headrace.queues.messages import ShareGroupConfig
from headrace.queues.share_partitions import SharePartitions
from headrace.settings.values import BrokerSettings
from headrace.storage.keys.builder import KeyIndexes


@dataclass(frozen=True, slots=True)
class ShareServices:
    """What receiving and acknowledging for share groups needs."""

    partitions: SharePartitions
    config_of: Callable[[str], ShareGroupConfig]
    ask: Ask
    """Another broker, in Kafka's protocol."""
    draw: Callable[[int], bytes]
    """So many random bytes that nobody can guess."""


@dataclass(frozen=True, slots=True)
class HttpServices:
    settings: BrokerSettings
    clock: Clock
    disk: Disk
    metrics: Metrics
    broker_id: int
    cluster_id: str
    partitions: Partitions
    key_indexes: KeyIndexes
    image: Callable[[], Image]
    """The newest image of the cluster's metadata."""
    topics: Topics
    configs: Configs
    effective_settings: Callable[[], BrokerSettings]
    """The settings with what was altered while running."""
    ensure_topic: Callable[[str], Awaitable[object]]
    """Returns when the topic is there and its partitions are served, created if it may be; else raises."""
    groups: GroupCoordinator
    share: ShareServices
    group_lags: Callable[[], Iterable[Lag]]
    ready: Callable[[], str | None]
    """None when requests can be served, else the reason why not."""
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    """Run a coroutine in a task that the node owns."""
    closed_groups: Callable[[], Iterable[ClosedPartition]] = tuple
    """Partitions of the offsets topic that are led here and cannot be read."""
