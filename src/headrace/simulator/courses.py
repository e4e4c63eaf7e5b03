"""Faults in several steps, each course aimed at one moment of replication that faults at random times hardly ever meet.

A course is a generator. It yields a time to wait, or a condition to wait for; a condition that does not come true in
time ends it. What it does to machines and links ends by itself, like any fault. None of them may cost anything: they
only kill what can be spared, and take power only where that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from headrace.partitions.leader_core import FollowerState
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


Script = Callable[[Harm, Cast], Course]


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
    yield lambda: not is_member(harm, cast.follower, cast.where)
    yield harm.random.uniform(0.2, 1.0)
    for machine in (cast.leader, cast.third):
        harm.kill(machine, harm.random.uniform(0, 0.3))
    for machine in (cast.leader, cast.third):
        harm.slow(machine, cast.follower, harm.random.uniform(0.05, 0.25), 5.0)
    yield harm.random.uniform(0, 0.3)
    cast.follower.start()
    yield from _others_die_when_it_joins(harm, cast)


def _others_die_when_it_joins(harm: Harm, cast: Cast) -> Course:
    yield lambda: has_joined(harm, cast.follower, cast.where)
    yield harm.random.choice((0.0, 0.0, harm.random.uniform(0, 0.02)))
    for machine in (cast.leader, cast.third):
        if machine.up:
            harm.reset(machine, cast.follower)
            harm.kill(machine, harm.random.uniform(1.0, 3.0))


def restart_twice_unseen(harm: Harm, cast: Cast) -> Course:
    """A follower loses its page cache and is started twice before the controller looks at it: what its last process
    says of the one before is true, and says nothing of the member of the set. The others die if it is one again."""
    controller = harm.controller()
    if controller is None or controller is cast.follower:
        return
    for machine in {controller.id: controller, cast.leader.id: cast.leader}.values():
        harm.cut_off(machine, 0.9 * harm.lease_seconds)
    first = harm.registered(cast.follower)
    harm.lose_what_may_be(cast.follower, 0.01)
    yield lambda: harm.registered(cast.follower) not in (first, "")
    second = harm.registered(cast.follower)
    harm.kill(cast.follower, 0.01)
    yield lambda: harm.registered(cast.follower) not in (second, "")
    yield from _others_die_when_it_joins(harm, cast)


def lose_power_after_join(harm: Harm, cast: Cast) -> Course:
    """A follower that was out of the set comes in again while its sync is behind."""
    harm.kill(cast.follower, 30.0)
    yield lambda: not is_member(harm, cast.follower, cast.where)
    yield harm.random.uniform(0.1, 0.5)
    harm.slow_disk(cast.follower, harm.random.uniform(0.3, 1.0), 4.0)
    cast.follower.start()
    yield lambda: has_joined(harm, cast.follower, cast.where)
    yield from _all_lose_power(harm, cast.follower)


def lose_power_after_cut(harm: Harm, cast: Cast) -> Course:
    """A member that got more than the next leader has to cut while it syncs what it cuts, and takes new records before
    that sync has come back."""
    cast = _in_line(harm, cast)
    harm.slow_disk(cast.follower, 2 * harm.lease_seconds + harm.random.uniform(0.4, 1.0), 6.0)
    harm.cut_one_way(cast.leader, cast.third, 2.0)
    yield lambda: _end(cast.follower, cast.where) > _end(cast.third, cast.where) >= 0
    yield harm.random.uniform(0.0, 0.2)
    end = _end(cast.follower, cast.where)
    harm.kill(cast.leader, 6.0)
    yield lambda: _leads(harm, cast.third, cast.where)
    yield lambda: 0 <= _end(cast.follower, cast.where) < end
    cut = _end(cast.follower, cast.where)
    yield lambda: _durable(cast.follower, cast.where) > cut and _watermark(cast.third, cast.where) > cut
    yield from _all_lose_power(harm, cast.follower)


def lose_power_after_resubscription(harm: Harm, cast: Cast) -> Course:
    """A follower whose sync is behind loses its link and tells its position anew."""
    harm.slow_disk(cast.follower, harm.random.uniform(0.8, 2.0), 4.0)
    yield lambda: _durable(cast.follower, cast.where) < _end(cast.follower, cast.where)
    before = _follower_state(cast.leader, cast.follower, cast.where)
    harm.reset(cast.leader, cast.follower)

    def has_told() -> bool:
        state = _follower_state(cast.leader, cast.follower, cast.where)
        return state is not None and state is not before and state.flushed >= 0

    yield has_told
    yield from _all_lose_power(harm, cast.follower)


def lose_power_after_commit(harm: Harm, cast: Cast) -> Course:
    """The watermark rises while the sync of one member is slow."""
    harm.slow_disk(cast.follower, harm.random.uniform(0.2, 1.0), 4.0)
    yield harm.random.uniform(0, 0.3)
    before = _watermark(cast.leader, cast.where)
    yield lambda: _watermark(cast.leader, cast.where) > before
    yield from _all_lose_power(harm, cast.follower)


def _all_lose_power(harm: Harm, first: Machine) -> Course:
    """Whose sync was behind is back first and may lead; the others come when it does."""
    yield harm.random.choice((0.0, 0.0, harm.random.uniform(0, 0.02)))
    for machine in harm.machines:
        seconds = 0.05 if machine is first else 2 * harm.lease_seconds + harm.random.uniform(0.3, 1.0)
        harm.cut_power(machine, seconds)
    yield 2 * harm.lease_seconds + 1.0


OF_PAGE_CACHES: Final[dict[str, Script]] = {
    "return with less": return_with_less,
    "restart twice unseen": restart_twice_unseen,
}
"""Those that mean topics which count what is only written."""
OF_POWER: Final[dict[str, Script]] = {
    "lose power after join": lose_power_after_join,
    "lose power after cut": lose_power_after_cut,
    "lose power after resubscription": lose_power_after_resubscription,
    "lose power after commit": lose_power_after_commit,
}
"""Those in which all lose power while one sync is behind; they mean topics which count what is synced."""
COURSES: Final[dict[str, Script]] = {
    "drop follower unseen": drop_follower_unseen,
    "cut longer follower": cut_longer_follower,
    "return to a forgetful leader": return_to_a_forgetful_leader,
    **OF_PAGE_CACHES,
    **OF_POWER,
}


def _in_line(harm: Harm, cast: Cast) -> Cast:
    """The third is elected before the follower."""
    state = harm.state_of(cast.where)
    if state is None or state.replicas.index(cast.third.id) < state.replicas.index(cast.follower.id):
        return cast
    return Cast(cast.where, cast.leader, cast.third, cast.follower)


def _leads(harm: Harm, machine: Machine, where: TopicPartition) -> bool:
    state = harm.state_of(where)
    return state is not None and state.leader == machine.id


def is_member(harm: Harm, machine: Machine, where: TopicPartition) -> bool:
    state = harm.state_of(where)
    return state is not None and machine.id in state.isr


def has_joined(harm: Harm, machine: Machine, where: TopicPartition) -> bool:
    """In the life that it lives now."""
    state = harm.state_of(where)
    participant = machine.participant
    return (
        state is not None and participant is not None and state.incarnations.get(machine.id) == participant.incarnation
    )


def _end(machine: Machine, where: TopicPartition) -> int:
    partition = machine.replica(where)
    return -1 if partition is None else partition.log.end_offset


def _durable(machine: Machine, where: TopicPartition) -> int:
    partition = machine.replica(where)
    return -1 if partition is None else partition.log.durable_offset


def _watermark(machine: Machine, where: TopicPartition) -> int:
    partition = machine.replica(where)
    return -1 if partition is None else partition.high_watermark


def _follower_state(leader: Machine, follower: Machine, where: TopicPartition) -> FollowerState | None:
    partition = leader.replica(where)
    return None if partition is None or partition.core is None else partition.core.followers.get(follower.id)


def _is_followed_by(leader: Machine, follower: Machine, where: TopicPartition) -> bool:
    """Whether the leader has answered the follower in the life that this one lives now."""
    state = _follower_state(leader, follower, where)
    return (
        state is not None and follower.participant is not None and state.incarnation == follower.participant.incarnation
    )
