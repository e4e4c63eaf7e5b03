"""Evening out: replicas, or leaderships, are shifted from brokers that have more to brokers that have less, each
topic for itself first, then all topics together. Pure.

A shift takes one partition from a broker to another. Where no single shift helps, because every broker with less holds
the partition already or stands in the wrong rack, a chain of shifts over other brokers does. Every chain lowers the sum
of squares of the counts of a topic, or leaves it and lowers that of the totals, so the work ends; and everything is
looked at in an order that follows from the counts alone, so what is even is left as it is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import product
from typing import Final, NamedTuple

PLACES_MAX: Final = 5000
"""Places that the search for one chain looks at; what it does not find by then stays uneven."""


class Shift(NamedTuple):
    topic: str
    partition: int
    source: int
    destination: int


class Counts:
    """Which partitions of each topic a broker has a replica of, or leads; only those added as free can be shifted."""

    def __init__(self, brokers: Collection[int]) -> None:
        self.brokers = sorted(brokers)
        self._in_topic: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._in_all: Counter[int] = Counter()
        self._free: defaultdict[str, defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))

    def add(self, topic: str, partition: int, broker: int, *, free: bool = True) -> None:
        self._in_topic[topic][broker] += 1
        self._in_all[broker] += 1
        if free:
            self._free[topic][broker].add(partition)

    def add_fixed(self, topic: str, brokers: Collection[int]) -> None:
        """One for each mention of a broker, none of which can be shifted."""
        self._in_topic[topic].update(brokers)
        self._in_all.update(brokers)

    def take(self, shift: Shift) -> None:
        topic, partition, source, destination = shift
        for counts in (self._in_topic[topic], self._in_all):
            counts[source] -= 1
            counts[destination] += 1
        self._free[topic][source].remove(partition)
        self._free[topic][destination].add(partition)

    def load(self, topic: str, broker: int) -> tuple[int, int]:
        """Of the topic, and of all topics."""
        return self._in_topic[topic][broker], self._in_all[broker]

    def total(self, broker: int) -> int:
        return self._in_all[broker]

    def free(self, topic: str, broker: int) -> list[int]:
        return sorted(self._free[topic][broker])

    def has_free(self, topic: str, broker: int) -> bool:
        return bool(self._free[topic].get(broker))

    def topics(self) -> list[str]:
        return sorted(self._free)


Legal = Callable[[Shift], bool]
Taken = Callable[[Shift], None]
_Chain = tuple[Shift, ...]


class _Place(NamedTuple):
    """How far a chain has come: to a broker, and while it is inside a topic, from a broker with so many of it."""

    broker: int
    topic: str = ""
    began_with: int = 0


_Onward = Callable[[_Place, _Chain], Iterator[tuple[_Place, _Chain]]]


def even_topics(counts: Counts, legal: Legal, taken: Taken) -> bool:
    """As `even_out`, each topic for itself only."""
    return _Balancer(counts, legal, taken).topics()


def even_out(counts: Counts, legal: Legal, taken: Taken) -> bool:
    """Shift until nothing is left to gain; `taken` hears of each shift. Answers whether there was one."""
    balancer = _Balancer(counts, legal, taken)
    any_shift = False
    while balancer.topics() or balancer.totals():
        any_shift = True
    return any_shift


class _Balancer:
    def __init__(self, counts: Counts, legal: Legal, taken: Taken) -> None:
        self._counts = counts
        self._legal = legal
        self._taken = taken
        self._topics = counts.topics()

    def topics(self) -> bool:
        shifted = False
        for topic in self._topics:
            while self._shift_in(topic):
                shifted = True
        return shifted

    def totals(self) -> bool:
        shifted = False
        while self._single_shifts() or self._shift_from(self._counts.total, self._onward_in_all):
            shifted = True
        return shifted

    def _single_shifts(self) -> bool:
        """What needs no chain, in one pass over the topics: nearly always all there is to do."""
        counts, shifted = self._counts, False
        for topic in self._topics:
            by_total = sorted(counts.brokers, key=counts.total)
            sources = [broker for broker in reversed(by_total) if counts.has_free(topic, broker)]
            for source, destination in product(sources, by_total):
                if counts.total(source) - 2 < counts.total(destination):
                    continue
                if counts.load(topic, source)[0] > counts.load(topic, destination)[0]:
                    shift = self._shift(topic, source, destination, counts.free(topic, source))
                    if shift is not None:
                        self._take(shift)
                        shifted = True
        return shifted

    def _shift_in(self, topic: str) -> bool:
        def onward(place: _Place, chain: _Chain) -> Iterator[tuple[_Place, _Chain]]:
            for shift in self._shifts(topic, place.broker, chain):
                yield _Place(shift.destination), (*chain, shift)

        return self._shift_from(lambda broker: self._counts.load(topic, broker)[0], onward)

    def _onward_in_all(self, place: _Place, chain: _Chain) -> Iterator[tuple[_Place, _Chain]]:
        """A chain goes from topic to topic. It leaves a topic only at a broker that has less of it than the one where
        it entered, so that the topic stays as even as it was.
        """
        counts = self._counts
        for topic in (place.topic,) if place.topic else self._topics:
            if not counts.has_free(topic, place.broker):
                continue
            began_with = place.began_with if place.topic else counts.load(topic, place.broker)[0]
            for shift in self._shifts(topic, place.broker, chain):
                longer = (*chain, shift)
                if counts.load(topic, shift.destination)[0] < began_with:
                    yield _Place(shift.destination), longer
                yield _Place(shift.destination, topic, began_with), longer

    def _shift_from(self, load: Callable[[int], int], onward: _Onward) -> bool:
        """A chain from the fullest broker that has one to a broker with less, by two at least."""
        fullest = sorted(self._counts.brokers, key=lambda broker: (load(broker), self._counts.total(broker)))[::-1]
        least = min(map(load, fullest), default=0)
        return any(self._follow(source, load, onward) for source in fullest if load(source) - 2 >= least)

    def _follow(self, source: int, load: Callable[[int], int], onward: _Onward) -> bool:
        """Take the shortest such chain."""
        enough = load(source) - 2
        chains: dict[_Place, _Chain] = {_Place(source): ()}
        waiting = list(chains)
        for place in waiting:
            for following, chain in onward(place, chains[place]):
                if following in chains:
                    continue
                if not following.topic and load(following.broker) <= enough:
                    for shift in chain:
                        self._take(shift)
                    return True
                chains[following] = chain
                waiting.append(following)
                if len(waiting) == PLACES_MAX:
                    return False
        return False

    def _take(self, shift: Shift) -> None:
        self._counts.take(shift)
        self._taken(shift)

    def _shifts(self, topic: str, source: int, chain: _Chain) -> Iterator[Shift]:
        """One legal shift to each broker, the emptiest first. A partition is in a chain once, so that its shifts cannot
        disturb each other.
        """
        counts = self._counts
        busy = {shift.partition for shift in chain if shift.topic == topic}
        free = [partition for partition in counts.free(topic, source) if partition not in busy]
        if not free:
            return
        for broker in sorted(counts.brokers, key=lambda broker: counts.load(topic, broker)):
            shift = self._shift(topic, source, broker, free) if broker != source else None
            if shift is not None:
                yield shift

    def _shift(self, topic: str, source: int, destination: int, partitions: Iterable[int]) -> Shift | None:
        shifts = (Shift(topic, partition, source, destination) for partition in partitions)
        return next(filter(self._legal, shifts), None)
