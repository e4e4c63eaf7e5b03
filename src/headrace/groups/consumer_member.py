"""One member of a group of the consumer protocol, and how what it holds comes to what it shall hold. No I/O.

A member goes to the target assignment in steps that its heartbeats drive. It is first told to give up what is not its
own any more (UNREVOKED_PARTITIONS, in its old epoch), and gets what it is to have when it said that it did; of that, no
partition that another member still holds (UNRELEASED_PARTITIONS, in the epoch of the target). So a partition has one
owner at any time, and nobody waits for the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from headrace.coordinators.alarms import NEVER
from headrace.groups.assignors import NOTHING, Assignment, by_topic, partitions_of
from headrace.groups.consumer_records import CurrentAssignment, MemberState, MemberSubscription


@dataclass(slots=True, eq=False)
class ConsumerMember:
    member_id: str
    subscription: MemberSubscription = field(default_factory=MemberSubscription)
    current: CurrentAssignment = field(default_factory=CurrentAssignment)
    deadline: float = NEVER
    """When its session ends."""
    rebalance_deadline: float = NEVER
    """Until when it must have revoked; one that speaks the classic protocol, joined or asked for its assignment."""
    write: int = 0
    """The group's write that has the last change of it."""

    @property
    def is_classic(self) -> bool:
        return self.subscription.classic is not None

    def is_reconciled(self, target_epoch: int) -> bool:
        return self.current.state is MemberState.STABLE and self.current.epoch == target_epoch


def owns_any(owned: Assignment | None, of: Assignment) -> bool:
    """Whether a member that says it owns this owns any of that; one that says nothing may own all."""
    if owned is None:
        return True
    return any(not of[topic].isdisjoint(indexes) for topic, indexes in owned.items() if topic in of)


def is_within(owned: Assignment | None, of: Assignment) -> bool:
    if owned is None:
        return False
    return all(indexes <= of.get(topic, frozenset()) for topic, indexes in owned.items())


def reconciled(
    current: CurrentAssignment,
    target: Assignment,
    target_epoch: int,
    owned: Assignment | None,
    is_free: Callable[[bytes, int], bool],
) -> CurrentAssignment:
    """The next step of a member that says that it owns these partitions; the same if there is none now."""
    if current.state is MemberState.STABLE:
        if current.epoch == target_epoch:
            return current
        return _step(current, current.epoch, target, target_epoch, owned, is_free)
    if current.state is MemberState.UNRELEASED_PARTITIONS:
        return _step(current, current.epoch, target, target_epoch, owned, is_free)
    if owns_any(owned, current.revoking):
        return current
    return _step(current, current.epoch + 1, target, target_epoch, owned, is_free)


def _step(
    current: CurrentAssignment,
    epoch: int,
    target: Assignment,
    target_epoch: int,
    owned: Assignment | None,
    is_free: Callable[[bytes, int], bool],
) -> CurrentAssignment:
    kept = {topic: indexes & target.get(topic, frozenset()) for topic, indexes in current.assigned.items()}
    revoking = {topic: indexes - kept[topic] for topic, indexes in current.assigned.items()}
    revoking = {topic: indexes for topic, indexes in revoking.items() if indexes}
    if revoking and owns_any(owned, revoking):
        kept = {topic: indexes for topic, indexes in kept.items() if indexes}
        return _in_epoch(current, epoch, MemberState.UNREVOKED_PARTITIONS, kept, revoking)
    wanted = [place for place in partitions_of(target) if place[1] not in kept.get(place[0], ())]
    given = [place for place in wanted if is_free(*place)]
    state = MemberState.STABLE if len(given) == len(wanted) else MemberState.UNRELEASED_PARTITIONS
    assigned = by_topic([*partitions_of(kept), *given]) if state is not MemberState.STABLE else target
    return _in_epoch(current, target_epoch, state, assigned, NOTHING)


def _in_epoch(
    current: CurrentAssignment, epoch: int, state: MemberState, assigned: Assignment, revoking: Assignment
) -> CurrentAssignment:
    previous = current.previous_epoch if epoch == current.epoch else current.epoch
    found = replace(
        current, epoch=epoch, previous_epoch=previous, state=state, assigned=assigned, revoking=revoking
    )  # fmt: skip
    return current if found == current else found
