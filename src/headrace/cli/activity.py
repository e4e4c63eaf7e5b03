"""What a cluster is doing: two looks at its logs and groups, and the rates between them.

All of it is asked over the Kafka port: ends of logs give records in, sizes of the leaders' logs bytes in, commits of
groups records out. Who reads without a group is not seen. A log that retention has shortened meanwhile counts as one
that did not grow.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace.cli.cluster_reach import ReachedCluster, reach
from headrace.cli.placement import brokers_of
from headrace.client.admin import groups, operations
from headrace.client.admin.fetch import list_places
from headrace.client.connection.metadata import MetadataSnapshot
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.fetch_requests import LATEST
from headrace.errors import HeadraceError


@dataclass(frozen=True, slots=True)
class GroupLook:
    state: str
    committed: Mapping[TopicPartition, int] | None
    """None where its coordinator does not answer."""


@dataclass(frozen=True, slots=True)
class Look:
    """A cluster at one moment; what a broker that does not answer would know is left out."""

    at_s: float
    cluster: MetadataSnapshot
    silent: frozenset[int]
    ends: Mapping[TopicPartition, int]
    sizes: Mapping[tuple[int, str, int], int]
    """By broker, topic and partition, in bytes."""
    groups: Mapping[str, GroupLook]


@dataclass(frozen=True, slots=True)
class BrokerActivity:
    broker: int
    address: str | None
    """None of one that is down: it holds replicas by the metadata and is not live."""
    controller: bool
    answers: bool
    leads: int
    stored_bytes: int | None
    records_in_per_s: float | None
    bytes_in_per_s: float | None


@dataclass(frozen=True, slots=True)
class TopicActivity:
    topic: str
    partitions: int
    not_in_sync: int
    """Partitions of which not all replicas are in sync, or that have no leader."""
    stored_bytes: int
    """In the leaders' logs."""
    records_in_per_s: float | None
    bytes_in_per_s: float | None
    records_out_per_s: float | None


@dataclass(frozen=True, slots=True)
class GroupActivity:
    group: str
    state: str
    partitions: int
    lag: int | None
    records_out_per_s: float | None


@dataclass(frozen=True, slots=True)
class Activity:
    """The busiest topics and the groups that are most behind come first."""

    brokers: list[BrokerActivity]
    topics: list[TopicActivity]
    groups: list[GroupActivity]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def look(connect: Callable[..., Any], *, internal: bool) -> Look:
    with reach(connect, tell=False) as cluster:
        snapshot = cluster.retry(cluster.topology)
        names = {name for name, topic in snapshot.topics.items() if internal or not topic.is_internal}
        places = [
            (name, partition.index)
            for name in names
            for partition in snapshot.topics[name].partitions
            if partition.leader_id >= 0 and partition.leader_id not in cluster.silent
        ]
        ends = {place: found.offset for place, found in list_places(cluster, dict.fromkeys(places, LATEST)).items()}
        stored = operations.describe_log_folders(cluster, brokers=cluster.answering)
        sizes = {
            (each.broker_id, each.topic, each.partition): each.size_bytes for each in stored if each.topic in names
        }
        return Look(time.monotonic(), snapshot, frozenset(cluster.silent), ends, sizes, _groups(cluster))


def _groups(cluster: ReachedCluster) -> dict[str, GroupLook]:
    found: dict[str, GroupLook] = {}
    for listed in groups.list_groups(cluster, cluster.answering):
        try:
            found[listed.group_id] = GroupLook(listed.state, groups.fetch_offsets(cluster, listed.group_id))
        except HeadraceError:
            # One whose coordinator is away is shown without numbers; the others are of use all the same.
            found[listed.group_id] = GroupLook(listed.state, None)
    return found


def compare(before: Look | None, now: Look) -> Activity:
    """Without a look before there are no rates."""
    rates = _Rates(before, now)
    return Activity(_brokers(rates, now), _topics(rates, now), _group_rows(rates, now))


class _Rates:
    """What has grown since, by place, and a second."""

    def __init__(self, before: Look | None, now: Look) -> None:
        self._elapsed_s = None if before is None else max(1e-3, now.at_s - before.at_s)
        self.records_in = _growth(before.ends if before else {}, now.ends)
        self.bytes_in = _growth(before.sizes if before else {}, now.sizes)
        self.out: dict[str, Counter[TopicPartition]] = {}
        for name, group in now.groups.items():
            earlier = before.groups.get(name) if before else None
            self.out[name] = _growth((earlier and earlier.committed) or {}, group.committed or {})

    def per_s(self, counts: Iterable[int]) -> float | None:
        return None if self._elapsed_s is None else round(sum(counts) / self._elapsed_s, 1)


def _growth(before: Mapping[Any, int], now: Mapping[Any, int]) -> Counter[Any]:
    return Counter({place: max(0, count - before[place]) for place, count in now.items() if place in before})


def _leaders(now: Look) -> dict[TopicPartition, int]:
    return {
        (name, part.index): part.leader_id for name, topic in now.cluster.topics.items() for part in topic.partitions
    }


def _brokers(rates: _Rates, now: Look) -> list[BrokerActivity]:
    leaders = _leaders(now)
    live = [
        BrokerActivity(
            number,
            str(broker.address),
            number == now.cluster.controller_id,
            number not in now.silent,
            sum(leader == number for leader in leaders.values()),
            sum(size for (holder, _, _), size in now.sizes.items() if holder == number),
            rates.per_s(count for place, count in rates.records_in.items() if leaders.get(place) == number),
            rates.per_s(count for (holder, *place), count in rates.bytes_in.items() if holder == number),
        )
        for number, broker in now.cluster.brokers.items()
    ]
    down = [
        BrokerActivity(row.broker, None, False, False, 0, None, None, None)
        for row in brokers_of(now.cluster)
        if not row.live
    ]
    return sorted(live + down, key=lambda row: row.broker)


def _topics(rates: _Rates, now: Look) -> list[TopicActivity]:
    leaders = _leaders(now)
    records_in, records_out = Counter[str](), Counter[str]()
    bytes_in, stored = Counter[str](), Counter[str]()
    for (name, _), count in rates.records_in.items():
        records_in[name] += count
    for growth in rates.out.values():
        for (name, _), count in growth.items():
            records_out[name] += count
    for (holder, name, number), size in now.sizes.items():
        if leaders.get((name, number)) == holder:
            stored[name] += size
            bytes_in[name] += rates.bytes_in[holder, name, number]
    found = [
        TopicActivity(
            name,
            len(topic.partitions),
            sum(part.leader_id < 0 or len(part.in_sync) < len(part.replicas) for part in topic.partitions),
            stored[name],
            rates.per_s([records_in[name]]),
            rates.per_s([bytes_in[name]]),
            rates.per_s([records_out[name]]),
        )
        for name, topic in now.cluster.topics.items()
        if name in {place[0] for place in now.ends} or not topic.is_internal
    ]
    return sorted(found, key=lambda row: (-(row.records_in_per_s or 0), -(row.records_out_per_s or 0), row.topic))


def _group_rows(rates: _Rates, now: Look) -> list[GroupActivity]:
    found = []
    for name, group in now.groups.items():
        lag = None
        if group.committed is not None:
            lag = sum(max(0, now.ends[place] - at) for place, at in group.committed.items() if place in now.ends)
        out = rates.per_s(rates.out[name].values())
        found.append(GroupActivity(name, group.state, len(group.committed or {}), lag, out))
    return sorted(found, key=lambda row: (-(row.lag or 0), row.group))
