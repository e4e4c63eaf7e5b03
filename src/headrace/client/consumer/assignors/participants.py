"""What an assignor is given, and what it gives: members, topics with the rooms of their partitions, shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.client.consumer.group_protocol import NO_GENERATION, Place

Rooms = Mapping[str, Sequence[str]]
"""Topic to the rack of each partition's leader, in order of partitions; "" where that is not known."""
Shares = dict[str, list[Place]]
"""Member id to what it is to read; every member is in it."""


@dataclass(frozen=True, slots=True)
class Participant:
    """A member as the one that leads sees it."""

    member_id: str
    topics: frozenset[str]
    owned: frozenset[Place] = frozenset()
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


def share_in_runs(places: Sequence[Place], members: Sequence[Participant], shares: Shares) -> None:
    """Add runs as equal as can be; those who have least get what is left over."""
    size, extra = divmod(len(places), len(members))
    least = sorted(members, key=lambda member: len(shares[member.member_id]))
    favoured = {member.member_id for member in least[:extra]}
    first = 0
    for member in members:
        end = first + size + (member.member_id in favoured)
        shares[member.member_id] += places[first:end]
        first = end


def share_by_load(places: Iterable[Place], members: Sequence[Participant], shares: Shares) -> None:
    """Add one at a time to whoever has least."""
    for place in places:
        least = min(members, key=lambda member: len(shares[member.member_id]))
        shares[least.member_id].append(place)
