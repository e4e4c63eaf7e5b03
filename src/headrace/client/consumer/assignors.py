"""Who reads what: the rules by which the member that leads a group shares out partitions. All pure.

An assignor is known to the group by its protocol names, best first. The broker takes one that every member offers, so
members with different eager assignors, and other clients with `range`, share a group by `range`. `cooperative` offers
`cooperative-sticky` alone, as other clients do: it goes with nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from headrace.client.consumer.group_protocol import NO_GENERATION, RANGE, TopicPartition, assign_ranges, places_of
from headrace.errors import SettingError
from headrace.placement.ring import POINTS, point

Rooms = Mapping[str, Sequence[str]]
"""Topic to the rack of each partition's leader, in order of partitions; "" where that is not known."""
Shares = dict[str, list[TopicPartition]]
"""Member id to what it is to read; every member is in it."""


@dataclass(frozen=True, slots=True)
class Participant:
    """A member as the one that leads sees it."""

    member_id: str
    topics: frozenset[str]
    owned: frozenset[TopicPartition] = frozenset()
    generation: int = NO_GENERATION
    rack: str = ""
    instance_id: str | None = None

    @property
    def rank(self) -> tuple[bool, str]:
        """Static members first and by their own name, so that a restart changes nothing."""
        return (self.instance_id is None, self.instance_id or self.member_id)


def ranked(members: Iterable[Participant]) -> list[Participant]:
    return sorted(members, key=lambda member: member.rank)


def subscribers(members: Iterable[Participant], topic: str) -> list[Participant]:
    """Those who ask for a topic, in order of rank."""
    return ranked(member for member in members if topic in member.topics)


def no_shares(members: Iterable[Participant]) -> Shares:
    return {member.member_id: [] for member in members}


def share_in_runs(places: Sequence[TopicPartition], members: Sequence[Participant], shares: Shares) -> None:
    """Add runs as equal as can be; those who have least get what is left over."""
    size, extra = divmod(len(places), len(members))
    least = sorted(members, key=lambda member: len(shares[member.member_id]))
    favoured = {member.member_id for member in least[:extra]}
    first = 0
    for member in members:
        end = first + size + (member.member_id in favoured)
        shares[member.member_id] += places[first:end]
        first = end


def share_by_load(places: Iterable[TopicPartition], members: Sequence[Participant], shares: Shares) -> None:
    """Add one at a time to whoever has least."""
    for place in places:
        least = min(members, key=lambda member: len(shares[member.member_id]))
        shares[least.member_id].append(place)


def assign_average(members: Sequence[Participant], topics: Rooms) -> Shares:
    """Each topic's partitions in order, cut into runs as equal as can be; the extra ones go to those who have least so
    far, so that many small topics are shared fairly too. Members beyond the number of partitions stay idle until one is
    free.
    """
    shares = no_shares(members)
    for topic, rooms in sorted(topics.items()):
        readers = subscribers(members, topic)
        if readers:
            share_in_runs([(topic, number) for number in range(len(rooms))], readers, shares)
    return shares


def assign_range(members: Sequence[Participant], topics: Rooms) -> Shares:
    """As other clients have it: the first members get the extra partitions of every topic."""
    counts = {topic: len(rooms) for topic, rooms in topics.items()}
    ranges = assign_ranges({member.member_id: member.topics for member in members}, counts)
    return {member_id: places_of(assignment) for member_id, assignment in ranges.items()}


def assign_room_first(members: Sequence[Participant], topics: Rooms) -> Shares:
    """Machine room first: a partition goes to members in the rack of its leader; what is left goes to those with least.

    Partitions are left over where nobody who reads the topic is in their room. A member that does not say its rack is
    in no room: it gets of what is left over alone.
    """
    shares = no_shares(members)
    left_over: list[TopicPartition] = []
    for topic, rooms in sorted(topics.items()):
        readers = subscribers(members, topic)
        for room in sorted(set(rooms)):
            here = [(topic, number) for number, leader_room in enumerate(rooms) if leader_room == room]
            neighbours = [member for member in readers if room and member.rack == room]
            if neighbours:
                share_in_runs(here, neighbours, shares)
            else:
                left_over += here
    for topic, number in left_over:
        readers = subscribers(members, topic)
        if readers:
            share_by_load([(topic, number)], readers, shares)
    return shares


MOST_OF_AVERAGE: Final = 1.25


