"""Internal topics get the replicas that they should have when there are brokers for them. Pure.

An internal topic is created at its first use, when perhaps one broker of three is there: it must not keep one replica
for ever (KIP-115). The controller adds replicas by the moves that an operator's order would begin (cluster.moves),
never takes any away, and spreads who is preferred to lead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from headrace.cluster.image import Image, Topic
from headrace.placement.moves import goal
from headrace.placement.plans import ReplicaMove
from headrace.placement.spread import Site, open_sites, shared
from headrace.settings.values import BrokerSettings

INTERNAL_REPLICAS: Final = 3
"""Of an internal topic, where nobody says how many."""


def internal_replicas(settings: BrokerSettings) -> int:
    """How many replicas the partitions of internal topics should have."""
    return int(settings["offsets.topic.replication.factor"]) or INTERNAL_REPLICAS


def plan_growth(image: Image, wanted: int) -> tuple[ReplicaMove, ...]:
    """Of every internal topic that has fewer replicas than `wanted` though there are brokers for more."""
    sites = {site.broker: site for site in open_sites(image)}
    moves: list[ReplicaMove] = []
    for topic in image.topics.values():
        if topic.internal and any(_is_short(goal(state), wanted, sites) for state in topic.partitions):
            moves += _grown(topic, wanted, sites)
    return tuple(moves)


def _is_short(replicas: tuple[int, ...], wanted: int, sites: Iterable[int]) -> bool:
    return 0 < len(replicas) < wanted and not set(replicas).issuperset(sites)


def _grown(topic: Topic, wanted: int, sites: dict[int, Site]) -> list[ReplicaMove]:
    held = Counter(broker for state in topic.partitions for broker in goal(state))
    preferred = Counter(goal(state)[0] for state in topic.partitions if not state.is_missing)
    moves = []
    for state in topic.partitions:
        before = goal(state)
        after = list(before)
        while _is_short(tuple(after), wanted, sites):
            there = [sites.get(broker, Site(broker)) for broker in after]
            others = [site for broker, site in sites.items() if broker not in after]
            best = min(others, key=lambda site: (shared([*there, site]), held[site.broker], site.broker))
            after.append(best.broker)
            held[best.broker] += 1
        if len(after) == len(before):
            continue
        first = min(after, key=lambda broker: preferred[broker] - (broker == before[0]))
        preferred[before[0]] -= 1
        preferred[first] += 1
        after = [first, *(broker for broker in after if broker != first)]
        moves.append(ReplicaMove(topic.name, state.index, before, tuple(after)))
    return moves
