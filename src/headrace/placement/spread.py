"""Where the replicas of new partitions go when they are spread evenly, and what every placement heeds: replicas stand
in different racks, and on different hosts, as long as there are some. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.cluster.image import LEAVING, Broker, Image, Topic
from headrace.errors import InvalidReplication
from headrace.placement.balance import Counts, Shift, even_topics

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


def spread(
    partitions: int, replicas: int, sites: Sequence[Site], start: int = 0, counts: Counts | None = None, topic: str = ""
) -> tuple[tuple[int, ...], ...]:
    """Replicas of each partition, the preferred leader first: leaders evenly in turn, racks and hosts shared as late
    as possible, and of the brokers that are as far apart those with the fewest replicas.

    `start` is the turn of the first partition. After each full turn the followers shift against their leaders, so
    that the work of a lost broker is taken over by all the others. `counts` has the replicas that are there, of the
    topic and of others; the new ones are added to it.
    """
    check_enough(replicas, sites)
    order = _in_turn(sites)
    held = Counts([site.broker for site in sites]) if counts is None else counts
    # Who leads is settled first, so that the followers can make up for it.
    for number in range(partitions):
        held.add(topic, number, order[(start + number) % len(order)].broker, free=False)
    placed: list[list[int]] = []
    for number in range(partitions):
        leader, *others = _from_turn(start + number, order)
        others.sort(key=lambda site: held.load(topic, site.broker))
        placed.append(list(apart([leader, *others], replicas)))
        for broker in placed[number][1:]:
            held.add(topic, number, broker)
    _even_followers(held, placed, sites)
    return tuple(map(tuple, placed))


def _even_followers(counts: Counts, placed: list[list[int]], sites: Sequence[Site]) -> None:
    """The last brokers in turn had little choice: what they left uneven is evened out."""
    known = {site.broker: site for site in sites}

    def after(shift: Shift) -> list[int]:
        return [shift.destination if broker == shift.source else broker for broker in placed[shift.partition]]

    def legal(shift: Shift) -> bool:
        before = placed[shift.partition]
        if shift.destination in before:
            return False
        return shared([known[broker] for broker in after(shift)]) <= shared([known[broker] for broker in before])

    def taken(shift: Shift) -> None:
        placed[shift.partition] = after(shift)

    even_topics(counts, legal, taken)


def check_enough(replicas: int, sites: Sequence[Site]) -> None:
    if not 1 <= replicas <= len(sites):
        raise InvalidReplication(f"{replicas} replicas asked for, and there are {len(sites)} live brokers to take them")


def apart(order: Iterable[Site], replicas: int) -> tuple[int, ...]:
    """The first of the order, then each time the next one that shares the least with those before it."""
    coming = iter(order)
    chosen: list[int] = []
    racks: set[str] = set()
    hosts: set[str] = set()
    passed: list[Site] = []

    def shares(site: Site) -> tuple[bool, bool]:
        return site.rack in racks, site.host in hosts

    while len(chosen) < replicas:
        best = None
        for site in coming:
            if shares(site) == (False, False):
                best = site
                break
            # It will always share something; its turn comes when nothing else is left.
            passed.append(site)
        if best is None:
            best = min(passed, key=shares)
            passed.remove(best)
        chosen.append(best.broker)
        racks |= {best.rack} - {""}
        hosts |= {best.host} - {""}
    return tuple(chosen)


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
