"""Courses (see `courses`) around the moments at which replicas are added and taken away.

`spare` is the broker that has no replica of the partition when a course begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.simulator.courses import Cast, Course, has_joined, is_member
from headrace.simulator.harm import ANY, Harm
from headrace.simulator.machine import Machine
from headrace.storage.log import TopicPartition

MoveScript = Callable[[Harm, Cast, Machine], Course]


def lose_the_others_after_move(harm: Harm, cast: Cast, spare: Machine) -> Course:
    """A move ends, and the broker that it brought in is all that is left for a while."""
    harm.order_move(cast.where, (cast.leader.id, cast.third.id, spare.id))
    yield lambda: _has_moved(harm, cast.where, spare)
    yield harm.random.choice((0.0, 0.0, harm.random.uniform(0, 0.05)))
    if harm.regime == ANY:
        for machine in harm.machines:
            harm.cut_power(machine, 0.05 if machine is spare else 2 * harm.lease_seconds)
    else:
        for machine in (cast.leader, cast.third):
            harm.kill(machine, harm.random.uniform(1.0, 2.0))


def cancel_when_joined(harm: Harm, cast: Cast, spare: Machine) -> Course:
    """A move is cancelled as soon as its broker has come in, while another member is away; and the leader dies."""
    harm.kill(cast.follower, harm.random.uniform(0.5, 2.0))
    yield harm.random.uniform(0, harm.lease_seconds)
    harm.order_move(cast.where, (cast.leader.id, cast.third.id, spare.id))
    yield lambda: is_member(harm, spare, cast.where)
    harm.order_move(cast.where, None)
    yield harm.random.choice((0.0, harm.random.uniform(0, 0.1)))
    harm.kill(cast.leader, harm.random.uniform(0.5, 2.0))


def add_again_unseen_by_the_leader(harm: Harm, cast: Cast, spare: Machine) -> Course:
    """A broker is taken away and deletes its log, and is added again, while the leader sees nothing of it. No producer
    moves the watermark meanwhile."""
    harm.hush(cast.leader, harm.lease_seconds + 3.0)
    target = spare.id, cast.follower.id, cast.third.id
    harm.order_move(cast.where, target)
    yield lambda: is_member(harm, spare, cast.where)
    yield from _take_away_and_add(harm, cast, spare, cast.leader)


def add_again_unseen_by_itself(harm: Harm, cast: Cast, spare: Machine) -> Course:
    """A broker is taken away and added again, and hears of it when its leader has taken it in."""
    target = spare.id, cast.follower.id, cast.third.id
    harm.order_move(cast.where, target)
    yield lambda: is_member(harm, spare, cast.where)
    yield from _take_away_and_add(harm, cast, spare, spare)


def _take_away_and_add(harm: Harm, cast: Cast, spare: Machine, blind: Machine) -> Course:
    """Both orders while one of them hears nothing; the move then ends with the broker in the lead."""
    seconds = harm.random.uniform(0.1, 0.4) * harm.lease_seconds
    harm.cut_off(blind, seconds)
    harm.order_move(cast.where, None)
    if blind is not spare:
        harm.cut_one_way(spare, blind, seconds + 0.3)
        yield lambda: spare.replica(cast.where) is None
    harm.order_move(cast.where, (spare.id, cast.follower.id, cast.third.id))
    yield lambda: has_joined(harm, spare, cast.where)
    yield harm.random.choice((0.0, harm.random.uniform(0, 0.05)))
    harm.kill(cast.leader, harm.random.uniform(1.0, 2.0))


def kill_drained(harm: Harm, cast: Cast, spare: Machine) -> Course:
    """The leader is drained, and dies while its partition moves."""
    harm.drain(cast.leader, harm.random.uniform(1.0, 5.0))
    yield lambda: _is_moving(harm, cast.where)
    yield harm.random.choice((0.0, harm.random.uniform(0, 0.3)))
    harm.kill(cast.leader, harm.random.uniform(0.5, 3.0))
    yield harm.random.uniform(0.5, 2.0)


MOVE_COURSES: Final[dict[str, MoveScript]] = {
    "lose the others after move": lose_the_others_after_move,
    "cancel when joined": cancel_when_joined,
    "add again unseen by the leader": add_again_unseen_by_the_leader,
    "add again unseen by itself": add_again_unseen_by_itself,
    "kill drained": kill_drained,
}


def _is_moving(harm: Harm, where: TopicPartition) -> bool:
    state = harm.state_of(where)
    return state is not None and bool(state.target)


def _has_moved(harm: Harm, where: TopicPartition, spare: Machine) -> bool:
    state = harm.state_of(where)
    return state is not None and not state.target and spare.id in state.replicas
