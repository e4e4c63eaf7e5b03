"""The placement as the commands `partition` and `broker` show it: built from what the brokers answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.client.admin import placement
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.placement import Lost, MoveUnderWay, PlacementPlan, PlannedMove
from headrace.client.connection.metadata import MetadataSnapshot
from headrace.cluster.controller_state import Controls
from headrace.cluster.image import NO_LEADER, Broker, Image, PartitionState, Topic
from headrace.placement.listing import BrokerRow, PartitionRow, by_broker, by_topic


@dataclass(frozen=True, slots=True)
class Placement:
    """Both views, and what an election outside the in-sync set has cost."""

    partitions: tuple[PartitionRow, ...]
    brokers: tuple[BrokerRow, ...]
    lost: tuple[Lost, ...]
    topology: MetadataSnapshot


def ask(cluster: Cluster) -> Placement:
    """Ask the brokers for both views of the placement, with the watermark of every live replica."""
    topology = cluster.retry(cluster.topology)
    found = placement.positions(cluster)
    draining = placement.plan_placement(cluster, "show").draining
    image = image_of(topology, draining, placement.moves_under_way(cluster))
    watermarks = {(each.topic, each.partition, each.broker): each.high_watermark for each in found.replicas}
    return Placement(by_topic(image, watermarks), by_broker(image, watermarks), found.lost, topology)


def brokers_of(topology: MetadataSnapshot) -> tuple[BrokerRow, ...]:
    """Every broker that is live or holds something, by the metadata alone."""
    return by_broker(image_of(topology, (), []))


def image_of(topology: MetadataSnapshot, draining: tuple[int, ...], moves: list[MoveUnderWay]) -> Image:
    """As much of the image as clients are told."""
    moving = {(move.topic, move.partition): move for move in moves}
    topics = {}
    for name, topic in topology.topics.items():
        states = []
        for part in topic.partitions:
            state = PartitionState(part.index, part.leader_id, part.leader_epoch, part.in_sync, part.replicas)
            move = moving.get((name, part.index))
            states.append(state if move is None else replace(state, target=move.target, adding=move.adding))
        topics[name] = Topic(name, topic.topic_id, tuple(states), internal=topic.is_internal)
    brokers = {number: Broker(number, {}, "", 0, broker.rack) for number, broker in topology.brokers.items()}
    return Image("", brokers=brokers, topics=topics, controls=Controls(draining=frozenset(draining)))


def partition_rows(found: Placement, topic: str | None, internal: bool) -> list[dict[str, Any]]:
    """One row a partition. Watermarks stand in the order of the replicas, None for one that does not answer."""
    lost = {(each.topic, each.partition): each for each in found.lost}
    rows = []
    for row in found.partitions:
        if not _is_wanted(found.topology, row.topic, topic, internal):
            continue
        loss = lost.get((row.topic, row.partition))
        rows.append(
            {
                "topic": row.topic,
                "partition": row.partition,
                "leader": None if row.leader == NO_LEADER else row.leader,
                "epoch": row.leader_epoch,
                "replicas": [each.broker for each in row.replicas],
                "in_sync": [each.broker for each in row.replicas if each.in_sync],
                "down": [each.broker for each in row.replicas if not each.live],
                "watermarks": [each.high_watermark for each in row.replicas],
                "moving_to": list(row.target),
                "lost": None if loss is None else [loss.start, loss.end],
            }
        )
    return rows


def held_rows(found: Placement, topic: str | None, internal: bool) -> list[dict[str, Any]]:
    """One row a replica, by the broker that holds it."""
    rows = []
    for broker in found.brokers:
        for role, held in (("leader", broker.leads), ("follower", broker.follows)):
            rows += [
                {
                    "broker": broker.broker,
                    "live": broker.live,
                    "role": role,
                    "topic": each.topic,
                    "partition": each.partition,
                    "in_sync": each.in_sync,
                    "watermark": each.high_watermark,
                }
                for each in held
                if _is_wanted(found.topology, each.topic, topic, internal)
            ]
    return rows


def _is_wanted(topology: MetadataSnapshot, name: str, topic: str | None, internal: bool) -> bool:
    return name == topic if topic is not None else internal or not topology.topics[name].is_internal


def broker_rows(found: Placement) -> list[dict[str, Any]]:
    return [
        {
            "broker": row.broker,
            "state": ("draining" if row.draining else "up") if row.live else "down",
            "address": str(found.topology.brokers[row.broker].address) if row.live else None,
            "rack": row.rack,
            "controller": row.broker == found.topology.controller_id,
            "leads": len(row.leads),
            "follows": len(row.follows),
            "behind": sum(not held.in_sync for held in (*row.leads, *row.follows)),
        }
        for row in found.brokers
    ]


def move_rows(plan: PlacementPlan, sizes: dict[tuple[str, int], int]) -> list[dict[str, Any]]:
    return [
        {
            "topic": move.topic,
            "partition": move.partition,
            "from": list(move.before),
            "to": list(move.after),
            "copied_bytes": copied_bytes(move, sizes),
        }
        for move in plan.moves
    ]


def copied_bytes(move: PlannedMove, sizes: dict[tuple[str, int], int]) -> int | None:
    added = [broker for broker in move.after if broker not in move.before]
    size = sizes.get((move.topic, move.partition))
    return None if size is None else size * len(added)
