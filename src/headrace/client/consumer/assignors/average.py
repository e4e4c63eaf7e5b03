"""Average: each topic's partitions in order, cut into runs as equal as can be. Pure.

`range` is the same as other clients have it: the first members get the extra partitions of every topic. `average`
gives them to those who have least so far, so that many small topics are shared fairly too. Members beyond the number
of partitions stay idle until one is free.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.client.consumer.assignors.participants import (
    Participant,
    Rooms,
    Shares,
    no_shares,
    share_in_runs,
    subscribers,
)
from headrace.client.consumer.group_protocol import assign_ranges, places_of


def assign_average(members: Sequence[Participant], topics: Rooms) -> Shares:
    shares = no_shares(members)
    for topic, rooms in sorted(topics.items()):
        readers = subscribers(members, topic)
        if readers:
            share_in_runs([(topic, number) for number in range(len(rooms))], readers, shares)
    return shares


def assign_range(members: Sequence[Participant], topics: Rooms) -> Shares:
    counts = {topic: len(rooms) for topic, rooms in topics.items()}
    ranges = assign_ranges({member.member_id: member.topics for member in members}, counts)
    return {member_id: places_of(assignment) for member_id, assignment in ranges.items()}
