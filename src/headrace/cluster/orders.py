"""What operators order of partitions: replicas moved elsewhere, moves cancelled, elections held. Pure plans.

A move is begun by writing its target into the partition's key, an election by a key of its own; the controller carries
both out (cluster.controller), however long that takes and whoever is controller by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from headrace.cluster import keys
from headrace.cluster.changes import Plan, Step, unchanged
from headrace.cluster.controller_state import PREFERRED, UNCLEAN
from headrace.cluster.image import NO_LEADER, Image, PartitionState, encode_partition
from headrace.errors import HeadraceError, InvalidAssignment, NoMoveUnderWay, UnknownPartition
from headrace.placement.moves import begin_move, cancel_move, live_members
from headrace.placement.plans import Where, move
from headrace.ports.coordination import Compare, Put

ORDERS_A_STEP: Final = 60

Targets = Mapping[Where, Sequence[int] | None]
"""Where the replicas of each partition shall be; None ends the move that is under way."""
Refusals = dict[Where, HeadraceError]


def moved(image: Image, where: Where, target: Sequence[int] | None, *, keep_count: bool = False) -> PartitionState:
    """The partition with the order taken; raises what refuses it. `keep_count` refuses another number of replicas."""
    state = image.partition(*where)
    if state is None:
        raise UnknownPartition(f"there is no partition {where[1]} of a topic {where[0]!r}")
    if target is None:
        if not state.target:
            raise NoMoveUnderWay(f"{where[0]}-{where[1]} is not being moved")
        return cancel_move(state, live_members(state, image.brokers))
    move(image, *where, target)
    settled = len(state.replicas) - len(state.adding)
    if keep_count and len(target) != settled:
        raise InvalidAssignment(
            f"{where[0]}-{where[1]} has {settled} replicas, and the order names {len(target)}: allow that change"
        )
    return begin_move(state, target, live_members(state, image.brokers))


def plan_moves(image: Image, targets: Targets, *, keep_count: bool, refusals: Refusals) -> Plan:
    """All orders that can be taken; the others are put into `refusals`."""
    refusals.clear()
    changes: list[tuple[Compare, Put]] = []
    for where, target in targets.items():
        try:
            after = moved(image, where, target, keep_count=keep_count)
        except HeadraceError as error:
            refusals[where] = error
            continue
        before = image.partition(*where)
        if before is not None and after != before:
            key = keys.partition_key(image.prefix, *where)
            put = Put(key, encode_partition(image.topics[where[0]].id, after))
            changes.append((unchanged(key, before.revision), put))
    return _in_steps(changes)


def plan_elections(image: Image, wanted: Collection[Where], kind: str) -> Plan:
    """Order an election for each; the partitions are there."""
    changes = []
    for where in wanted:
        key, state = keys.partition_key(image.prefix, *where), image.partition(*where)
        if state is not None:
            put = Put(keys.order_key(image.prefix, *where), keys.encode({"kind": kind}))
            changes.append((unchanged(key, state.revision), put))
    return _in_steps(changes)


def election_needed(state: PartitionState, kind: str) -> bool:
    if kind == UNCLEAN:
        return state.leader == NO_LEADER
    assert kind == PREFERRED
    return state.leader != state.replicas[0]


def carried_out(wanted: Mapping[Where, PartitionState]) -> Callable[[Image], bool]:
    """Whether every order has been answered: the key of the order is gone, or the partition has another epoch."""

    def answered(image: Image, where: Where, before: PartitionState) -> bool:
        now = image.partition(*where)
        return now is None or now.leader_epoch != before.leader_epoch or where not in image.controls.orders

    return lambda image: all(answered(image, where, before) for where, before in wanted.items())


def _in_steps(changes: Sequence[tuple[Compare, Put]]) -> Plan:
    parts = [changes[first : first + ORDERS_A_STEP] for first in range(0, len(changes), ORDERS_A_STEP)]
    return Plan(tuple(Step(tuple(c for c, _ in part), tuple(p for _, p in part)) for part in parts))