def assign_by_ring(members: Sequence[Participant], topics: Rooms) -> Shares:
    """Consistent hash: members and partitions are points on a ring; a partition goes to the next member clockwise.

    When one of n members comes or goes, about 1/n of the partitions move, whoever leads and without anybody
    remembering. A ring alone would load some members twice as much as others: of each topic a member takes at most a
    quarter more than its average, and what is beyond that goes on to the next on the ring. A member is on the ring by
    its instance name if it has one, so a static member that restarts is where it was.
    """
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


def assign_sticky(members: Sequence[Participant], topics: Rooms) -> Shares:
    """Cooperative sticky (KIP-429): as even as can be with as few moves as can be, and no partition with two owners.

    First a plan: whoever holds a partition keeps it; those that nobody holds go to whoever has least; then single
    partitions move from the most to the least loaded while that makes the two more even. Then the step that can be
    taken now: a partition that another member still holds is given to nobody. Its holder sees that it is gone, gives it
    up and joins again; in the rebalance that follows it is free. A partition that two members claim is held by the one
    of the later generation; claimed by two of the same generation it is given to nobody, so that both give it up.
    """
    holders = _holders(members)
    planned = plan(members, topics, holders)
    return {
        member_id: [place for place in places if holders.get(place, member_id) == member_id]
        for member_id, places in planned.items()
    }


def plan(members: Sequence[Participant], topics: Rooms, holders: Mapping[TopicPartition, str | None]) -> Shares:
    """Where everything should end up, whoever holds it now."""
    by_id = {member.member_id: member for member in members}
    readers = {topic: subscribers(members, topic) for topic in topics}
    shares = no_shares(members)
    free: list[TopicPartition] = []
    for topic, rooms in sorted(topics.items()):
        for number in range(len(rooms)):
            holder = by_id.get(holders.get((topic, number)) or "")
            if holder is not None and topic in holder.topics:
                shares[holder.member_id].append((topic, number))
            elif readers[topic]:
                free.append((topic, number))
    # Topics that few members read come first: the others can still make up for it.
    for place in sorted(free, key=lambda place: (len(readers[place[0]]), place)):
        share_by_load([place], readers[place[0]], shares)
    while _move_one(ranked(members), shares, holders):
        pass
    return shares


def _holders(members: Sequence[Participant]) -> dict[TopicPartition, str | None]:
    """Who holds what by their own word; None where two have an equal claim."""
    claims: dict[TopicPartition, list[Participant]] = {}
    for member in members:
        for place in member.owned:
            claims.setdefault(place, []).append(member)
    holders: dict[TopicPartition, str | None] = {}
    for place, claimants in claims.items():
        latest = max(member.generation for member in claimants)
        last = [member.member_id for member in claimants if member.generation == latest]
        holders[place] = last[0] if len(last) == 1 else None
    return holders


def _move_one(members: Sequence[Participant], shares: Shares, holders: Mapping[TopicPartition, str | None]) -> bool:
    """Move a partition from one who has most to one who has at least two less; False when nothing can get more even.

    Each move makes the sum of squares of the loads smaller, so there is an end to them.
    """
    by_load = sorted(members, key=lambda member: len(shares[member.member_id]))
    for taker in by_load:
        for giver in reversed(by_load):
            given, taken = shares[giver.member_id], shares[taker.member_id]
            if len(given) - len(taken) < 2:
                break
            suitable = [place for place in given if place[0] in taker.topics]
            if suitable:
                # One that the giver does not hold yet costs nothing.
                chosen = min(suitable, key=lambda place: (holders.get(place) == giver.member_id, -place[1], place[0]))
                given.remove(chosen)
                taken.append(chosen)
                return True
    return False


ROOM_FIRST: Final = "headrace-room-first"

Assign = Callable[[Sequence[Participant], Rooms], Shares]


@dataclass(frozen=True, slots=True)
class Assignor:
    protocols: dict[str, Assign]
    """By name, in order of preference."""
    step_by_step: bool = False
    """Members keep what they have while the group rebalances, and give up only what moves (KIP-429)."""


ASSIGNORS: Final = {
    "average": Assignor({"headrace-average": assign_average, RANGE: assign_range}),
    "room-first": Assignor({ROOM_FIRST: assign_room_first, RANGE: assign_range}),
    "consistent-hash": Assignor({"headrace-consistent-hash": assign_by_ring, RANGE: assign_range}),
    RANGE: Assignor({RANGE: assign_range}),
    "cooperative": Assignor({"cooperative-sticky": assign_sticky}, step_by_step=True),
}


def assignor_named(name: str) -> Assignor:
    if name not in ASSIGNORS:
        raise SettingError(f"there is no assignor {name!r}; choose one of {', '.join(ASSIGNORS)}")
    return ASSIGNORS[name]
