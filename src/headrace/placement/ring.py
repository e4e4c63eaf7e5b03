"""Placement by consistent hashing: brokers and partitions are points on a ring of 64 bits, and the replicas of a
partition are the next brokers clockwise from its point. When one of n brokers comes or goes, about 1/n of the replicas
change place. Pure.

The hash is BLAKE2b with a digest of 8 bytes, read big-endian, of `broker/<id>/<n>` for the virtual points of a broker
and of `partition/<topic>/<n>` for a partition. It knows no seed of the process, so every broker of every version
computes the same ring; changing it would move nearly all data of every topic on the ring.

The ring is a sorted array: it is read often and changes only when brokers do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from headrace.placement.spread import Site, apart, check_enough

SIZE: Final = 1 << 64
POINTS: Final = 128
"""Virtual points of a broker."""
BROKERS_KEPT: Final = 1024
"""Brokers whose points are kept, so that a ring is not hashed anew for every topic."""


def point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def point_of(topic: str, partition: int) -> int:
    return point(f"partition/{topic}/{partition}")


@lru_cache(BROKERS_KEPT)
def _points_of(broker: int) -> tuple[int, ...]:
    return tuple(point(f"broker/{broker}/{n}") for n in range(POINTS))


class Ring:
    """The ring of some brokers. Immutable."""

    def __init__(self, sites: Sequence[Site]) -> None:
        # Two equal points fall to the lower broker number, whatever order the sites come in.
        marks = sorted((mark, site.broker) for site in sites for mark in _points_of(site.broker))
        self._marks = [mark for mark, _ in marks]
        self._owners = [broker for _, broker in marks]
        self._sites = {site.broker: site for site in sites}

    def marks(self) -> Iterator[tuple[int, int]]:
        """Every point and the broker that it belongs to, clockwise from 0."""
        return zip(self._marks, self._owners, strict=True)

    def shares(self) -> dict[int, float]:
        """The part of the ring that leads to each broker first."""
        shares = dict.fromkeys(sorted(self._sites), 0.0)
        before = self._marks[-1] - SIZE if self._marks else 0
        for mark, broker in self.marks():
            shares[broker] += (mark - before) / SIZE
            before = mark
        return shares

    def replicas_of(self, topic: str, partition: int, replicas: int) -> tuple[int, ...]:
        """The preferred leader first. Racks and hosts are shared as late as possible."""
        check_enough(replicas, tuple(self._sites.values()))
        return apart(self._clockwise(point_of(topic, partition)), replicas)

    def _clockwise(self, start: int) -> Iterator[Site]:
        """Every broker once, in the order in which the ring meets them."""
        count = len(self._marks)
        first = bisect_left(self._marks, start)
        met: set[int] = set()
        for step in range(count):
            broker = self._owners[(first + step) % count]
            if broker not in met:
                met.add(broker)
                yield self._sites[broker]
                if len(met) == len(self._sites):
                    return
