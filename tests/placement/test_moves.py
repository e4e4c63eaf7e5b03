from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.image import NO_LEADER, PartitionState
from headrace.errors import InvalidAssignment, InvalidRequest
from headrace.placement.moves import begin_move, can_finish_move, cancel_move, finish_move, goal, lead
from hypotheses import examples
from proving import proves

properties = examples(60)

ALL = range(10)


def led(
    leader: int, replicas: Sequence[int], isr: Sequence[int] | None = None, target: Sequence[int] = ()
) -> PartitionState:
    return PartitionState(
        0, leader, 7, tuple(replicas if isr is None else isr), tuple(replicas), revision=5, target=tuple(target)
    )


def joined(state: PartitionState, *brokers: int) -> PartitionState:
    return replace(state, isr=(*state.isr, *brokers))


@proves("L6")
def test_a_move_adds_waits_for_the_data_switches_and_removes() -> None:
    begun = begin_move(led(1, (1, 2, 3)), (4, 2, 5))
    assert (begun.replicas, begun.target, begun.adding) == ((1, 2, 3, 4, 5), (4, 2, 5), (4, 5))
    assert (begun.leader, begun.leader_epoch, begun.isr, begun.revision) == (1, 7, (1, 2, 3), 5)
    assert goal(begun) == (4, 2, 5)
    half = joined(begun, 4)
    assert not can_finish_move(half)
    with pytest.raises(InvalidRequest, match=r"in sync are \[1, 2, 3, 4\]"):
        finish_move(half, ALL)
    moved = finish_move(joined(half, 5), ALL)
    assert (moved.replicas, moved.target, moved.adding, moved.isr) == ((4, 2, 5), (), (), (2, 4, 5))
    assert (moved.leader, moved.leader_epoch) == (4, 8)


@proves("L6")
def test_the_epoch_rises_when_a_broker_is_taken_away_and_once_only() -> None:
    moved = finish_move(joined(begin_move(led(2, (1, 2)), (3, 2)), 3), ALL)
    assert (moved.leader, moved.leader_epoch) == (2, 8)
    again = begin_move(begin_move(led(1, (1, 2)), (3, 2)), (4, 2))
    assert (again.replicas, again.leader_epoch) == ((1, 2, 4), 8)


def test_the_epoch_stays_when_the_leader_does_and_nobody_is_taken_away() -> None:
    grown = finish_move(joined(begin_move(led(1, (1,)), (1, 2, 3)), 2, 3), ALL)
    assert (grown.replicas, grown.leader_epoch) == ((1, 2, 3), 7)


def test_the_first_live_broker_of_the_target_leads() -> None:
    ready = joined(begin_move(led(1, (1, 2)), (3, 4, 5)), 3, 4, 5)
    assert finish_move(ready, {1, 2, 4, 5}).leader == 4


@proves("L6")
def test_a_move_does_not_end_on_brokers_of_which_most_are_not_live() -> None:
    ready = joined(begin_move(led(1, (1, 2)), (3, 4)), 3, 4)
    assert finish_move(ready, {1, 2}) is ready
    assert finish_move(ready, {1, 2, 4}) is ready
    assert finish_move(ready, {3, 4}).replicas == (3, 4)


def test_a_new_order_needs_no_data() -> None:
    assert begin_move(led(1, (1, 2, 3), isr=(1,)), (3, 2, 1)) == led(1, (3, 2, 1), isr=(1,))


def test_the_number_of_replicas_can_grow_and_shrink() -> None:
    assert finish_move(joined(begin_move(led(1, (1,)), (1, 2, 3)), 2, 3), ALL).replicas == (1, 2, 3)
    shrunk = begin_move(led(1, (1, 2, 3), isr=(1, 2)), (3,))
    assert (shrunk.replicas, shrunk.adding) == ((1, 2, 3), ())
    assert not can_finish_move(shrunk)
    assert finish_move(joined(shrunk, 3), ALL).replicas == (3,)


def test_a_cancelled_move_takes_away_what_it_added() -> None:
    before = led(1, (1, 2, 3))
    begun = begin_move(before, (2, 3, 4))
    in_new_epoch = replace(before, leader_epoch=8)
    assert cancel_move(begun) == in_new_epoch
    assert cancel_move(joined(begun, 4)) == in_new_epoch
    led_by_new = lead(joined(begun, 4), 4)
    assert led_by_new.leader_epoch == 8
    back = cancel_move(led_by_new, {2, 3, 4})
    assert (back.replicas, back.leader, back.leader_epoch) == ((1, 2, 3), 2, 9)
    assert begin_move(begun, (3, 2, 1)) == replace(in_new_epoch, replicas=(3, 2, 1))


@proves("L6")
def test_a_move_is_not_cancelled_when_only_the_new_replicas_hold_the_data() -> None:
    begun = begin_move(led(1, (1, 2)), (3, 4))
    alone = lead(replace(begun, isr=(3,)), 3)
    with pytest.raises(InvalidRequest, match=r"of brokers \[1, 2\] only \[\] are in sync"):
        cancel_move(alone)
    with pytest.raises(InvalidRequest, match="cannot be cancelled"):
        cancel_move(lead(joined(begun, 3), 3), live={3})
    with pytest.raises(InvalidRequest, match="cannot be cancelled"):
        cancel_move(replace(begun, leader=NO_LEADER))


