"""Where the replicas of new partitions go. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import InvalidReplication


@dataclass(frozen=True, slots=True)
class Site:
    """A broker and the rack that it stands in; an empty rack is unknown."""

    broker: int
    rack: str = ""


def spread(partitions: int, replicas: int, sites: Sequence[Site], start: int = 0) -> tuple[tuple[int, ...], ...]:
    """Replicas of each partition, the preferred leader first: leaders evenly in turn, racks shared as late as
    possible.

    `start` is the turn of the first partition. After each full turn the followers shift against their leaders, so
    that the work of a lost broker is taken over by all the others.
    """
    if not 1 <= replicas <= len(sites):
        raise InvalidReplication(f"{replicas} replicas asked for, and there are {len(sites)} live brokers")
    order = _racks_in_turn(sites)
    return tuple(_replicas_of(start + number, replicas, order) for number in range(partitions))


def _racks_in_turn(sites: Sequence[Site]) -> list[Site]:
    """The brokers by number, taking a rack at a time, so that neighbours in the order stand apart."""
    racks: dict[str, deque[Site]] = {}
    for site in sorted(sites, key=lambda site: (site.rack, site.broker)):
        racks.setdefault(site.rack, deque()).append(site)
    order: list[Site] = []
    while any(racks.values()):
        order.extend(rack.popleft() for rack in racks.values() if rack)
    return order


def _replicas_of(turn: int, replicas: int, order: Sequence[Site]) -> tuple[int, ...]:
    count = len(order)
    chosen = [order[turn % count]]
    shift = turn // count
    others = [order[(turn + 1 + (step + shift) % (count - 1)) % count] for step in range(count - 1)]
    while len(chosen) < replicas:
        racks = {site.rack for site in chosen if site.rack}
        best = next((site for site in others if site.rack not in racks), others[0])
        others.remove(best)
        chosen.append(best)
    return tuple(site.broker for site in chosen)
