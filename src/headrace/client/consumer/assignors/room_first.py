"""Machine room first: a partition goes to members in the rack of its leader; what is left goes to those with least.

Partitions are left over where nobody who reads the topic is in their room. A member that does not say its rack is in
no room: it gets of what is left over alone. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.client.consumer.assignors.participants import (
    Participant,
    Rooms,
    Shares,
    no_shares,
    share_by_load,
    share_in_runs,
    subscribers,
)
from headrace.client.consumer.group_protocol import Place


def assign_room_first(members: Sequence[Participant], topics: Rooms) -> Shares:
    shares = no_shares(members)
    left_over: list[Place] = []
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
