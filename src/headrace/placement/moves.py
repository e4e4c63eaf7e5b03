"""The steps of moving a partition to other brokers. Pure: a PartitionState in, the next one out.

While `target` is set, `replicas` holds the old brokers and the new ones, so every broker that may hold the only copy of
a record stays a replica. When all of the target are in the in-sync set, the replicas become the target: a partition
never changes broker without its data. Both facts are in the partition's key, so whoever is controller goes on where the
last one stopped. While a partition has no leader it is open which replica holds the most, so none is taken away.

The leader epoch is raised when the leader changes, and when a broker is taken from the replicas, and only then. Such a
broker deletes its log, and may be added again before its leader, or the broker itself, has heard that it was away: what
it told in the earlier epoch counts for nothing, and it has to subscribe to the new one (Kafka does the same).

What ends, cancels or replaces a move takes brokers out of the in-sync set that hold everything. It does so only if a
majority of the replicas that then remain is in the set and live: or else all that is acknowledged could be left to one
broker, and to one that is dead. Until then a move waits, a cancelling is refused, and what replaces a move keeps them.

`live` are the members that may lead: registered, with the incarnation that the in-sync set has (`live_members`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from headrace.cluster.image import LIVE, NO_LEADER, Broker, PartitionState
from headrace.errors import InvalidAssignment, InvalidRequest


def goal(state: PartitionState) -> tuple[int, ...]:
    """Where the replicas are, or will be when the move under way has ended."""
    return state.target or state.replicas


def live_members(state: PartitionState, brokers: Mapping[int, Broker]) -> frozenset[int]:
    """Those of the in-sync set that are there in the incarnation that it has, and stay."""
    there = {broker.id: broker.incarnation for broker in brokers.values() if broker.state == LIVE}
    return frozenset(member for member in state.isr if there.get(member) == state.incarnations.get(member, ""))


def begin_move(state: PartitionState, target: Sequence[int], live: Collection[int] | None = None) -> PartitionState:
    """The move to `target` begun, in place of one that may be under way. A new order of the same brokers needs no
    data and is there at once.
    """
    target = tuple(target)
    if not target or len(set(target)) != len(target):
        raise InvalidAssignment(f"a partition needs brokers that differ, at least one: {list(target)}")
    settled = _settled(state)
    if set(target) == set(settled):
        return cancel_move(replace(state, replicas=(*target, *state.adding)), live)
    adding = _without(target, settled)
    kept = _with_data((*settled, *adding), settled, state, live)
    begun = replace(
        state,
        replicas=kept,
        isr=_within(state.isr, kept),
        target=target,
        adding=_without(kept, settled),
    )
    return _in_new_epoch(begun, state)


def can_finish_move(state: PartitionState) -> bool:
    """All of the target hold everything, and somebody leads."""
    return bool(state.target) and state.leader != NO_LEADER and set(state.target) <= set(state.isr)


def finish_move(state: PartitionState, live: Collection[int]) -> PartitionState:
    """The replicas switched to the target. The leader stays if it is one of them; else the first live one leads. While
    too few of them are live the move waits, and the state itself is answered.
    """
    if not can_finish_move(state):
        raise InvalidRequest(
            f"partition {state.index}: the move to {list(state.target)} ends when all of these are in sync with a "
            f"leader; in sync are {list(state.isr)}, the leader is {state.leader}"
        )
    if not _enough(state.target, state, live):
        return state
    moved = replace(state, replicas=state.target, isr=_within(state.isr, state.target), target=(), adding=())
    if state.leader not in state.target or state.leader not in live:
        moved = _led_by_first(moved, live)
    return _in_new_epoch(moved, state)


def cancel_move(state: PartitionState, live: Collection[int] | None = None) -> PartitionState:
    """The replicas as they were before the move. Refused when too few of them are in sync (and live, where that is
    given): those that the move has added may hold what nobody else has.
    """
    settled = _settled(state)
    isr = _within(state.isr, settled)
    able = [broker for broker in isr if live is None or broker in live]
    added = _within(state.isr, state.adding)
    if state.adding and (state.leader == NO_LEADER or (added and not _enough(settled, state, live))):
        raise InvalidRequest(
            f"partition {state.index}: of brokers {list(settled)} only {able} are in sync and able to lead, so the "
            f"move to {list(state.target)} cannot be cancelled: let it end, or wait until more of them have caught up"
        )
    back = replace(state, replicas=settled, isr=isr, target=(), adding=())
    return _in_new_epoch(_led_by_first(back, live) if state.leader in state.adding else back, state)


def lead(state: PartitionState, broker: int) -> PartitionState:
    """The partition led by another member of the in-sync set."""
    assert broker in state.isr, (broker, state)
    return state if state.leader == broker else replace(state, leader=broker, leader_epoch=state.leader_epoch + 1)


def _led_by_first(state: PartitionState, live: Collection[int] | None) -> PartitionState:
    able = (broker for broker in state.replicas if broker in state.isr and (live is None or broker in live))
    return lead(state, next(able))


def _in_new_epoch(after: PartitionState, before: PartitionState) -> PartitionState:
    """After a broker was taken from the replicas, if a new leader has not raised the epoch anyway."""
    taken_away = _without(before.replicas, after.replicas)
    raised = bool(taken_away) and after.leader_epoch == before.leader_epoch
    return replace(after, leader_epoch=after.leader_epoch + raised)


def _settled(state: PartitionState) -> tuple[int, ...]:
    return _without(state.replicas, state.adding)


def _with_data(
    replicas: tuple[int, ...], settled: tuple[int, ...], state: PartitionState, live: Collection[int] | None
) -> tuple[int, ...]:
    """With all of an earlier move's brokers if one of them leads or too few of the others are in sync. Those of the
    new move count if they are.
    """
    added = _within(state.isr, _without(state.adding, replicas))
    among = (*settled, *_within(state.isr, _without(replicas, settled)))
    if state.leader in replicas and (not added or _enough(among, state, live)):
        return replicas
    return (*replicas, *_without(state.adding, replicas))


def _enough(replicas: Collection[int], state: PartitionState, live: Collection[int] | None) -> bool:
    """Whether a majority of these replicas is in sync and live."""
    able = [broker for broker in replicas if broker in state.isr and (live is None or broker in live)]
    return 2 * len(able) > len(replicas)


def _within(brokers: Iterable[int], among: Collection[int]) -> tuple[int, ...]:
    return tuple(broker for broker in brokers if broker in among)


def _without(brokers: Iterable[int], others: Collection[int]) -> tuple[int, ...]:
    return tuple(broker for broker in brokers if broker not in others)
