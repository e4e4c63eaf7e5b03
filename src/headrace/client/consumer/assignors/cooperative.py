"""Cooperative sticky (KIP-429): as even as can be with as few moves as can be, and no partition with two owners.

First a plan: whoever holds a partition keeps it; those that nobody holds go to whoever has least; then single
partitions move from the most to the least loaded while that makes the two more even. Then the step that can be taken
now: a partition that another member still holds is given to nobody. Its holder sees that it is gone, gives it up and
joins again; in the rebalance that follows it is free. A partition that two members claim is held by the one of the
later generation; claimed by two of the same generation it is given to nobody, so that both give it up. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.client.consumer.assignors.participants import (
    Participant,
    Rooms,
    Shares,
    no_shares,
    ranked,
    share_by_load,
    subscribers,
)
from headrace.client.consumer.group_protocol import Place


def assign_sticky(members: Sequence[Participant], topics: Rooms) -> Shares:
    holders = _holders(members)
    planned = plan(members, topics, holders)
    return {
        member_id: [place for place in places if holders.get(place, member_id) == member_id]
        for member_id, places in planned.items()
    }


def plan(members: Sequence[Participant], topics: Rooms, holders: Mapping[Place, str | None]) -> Shares:
    """Where everything should end up, whoever holds it now."""
    by_id = {member.member_id: member for member in members}
    readers = {topic: subscribers(members, topic) for topic in topics}
    shares = no_shares(members)
    free: list[Place] = []
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


def _holders(members: Sequence[Participant]) -> dict[Place, str | None]:
    """Who holds what by their own word; None where two have an equal claim."""
    claims: dict[Place, list[Participant]] = {}
    for member in members:
        for place in member.owned:
            claims.setdefault(place, []).append(member)
    holders: dict[Place, str | None] = {}
    for place, claimants in claims.items():
        latest = max(member.generation for member in claimants)
        last = [member.member_id for member in claimants if member.generation == latest]
        holders[place] = last[0] if len(last) == 1 else None
    return holders


def _move_one(members: Sequence[Participant], shares: Shares, holders: Mapping[Place, str | None]) -> bool:
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
