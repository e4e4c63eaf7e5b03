"""The steps of moving a partition to other brokers. Pure: a PartitionState in, the next one out.

While `target` is set, `replicas` holds the old brokers and the new ones, so every broker that may hold the only copy of
a record stays a replica. When all of the target are in the in-sync set, the replicas become the target: a partition
never changes broker without its data. Both facts are in the partition's key, so whoever is controller goes on where the
last one stopped. The leader epoch is raised when the leader changes, and only then. While a partition has no leader it
is open which replica holds the most, so none is taken away.

`live` are the brokers that may lead: registered, with the incarnation that the in-sync set has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from headrace.cluster.image import NO_LEADER, PartitionState
from headrace.errors import InvalidAssignment, InvalidRequest


def goal(state: PartitionState) -> tuple[int, ...]:
    """Where the replicas are, or will be when the move under way has ended."""
    return state.target or state.replicas


def begin_move(state: PartitionState, target: Sequence[int]) -> PartitionState:
    """The move to `target` begun, in place of one that may be under way. A new order of the same brokers needs no
    data and is there at once.
    """
    target = tuple(target)
    if not target or len(set(target)) != len(target):
        raise InvalidAssignment(f"a partition needs brokers that differ, at least one: {list(target)}")
    settled = _settled(state)
    if set(target) == set(settled):
        return cancel_move(replace(state, replicas=(*target, *state.adding)))
    adding = _without(target, settled)
    kept = _with_data((*settled, *adding), state)
    return replace(
        state,
        replicas=kept,
        isr=_within(state.isr, kept),
        target=target,
        adding=_without(kept, settled),
    )


def can_finish_move(state: PartitionState) -> bool:
    """All of the target hold everything, and somebody leads."""
    return bool(state.target) and state.leader != NO_LEADER and set(state.target) <= set(state.isr)


def finish_move(state: PartitionState, live: Collection[int]) -> PartitionState:
    """The replicas switched to the target. The leader stays if it is one of them; else the first live one leads. While
    none of them is live the move waits, and the state itself is answered.
    """
    if not can_finish_move(state):
        raise InvalidRequest(
            f"partition {state.index}: the move to {list(state.target)} ends when all of these are in sync with a "
            f"leader; in sync are {list(state.isr)}, the leader is {state.leader}"
        )
    if not any(broker in live for broker in state.target):
        return state
    moved = replace(state, replicas=state.target, isr=_within(state.isr, state.target), target=(), adding=())
    return moved if state.leader in state.target and state.leader in live else _led_by_first(moved, live)


def cancel_move(state: PartitionState, live: Collection[int] | None = None) -> PartitionState:
    """The replicas as they were before the move. Refused when none of them is in sync (and live, where that is given):
    those that the move has added may hold what nobody else has.
    """
    settled = _settled(state)
    isr = _within(state.isr, settled)
    able = state.leader != NO_LEADER and any(live is None or broker in live for broker in isr)
    if state.adding and not able:
        raise InvalidRequest(
            f"partition {state.index}: none of brokers {list(settled)} is in sync and able to lead, so the move to "
            f"{list(state.target)} cannot be cancelled: let it end, or wait until one of them has caught up"
        )
    back = replace(state, replicas=settled, isr=isr, target=(), adding=())
    return _led_by_first(back, live) if state.leader in state.adding else back


def lead(state: PartitionState, broker: int) -> PartitionState:
    """The partition led by another member of the in-sync set."""
    assert broker in state.isr, (broker, state)
    return state if state.leader == broker else replace(state, leader=broker, leader_epoch=state.leader_epoch + 1)


def _led_by_first(state: PartitionState, live: Collection[int] | None) -> PartitionState:
    able = (broker for broker in state.replicas if broker in state.isr and (live is None or broker in live))
    return lead(state, next(able))


def _settled(state: PartitionState) -> tuple[int, ...]:
    return _without(state.replicas, state.adding)


def _with_data(replicas: tuple[int, ...], state: PartitionState) -> tuple[int, ...]:
    """With all of an earlier move's brokers if one of them leads or none of the others is in sync."""
    if state.leader in replicas and any(broker in state.isr for broker in replicas):
        return replicas
    return (*replicas, *_without(state.adding, replicas))


def _within(brokers: Iterable[int], among: Collection[int]) -> tuple[int, ...]:
    return tuple(broker for broker in brokers if broker in among)


def _without(brokers: Iterable[int], others: Collection[int]) -> tuple[int, ...]:
    return tuple(broker for broker in brokers if broker not in others)
