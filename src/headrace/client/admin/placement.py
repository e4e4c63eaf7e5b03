"""Where replicas are, how far each has come, and moving them: what an operator of several brokers asks and orders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from headrace.client.admin.cluster import Cluster
from headrace.client.errors import BrokerUnreachable, Refusal, check
from headrace.errors import ErrorCode
from headrace.wire import api as apis
from headrace.wire.message import Message

ELECTION_TIMEOUT_MS: Final = 30_000
_MARGIN_MS: Final = 5_000
_ELECTIONS: Final = {"preferred": 0, "unclean": 1}

Where = tuple[str, int]
"""Topic and partition."""
Action = Literal["show", "rebalance", "drain", "undrain"]


@dataclass(frozen=True, slots=True)
class ReplicaPosition:
    """One replica, as the broker that holds it says."""

    broker: int
    topic: str
    partition: int
    leading: bool
    leader_epoch: int
    start_offset: int
    high_watermark: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Offsets that an election outside the in-sync set has cost; up to -1 if nobody knows how many."""

    topic: str
    partition: int
    epoch: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Positions:
    replicas: tuple[ReplicaPosition, ...]
    lost: tuple[Lost, ...]


@dataclass(frozen=True, slots=True)
class PlannedMove:
    topic: str
    partition: int
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    draining: tuple[int, ...]
    moves: tuple[PlannedMove, ...]


@dataclass(frozen=True, slots=True)
class MoveUnderWay:
    topic: str
    partition: int
    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]

    @property
    def target(self) -> tuple[int, ...]:
        return tuple(broker for broker in self.replicas if broker not in self.removing)


def positions(cluster: Cluster) -> Positions:
    """Of the replicas of all brokers that answer: one that died a moment ago counts as live until its lease ends."""
    replicas: list[ReplicaPosition] = []
    lost: dict[Where, Lost] = {}
    for broker_id in sorted(cluster.retry(lambda: cluster.topology([])).brokers):
        try:
            answer = cluster.call(cluster.broker(broker_id), apis.REPLICA_POSITIONS, Message())
        except BrokerUnreachable:
            continue
        for row in answer.replicas:
            replicas.append(
                ReplicaPosition(
                    broker_id,
                    row.topic,
                    row.partition_index,
                    row.leading,
                    row.leader_epoch,
                    row.log_start_offset,
                    row.high_watermark,
                    row.end_offset,
                )
            )
        for row in answer.lost:
            where = row.topic, row.partition_index
            lost[where] = Lost(*where, row.leader_epoch, row.first_offset, row.next_offset)
    return Positions(tuple(replicas), tuple(lost[where] for where in sorted(lost)))


def plan_placement(cluster: Cluster, action: Action, broker: int = -1, *, dry_run: bool = True) -> PlacementPlan:
    """The moves that an action means. Draining and the end of it are ordered unless `dry_run`; a rebalance is only
    planned, and ordered by `order_moves`.
    """

    def ask() -> PlacementPlan:
        request = Message(action=action, broker_id=broker, dry_run=dry_run)
        answer = cluster.ask(apis.PLAN_PLACEMENT, request)
        check(answer.error_code, f"{action} broker {broker}" if broker >= 0 else action, answer.error_message)
        moves = (
            PlannedMove(row.topic, row.partition_index, tuple(row.before), tuple(row.after)) for row in answer.moves
        )
        return PlacementPlan(tuple(answer.draining), tuple(moves))

    return cluster.retry(ask)


def order_moves(cluster: Cluster, targets: Mapping[Where, Sequence[int] | None], *, timeout_ms: int = 60_000) -> None:
    """Begin moves, or with None end those under way; the data follows. Raises the first refusal."""
    topics: dict[str, list[Message]] = {}
    for (topic, index), replicas in targets.items():
        wanted = None if replicas is None else list(replicas)
        topics.setdefault(topic, []).append(Message(partition_index=index, replicas=wanted))

    def order() -> None:
        rows = [Message(name=name, partitions=partitions) for name, partitions in topics.items()]
        request = Message(timeout_ms=timeout_ms, allow_replication_factor_change=True, topics=rows)
        answer = cluster.call(
            cluster.controller(), apis.ALTER_PARTITION_REASSIGNMENTS, request, timeout_ms + _MARGIN_MS
        )
        check(answer.error_code, "moving partitions", answer.error_message)
        for topic in answer.responses:
            for row in topic.partitions:
                check(row.error_code, f"moving {topic.name}-{row.partition_index}", row.error_message)

    cluster.retry(order)
    cluster.forget()


def moves_under_way(cluster: Cluster, *, timeout_ms: int = 60_000) -> list[MoveUnderWay]:
    def ask() -> list[MoveUnderWay]:
        request = Message(timeout_ms=timeout_ms, topics=None)
        answer = cluster.call(cluster.controller(), apis.LIST_PARTITION_REASSIGNMENTS, request)
        check(answer.error_code, "moves under way", answer.error_message)
        return [
            MoveUnderWay(
                topic.name,
                row.partition_index,
                tuple(row.replicas),
                tuple(row.adding_replicas),
                tuple(row.removing_replicas),
            )
            for topic in answer.topics
            for row in topic.partitions
        ]

    return cluster.retry(ask)


def elect_leaders(
    cluster: Cluster, kind: str, partitions: Iterable[Where] | None = None, *, timeout_ms: int = ELECTION_TIMEOUT_MS
) -> dict[Where, Refusal | None]:
    """Elect the preferred leaders of the partitions, or of all, or an unclean leader; what each of them came to."""
    asked: dict[str, list[int]] = {}
    for topic, index in partitions or ():
        asked.setdefault(topic, []).append(index)
    named = None if partitions is None else [Message(topic=name, partitions=found) for name, found in asked.items()]

    def elect() -> dict[Where, Refusal | None]:
        request = Message(election_type=_ELECTIONS[kind], topic_partitions=named, timeout_ms=timeout_ms)
        answer = cluster.call(cluster.controller(), apis.ELECT_LEADERS, request, timeout_ms + _MARGIN_MS)
        check(answer.error_code, "electing leaders")
        return {
            (topic.topic, row.partition_id): None
            if row.error_code == ErrorCode.NONE
            else Refusal(row.error_code, f"electing a leader of {topic.topic}-{row.partition_id}", row.error_message)
            for topic in answer.replica_election_results
            for row in topic.partition_result
        }

    found = cluster.retry(elect)
    cluster.forget()
    return found