@proves("L6")
def test_a_cancelled_move_does_not_leave_what_many_hold_to_one() -> None:
    """Brokers 2 and 3 were away during the move, which has brought the data to 4, 5 and 6."""
    begun = replace(begin_move(led(1, (1, 2, 3)), (4, 5, 6)), isr=(1, 4, 5, 6))
    with pytest.raises(InvalidRequest, match=r"of brokers \[1, 2, 3\] only \[1\] are in sync"):
        cancel_move(begun)
    caught_up = joined(begun, 2)
    with pytest.raises(InvalidRequest, match=r"only \[2\] are in sync"):
        cancel_move(caught_up, {2, 4, 5, 6})
    assert cancel_move(caught_up, {1, 2, 4}).isr == (1, 2)


def test_a_move_that_has_brought_nothing_yet_is_cancelled_however_few_are_in_sync() -> None:
    before = led(1, (1, 2, 3), isr=(1,))
    assert cancel_move(begin_move(before, (4, 5, 6)), {1}) == replace(before, leader_epoch=8)


@proves("L6")
def test_another_target_does_not_leave_what_many_hold_to_one() -> None:
    begun = replace(begin_move(led(1, (1, 2, 3)), (4, 5, 6)), isr=(1, 4, 5, 6))
    again = begin_move(begun, (7, 8, 9), {1, 4, 5, 6})
    assert (again.isr, again.target) == ((1, 4, 5, 6), (7, 8, 9))
    assert again.replicas == (1, 2, 3, 7, 8, 9, 4, 5, 6)
    assert begin_move(begun, (4, 5, 9), {1, 4, 5}).isr == (1, 4, 5)
    assert finish_move(joined(again, 7, 8, 9), ALL).replicas == (7, 8, 9)


def test_another_target_takes_the_place_of_the_first() -> None:
    begun = joined(begin_move(led(1, (1, 2)), (3, 4)), 4)
    again = begin_move(begun, (4, 5))
    assert (again.replicas, again.target, again.adding) == ((1, 2, 4, 5), (4, 5), (4, 5))
    assert again.isr == (1, 2, 4)
    kept = begin_move(lead(begun, 4), (2, 5))
    assert (kept.replicas, kept.adding, kept.leader) == ((1, 2, 5, 3, 4), (5, 3, 4), 4)


@proves("L6")
def test_a_ring_that_points_elsewhere_leaves_no_record_without_a_reader() -> None:
    """The orphan case: A alone holds unread records and crashes, the ring says B, A returns."""
    a, b = 1, 2
    begun = begin_move(led(a, (a,)), (b,))
    crashed = replace(begun, leader=NO_LEADER)
    assert not can_finish_move(crashed)
    assert a in crashed.replicas
    returned = lead(crashed, a)
    assert not can_finish_move(returned)
    moved = finish_move(joined(returned, b), {a, b})
    assert (moved.replicas, moved.leader, moved.isr) == ((b,), b, (b,))


@pytest.mark.parametrize("target", [(), (1, 1)])
def test_a_target_that_cannot_be_is_refused(target: tuple[int, ...]) -> None:
    with pytest.raises(InvalidAssignment, match="differ"):
        begin_move(led(1, (1, 2)), target)


@proves("L6")
@properties
@given(st.data())
def test_whatever_happens_a_replica_that_holds_everything_is_kept(data: st.DataObject) -> None:
    """Brokers crash, catch up and take over while moves begin, end and are cancelled. The members of the
    in-sync set hold every acknowledged record; a set may lose members, and never gets one from a move.
    """
    state = led(1, (1, 2, 3))
    for _ in range(data.draw(st.integers(1, 25))):
        before = state
        live = data.draw(st.sets(st.integers(1, 6)))
        match data.draw(st.sampled_from(["begin", "finish", "cancel", "grow", "shrink", "elect", "lose"])):
            case "begin":
                target = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True))
                with suppress(InvalidRequest):
                    state = begin_move(state, target, live)
            case "finish" if can_finish_move(state):
                state = finish_move(state, live)
            case "cancel":
                with suppress(InvalidRequest):
                    state = cancel_move(state, live)
            case "grow" if state.leader != NO_LEADER:
                state = joined(state, *(set(state.replicas) - set(state.isr)))
            case "shrink" if state.leader != NO_LEADER:
                state = replace(state, isr=(state.leader,))
            case "elect":
                state = lead(state, data.draw(st.sampled_from(state.isr)))
            case "lose":
                state = replace(state, leader=NO_LEADER)
        assert state.isr
        if state.replicas != before.replicas and set(state.isr) < set(before.isr):
            remaining = live & set(state.isr)
            assert 2 * len(remaining) > len(goal(state)) or 2 * len(remaining) > len(state.replicas) - len(state.adding)
        assert set(state.isr) <= set(state.replicas)
        assert len(set(state.replicas)) == len(state.replicas)
        assert set(state.isr) <= set(before.isr) or state.replicas == before.replicas
        assert state.leader == NO_LEADER or state.leader in state.isr
        assert set(state.adding) <= set(state.replicas)
        assert set(state.target) <= set(state.replicas)
        led_by_another = state.leader not in (before.leader, NO_LEADER)
        taken_away = not set(before.replicas) <= set(state.replicas)
        assert state.leader_epoch == before.leader_epoch + (led_by_another or taken_away)
