"""The placement as rows to list: by topic, who holds each partition; by broker, what it leads and follows. Pure.

Rows hold only plain values, so `dataclasses.asdict` makes JSON of them. A replica's high watermark is not in the
metadata: who has asked the brokers hands it in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.cluster.image import Image, PartitionState

Watermarks = Mapping[tuple[str, int, int], int]
"""High watermark of each replica, by topic, partition and broker."""


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    broker: int
    in_sync: bool
    live: bool
    high_watermark: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionRow:
    topic: str
    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[ReplicaRow, ...]
    """The preferred leader first."""
    target: tuple[int, ...] = ()
    """Where the replicas are being moved to."""


@dataclass(frozen=True, slots=True)
class HeldRow:
    topic: str
    partition: int
    in_sync: bool
    high_watermark: int | None = None


@dataclass(frozen=True, slots=True)
class BrokerRow:
    broker: int
    live: bool
    draining: bool
    rack: str
    leads: tuple[HeldRow, ...]
    follows: tuple[HeldRow, ...]


def by_topic(image: Image, watermarks: Watermarks | None = None) -> tuple[PartitionRow, ...]:
    """Every partition, by topic and number."""
    known = watermarks or {}

    def replica(topic: str, state: PartitionState, broker: int) -> ReplicaRow:
        watermark = known.get((topic, state.index, broker))
        return ReplicaRow(broker, broker in state.isr, broker in image.brokers, watermark)

    return tuple(
        PartitionRow(
            name,
            state.index,
            state.leader,
            state.leader_epoch,
            tuple(replica(name, state, broker) for broker in state.replicas),
            state.target,
        )
        for name, topic in sorted(image.topics.items())
        for state in topic.partitions
    )


def by_broker(image: Image, watermarks: Watermarks | None = None) -> tuple[BrokerRow, ...]:
    """Every broker that is live or holds something, by number."""
    known = watermarks or {}
    leads: dict[int, list[HeldRow]] = {broker: [] for broker in (*image.brokers, *image.controls.draining)}
    follows: dict[int, list[HeldRow]] = {}
    for name, topic in sorted(image.topics.items()):
        for state in topic.partitions:
            for broker in state.replicas:
                held = HeldRow(name, state.index, broker in state.isr, known.get((name, state.index, broker)))
                (leads if broker == state.leader else follows).setdefault(broker, []).append(held)
    return tuple(
        BrokerRow(
            broker,
            broker in image.brokers,
            broker in image.controls.draining,
            image.brokers[broker].rack if broker in image.brokers else "",
            tuple(leads.get(broker, ())),
            tuple(follows.get(broker, ())),
        )
        for broker in sorted({*leads, *follows})
    )
