"""Consistent hash: members and partitions are points on a ring; a partition goes to the next member clockwise.

When one of n members comes or goes, about 1/n of the partitions move, whoever leads and without anybody remembering.
A ring alone would load some members twice as much as others: of each topic a member takes at most a quarter more than
its average, and what is beyond that goes on to the next on the ring. A member is on the ring by its instance name if
it has one, so a static member that restarts is where it was. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import ceil
from typing import Final

from headrace.client.consumer.assignors.participants import Participant, Rooms, Shares, no_shares, subscribers
from headrace.placement.ring import POINTS, point

MOST_OF_AVERAGE: Final = 1.25


def assign_by_ring(members: Sequence[Participant], topics: Rooms) -> Shares:
    shares = no_shares(members)
    rings: dict[tuple[str, ...], _MemberRing] = {}
    for topic, rooms in sorted(topics.items()):
        readers = subscribers(members, topic)
        if not readers:
            continue
        names = tuple(member.member_id for member in readers)
        ring = rings.get(names) or rings.setdefault(names, _MemberRing(readers))
        room = dict.fromkeys(names, ceil(MOST_OF_AVERAGE * len(rooms) / len(readers)))
        for number in range(len(rooms)):
            taker = next(member_id for member_id in ring.clockwise(topic, number) if room[member_id])
            room[taker] -= 1
            shares[taker].append((topic, number))
    return shares


class _MemberRing:
    def __init__(self, members: Sequence[Participant]) -> None:
        marks = sorted(
            (point(f"member/{member.instance_id or member.member_id}/{n}"), member.member_id)
            for member in members
            for n in range(POINTS)
        )
        self._marks = [mark for mark, _ in marks]
        self._owners = [owner for _, owner in marks]

    def clockwise(self, topic: str, partition: int) -> Iterator[str]:
        """Owners of the points from the partition's own on, once around; a member is met many times."""
        first = bisect_left(self._marks, point(f"partition/{topic}/{partition}"))
        yield from self._owners[first:]
        yield from self._owners[:first]
