"""What the handlers of the Kafka front end may use; `front_end` fills it in, for a registry `server.registry`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from headrace.cluster.changes import Changes
from headrace.cluster.config import Configs
from headrace.cluster.leadership import Leadership
from headrace.cluster.producer_ids import ProducerIds
from headrace.cluster.topics import TopicCreation, Topics
from headrace.cluster.view import View
from headrace.coordination.waits import Compute
from headrace.groups.coordinator import GroupCoordinator
from headrace.kafka.fetch_sessions import FetchSessions
from headrace.kafka.first_writes import FirstWrites
from headrace.kafka.metadata_cache import MetadataCache
from headrace.kafka.share_sessions import ShareSessions
from headrace.metrics import Metrics
from headrace.partitions.partitions import Partitions
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk
from headrace.queues.delays import Delays
from headrace.queues.messages import ShareGroupConfig
from headrace.queues.share_coordinator import ShareCoordinator
from headrace.queues.share_partitions import SharePartitions
from headrace.settings.values import BrokerSettings
from headrace.storage.keys.builder import KeyIndexes
from headrace.transactions.coordinator import TransactionCoordinator
from headrace.transactions.marker_appends import MarkerAppends


@dataclass(slots=True)
class Services:
    settings: BrokerSettings
    clock: Clock
    disk: Disk
    data_folder: str | None
    """None where there are no logs."""
    metrics: Metrics
    broker_id: int
    cluster_id: str
    view: View
    changes: Changes
    topics: Topics
    configs: Configs
    auto_topic_creation: TopicCreation
    partitions: Partitions
    leadership: Leadership
    key_indexes: KeyIndexes
    groups: GroupCoordinator
    transactions: TransactionCoordinator
    marker_appends: MarkerAppends
    first_writes: FirstWrites
    share_states: ShareCoordinator
    producer_ids: ProducerIds
    fetch_sessions: FetchSessions
    share_sessions: ShareSessions
    share_partitions: SharePartitions
    share_group_config: Callable[[str], ShareGroupConfig]
    """What holds for deliveries to a share group now."""
    delays: Delays
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    """Run a coroutine in a task that the node owns."""
    failed: Callable[[BaseException], None]
    """Something broke that the broker cannot go on without."""
    effective_settings: Callable[[], BrokerSettings]
    """The settings with what was altered while running."""
    compute: Compute
    """Run pure work that may take long."""
    metadata_cache: MetadataCache = field(default_factory=MetadataCache)
    connections: dict[object, None] = field(default_factory=dict)
    """Those that are open, in the order in which they were."""
