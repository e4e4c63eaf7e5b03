"""Faults in several steps, each course aimed at one moment of replication that faults at random times hardly ever meet.

A course is a generator. It yields a time to wait, or a condition to wait for; a condition that does not come true in
time ends it. What it does to machines and links ends by itself, like any fault. None of them may cost anything: they
only kill what can be spared, and take power only where that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from headrace.simulator.harm import Harm
from headrace.simulator.machine import Machine
from headrace.storage.log import TopicPartition

Course = Iterator[float | Callable[[], bool]]


@dataclass(frozen=True, slots=True)
class Cast:
    where: TopicPartition
    leader: Machine
    follower: Machine
    third: Machine


def drop_follower_unseen(harm: Harm, cast: Cast) -> Course:
    """A leader wants a silent follower out of the set and is cut off from coordination before that is done. The
    follower, still a member, may lead next."""
    patience = harm.random.uniform(0.1, 0.9) * harm.lease_seconds
    harm.cut(cast.leader, cast.follower, harm.lag_seconds + 3 * harm.lease_seconds)
    yield max(0.0, harm.lag_seconds - patience)
    harm.cut_off(cast.leader, patience + 2 * harm.lease_seconds)


def cut_longer_follower(harm: Harm, cast: Cast) -> Course:
    """A member that got more than the next leader has to cut, and that leader dies when it has."""
    harm.cut_one_way(cast.leader, cast.third, harm.random.uniform(1.0, 3.0))
    yield harm.random.uniform(0.02, 0.2)
    end = _end(cast.follower, cast.where)
    harm.kill(cast.leader, harm.random.uniform(2.0, 5.0))
    yield lambda: _leads(harm, cast.third, cast.where)
    yield lambda: 0 <= _end(cast.follower, cast.where) < end
    yield harm.random.choice((0.0, harm.random.uniform(0, 0.01)))
    harm.kill(cast.third, harm.random.uniform(1.0, 3.0))


def return_with_less(harm: Harm, cast: Cast) -> Course:
    """A follower comes back with less than it had told. No producer moves the watermark meanwhile, the records for the
    follower are held up, and the others die if it joins all the same."""
    harm.hush(cast.leader, harm.lease_seconds + 3.0)
    yield harm.random.uniform(0, 0.1)
    harm.lose_what_may_be(cast.follower, harm.random.uniform(0.05, 0.5))
    if harm.random.random() < 0.5:
        harm.slow(cast.leader, cast.follower, harm.random.uniform(0.05, 0.25), 3.0)
    else:
        yield lambda: _is_followed_by(cast.leader, cast.follower, cast.where)
        harm.cut_one_way(cast.leader, cast.follower, 1.5)
    yield from _others_die_when_it_joins(harm, cast)


def return_to_a_forgetful_leader(harm: Harm, cast: Cast) -> Course:
    """A follower that has long been out of the set comes back while the leader, itself restarted, does not know yet
    how far the log was committed. What it tells and what it gets is long on its way, and the others die when it has
    joined."""
    harm.kill(cast.follower, 30.0)
    yield lambda: not _is_member(harm, cast.follower, cast.where)
    yield harm.random.uniform(0.2, 1.0)
    for machine in (cast.leader, cast.third):
        harm.kill(machine, harm.random.uniform(0, 0.3))
    for machine in (cast.leader, cast.third):
        harm.slow(machine, cast.follower, harm.random.uniform(0.05, 0.25), 5.0)
    yield harm.random.uniform(0, 0.3)
    cast.follower.start()
    yield from _others_die_when_it_joins(harm, cast)


def _others_die_when_it_joins(harm: Harm, cast: Cast) -> Course:
    yield lambda: _has_joined(harm, cast.follower, cast.where)
    yield harm.random.choice((0.0, 0.0, harm.random.uniform(0, 0.02)))
    for machine in (cast.leader, cast.third):
        if machine.up:
            harm.reset(machine, cast.follower)
            harm.kill(machine, harm.random.uniform(1.0, 3.0))


COURSES: Final[dict[str, Callable[[Harm, Cast], Course]]] = {
    "drop follower unseen": drop_follower_unseen,
    "cut longer follower": cut_longer_follower,
    "return with less": return_with_less,
    "return to a forgetful leader": return_to_a_forgetful_leader,
}
OF_PAGE_CACHES: Final = frozenset({"return with less"})
"""Those that mean topics which count what is only written."""


def _leads(harm: Harm, machine: Machine, where: TopicPartition) -> bool:
    state = harm.state_of(where)
    return state is not None and state.leader == machine.id


def _is_member(harm: Harm, machine: Machine, where: TopicPartition) -> bool:
    state = harm.state_of(where)
    return state is not None and machine.id in state.isr


def _has_joined(harm: Harm, machine: Machine, where: TopicPartition) -> bool:
    """In the life that it lives now."""
    state = harm.state_of(where)
    participant = machine.participant
    return (
        state is not None and participant is not None and state.incarnations.get(machine.id) == participant.incarnation
    )


def _end(machine: Machine, where: TopicPartition) -> int:
    participant = machine.participant
    partition = None if participant is None else participant.partitions.find_replica(where.topic, where.partition)
    return -1 if partition is None else partition.log.end_offset


def _is_followed_by(leader: Machine, follower: Machine, where: TopicPartition) -> bool:
    """Whether the leader has answered the follower in the life that this one lives now."""
    if leader.participant is None or follower.participant is None:
        return False
    partition = leader.participant.partitions.find_replica(where.topic, where.partition)
    if partition is None or partition.core is None:
        return False
    progress = partition.core.followers.get(follower.id)
    return progress is not None and progress.incarnation == follower.participant.incarnation
