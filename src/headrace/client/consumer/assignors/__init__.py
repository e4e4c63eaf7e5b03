"""Who reads what: the rules by which the member that leads a group shares out partitions. All pure.

An assignor is known to the group by its protocol names, best first. The broker takes one that every member offers, so
members with different eager assignors, and other clients with `range`, share a group by `range`. `cooperative` offers
`cooperative-sticky` alone, as other clients do: it goes with nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.client.consumer.assignors.average import assign_average, assign_range
from headrace.client.consumer.assignors.consistent_hash import assign_by_ring
from headrace.client.consumer.assignors.cooperative import assign_sticky
from headrace.client.consumer.assignors.participants import Participant, Rooms, Shares
from headrace.client.consumer.assignors.room_first import assign_room_first
from headrace.client.consumer.group_protocol import RANGE
from headrace.errors import SettingError

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
    "cooperative": Assignor({"cooperative-sticky": assign_sticky}, step_by_step=True),
}


def assignor_named(name: str) -> Assignor:
    if name not in ASSIGNORS:
        raise SettingError(f"there is no assignor {name!r}; choose one of {', '.join(ASSIGNORS)}")
    return ASSIGNORS[name]
