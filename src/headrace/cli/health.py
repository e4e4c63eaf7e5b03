"""What the brokers that run say of their cluster: controller, leaders, what is not in sync. The same for who has its
folder and for who has an address."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from headrace.cli.placement import brokers_of
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import MetadataDoubt, metadata_doubts
from headrace.client.connection.metadata import NO_LEADER, MetadataSnapshot, Partition
from headrace.client.errors import BrokerUnreachable
from headrace.errors import Unsupported
from headrace.placement.internal_topics import INTERNAL_REPLICAS

FACTOR_SETTING: Final = "offsets.topic.replication.factor"
PLACES_SHOWN_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Health:
    cluster_id: str
    controller: int | None
    brokers: list[dict[str, Any]]
    """Of each broker that is live or holds something: its state, how many partitions it leads and holds, and in how
    many it is behind."""
    down: list[int]
    """Brokers that hold replicas and are not live."""
    partition_count: int
    leaderless: list[str]
    """With why, and which brokers have to come back, where it is known."""
    behind: list[str]
    below_factor: list[str]
    """Partitions of internal topics with fewer replicas than they should have."""
    in_doubt: list[str]
    """Brokers that have seen newer metadata than there is."""

    @property
    def is_whole(self) -> bool:
        """What is below its factor for want of brokers is no fault: it grows when they come."""
        return self.controller is not None and not (self.leaderless or self.behind or self.in_doubt)


def ask(client: Cluster, silent: Collection[int] = ()) -> Health:
    """`silent` are brokers that were found not to answer."""
    topology = client.topology()
    return read(topology, _internal_replicas(client, topology), _doubts(client), silent)


def _internal_replicas(client: Cluster, topology: MetadataSnapshot) -> int:
    for broker in sorted(topology.brokers):
        try:
            settings = operations.describe_configs(client, "broker", str(broker))
        except BrokerUnreachable:
            continue  # another one knows it too
        value = next((setting.value for setting in settings if setting.name == FACTOR_SETTING), None)
        return int(value or 0) or INTERNAL_REPLICAS
    return INTERNAL_REPLICAS


def _doubts(client: Cluster) -> list[MetadataDoubt]:
    try:
        return metadata_doubts(client)
    except Unsupported:
        return []  # a broker that is not Headrace


def read(
    topology: MetadataSnapshot,
    internal_replicas: int = INTERNAL_REPLICAS,
    doubts: Sequence[MetadataDoubt] = (),
    silent: Collection[int] = (),
) -> Health:
    partitions = [(topic.name, part) for topic in topology.topics.values() for part in topic.partitions]
    partitions.sort(key=lambda place: (place[0], place[1].index))
    brokers = brokers_of(topology)
    rows = [
        {
            "broker": row.broker,
            "state": state_of(row.live, row.broker in silent),
            "leads": len(row.leads),
            "replicas": len(row.leads) + len(row.follows),
            "behind": sum(not held.in_sync for held in (*row.leads, *row.follows)),
        }
        for row in brokers
    ]
    controller = topology.controller_id if topology.controller_id in topology.brokers else None
    return Health(
        cluster_id=topology.cluster_id,
        controller=controller,
        brokers=rows,
        down=[row.broker for row in brokers if not row.live],
        partition_count=len(partitions),
        leaderless=[
            f"{name}-{part.index}{_awaited(part, topology)}" for name, part in partitions if part.leader_id == NO_LEADER
        ],
        behind=[
            f"{name}-{part.index}: {_listed(part.in_sync)} of {_listed(part.replicas)} in sync"
            for name, part in partitions
            if len(part.in_sync) < len(part.replicas)
        ],
        below_factor=[
            f"{name}-{part.index}: {len(part.replicas)} of {internal_replicas} replicas"
            for name, part in partitions
            if topology.topics[name].is_internal and 0 < len(part.replicas) < internal_replicas
        ],
        in_doubt=[
            f"broker {doubt.broker_id} has seen revision {doubt.seen_revision}, and found {doubt.found_revision}: "
            "see headrace cluster accept-metadata --dry-run"
            for doubt in doubts
        ],
    )


def state_of(live: bool, silent: bool) -> str:
    """A broker that died a moment ago is live until its lease ends, and silent."""
    if not live:
        return "down"
    return "silent" if silent else "up"


def _awaited(part: Partition, topology: MetadataSnapshot) -> str:
    """What a partition without a leader waits for. One of the in-sync set is enough to lead it; if those that are live
    cannot, because they have lost something, all replicas have to say what they hold."""
    if not part.replicas:
        return ": its key is missing in coordination, put it back"
    for waited, word in ((part.in_sync, "or"), (part.replicas, "and")):
        if away := [str(broker) for broker in waited if broker not in topology.brokers]:
            return f": waits for broker{'s' * (word == 'and' and len(away) > 1)} {f' {word} '.join(away)}"
    return ""


def _listed(brokers: Sequence[int]) -> str:
    return ",".join(map(str, brokers)) or "none"


def show(health: Health) -> None:
    """Brokers that are down, and partitions that are not as they should be, and why."""
    if health.down:
        click.echo(f"down: broker{'s' * (len(health.down) > 1)} {', '.join(map(str, health.down))}")
    lists = {
        "without a leader": health.leaderless,
        "under-replicated": health.behind,
        "below their factor, growing as brokers come": health.below_factor,
    }
    for title, places in lists.items():
        click.echo(f"{title}: {len(places)} of {health.partition_count} partitions")
        for place in places[:PLACES_SHOWN_MAX]:
            click.echo(f"  {place}")
    for doubt in health.in_doubt:
        click.echo(f"the metadata is in doubt: {doubt}")
