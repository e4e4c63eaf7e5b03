"""Where the replicas of new partitions go when they are spread evenly, and what every placement heeds: replicas stand
in different racks, and on different hosts, as long as there are some. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.cluster.image import LEAVING, Broker, Image, Topic
from headrace.errors import InvalidReplication

SPREAD: Final = "spread"
RING: Final = "ring"


@dataclass(frozen=True, slots=True)
class Site:
    """A broker, the rack and the host that it stands in; an empty name is unknown, and shared with nobody."""

    broker: int
    rack: str = ""
    host: str = ""


def site_of(broker: Broker) -> Site:
    """The host is what clients are told: brokers that scale over the cores of a machine have the same one."""
    first = min(broker.listeners, default=None)
    return Site(broker.id, broker.rack, "" if first is None else broker.listeners[first].host)


def open_sites(image: Image) -> list[Site]:
    """The brokers that take new replicas: live, and neither leaving nor draining."""
    staying = (broker for broker in image.brokers.values() if broker.state != LEAVING)
    return [site_of(broker) for broker in staying if broker.id not in image.controls.draining]


def placement_of(topic: Topic, default: str) -> str:
    """How the topic's partitions are placed; `default` is what the broker's settings say."""
    return topic.overrides.get("placement", default)


def spread(partitions: int, replicas: int, sites: Sequence[Site], start: int = 0) -> tuple[tuple[int, ...], ...]:
    """Replicas of each partition, the preferred leader first: leaders evenly in turn, racks and hosts shared as late
    as possible.

    `start` is the turn of the first partition. After each full turn the followers shift against their leaders, so
    that the work of a lost broker is taken over by all the others.
    """
    check_enough(replicas, sites)
    order = _in_turn(sites)
    return tuple(apart(_from_turn(start + number, order), replicas) for number in range(partitions))


def check_enough(replicas: int, sites: Sequence[Site]) -> None:
    if not 1 <= replicas <= len(sites):
        raise InvalidReplication(f"{replicas} replicas asked for, and there are {len(sites)} live brokers to take them")


def apart(order: Iterable[Site], replicas: int) -> tuple[int, ...]:
    """The first of the order, then each time the next one that shares the least with those before it."""
    coming = iter(order)
    chosen = [next(coming)]
    passed: list[Site] = []
    while len(chosen) < replicas:
        best = _next_apart(coming, chosen, passed)
        if best is None:
            # `min` keeps the order among equals.
            best = min(passed, key=lambda site: shared([*chosen, site]))
            passed.remove(best)
        chosen.append(best)
    return tuple(site.broker for site in chosen)


def _next_apart(coming: Iterator[Site], chosen: Sequence[Site], passed: list[Site]) -> Site | None:
    """The next that shares nothing with the chosen; those before it are passed over, and will always share."""
    racks = {site.rack for site in chosen if site.rack}
    hosts = {site.host for site in chosen if site.host}
    for site in coming:
        if site.rack not in racks and site.host not in hosts:
            return site
        passed.append(site)
    return None


def shared(sites: Sequence[Site]) -> tuple[int, int]:
    """How many of the sites share a rack, and how many a host, with another one: less is better, racks first."""
    return _repeats(site.rack for site in sites), _repeats(site.host for site in sites)


def _repeats(names: Iterable[str]) -> int:
    known = [name for name in names if name]
    return len(known) - len(set(known))


def _in_turn(sites: Sequence[Site]) -> list[Site]:
    """The brokers by number, taking a rack at a time and in it a host at a time, so that neighbours stand apart."""
    by_host = _alternating(sorted(sites, key=lambda site: (site.rack, site.host, site.broker)), lambda site: site.host)
    return _alternating(sorted(by_host, key=lambda site: site.rack), lambda site: site.rack)


def _alternating(sites: Iterable[Site], name: Callable[[Site], str]) -> list[Site]:
    groups: dict[str, deque[Site]] = {}
    for site in sites:
        groups.setdefault(name(site), deque()).append(site)
    order: list[Site] = []
    while any(groups.values()):
        order.extend(group.popleft() for group in groups.values() if group)
    return order


def _from_turn(turn: int, order: Sequence[Site]) -> list[Site]:
    count = len(order)
    shift = turn // count
    others = [order[(turn + 1 + (step + shift) % (count - 1)) % count] for step in range(count - 1)]
    return [order[turn % count], *others]
