"""Bugs of moves and drains: see `planted`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from headrace.cluster import controller_core, orders
from headrace.cluster.assignment import Assignment
from headrace.cluster.image import NO_LEADER, Image, PartitionState
from headrace.placement import moves
from headrace.placement.drains import Drains
from simulator.planted import found_by, plant, swap


@plant
def end_a_move_before_its_brokers_hold_the_data(stack: ExitStack) -> None:
    """A move ends as soon as its brokers are there, and they count as in sync."""
    decide = controller_core._decide
    images: list[Image] = []

    def deciding(image: Image, *args: Any) -> Any:
        images[:] = [image]
        return decide(image, *args)

    def can_finish(state: PartitionState) -> bool:
        return bool(state.target) and state.leader != NO_LEADER and set(state.target) <= set(images[0].brokers)

    def finished(state: PartitionState, _: object) -> PartitionState:
        members = {broker: images[0].brokers[broker].incarnation for broker in state.target}
        leader = state.leader if state.leader in members else state.target[0]
        after = replace(state, replicas=state.target, isr=tuple(members), incarnations=members, target=(), adding=())
        return replace(after, leader=leader, leader_epoch=state.leader_epoch + 1)

    swap(stack, controller_core, "_decide", deciding)
    swap(stack, controller_core, "can_finish_move", can_finish)
    swap(stack, controller_core, "finish_move", finished)


@plant
def cancel_a_move_with_all_in_sync(stack: ExitStack) -> None:
    """A move that is cancelled leaves all the brokers that it began with in the set, whatever they hold by then."""
    moved = orders.moved

    def cancelled(image: Image, where: Any, target: Any, **named: Any) -> PartitionState:
        after = moved(image, where, target, **named)
        if target is not None:
            return after
        members = {broker: image.brokers[broker].incarnation for broker in after.replicas if broker in image.brokers}
        return replace(after, isr=tuple(members), incarnations=members)

    swap(stack, orders, "moved", cancelled)


@plant
def keep_the_epoch_when_a_broker_is_taken_away(stack: ExitStack) -> None:
    """A broker that is added again counts by what it had told before it was away."""
    swap(stack, moves, "_in_new_epoch", lambda after, _: after)


@plant
def leave_what_was_moved_away(stack: ExitStack) -> None:
    """A broker that is taken from the replicas keeps its log."""
    swap(stack, Assignment, "_delete", lambda *_: None)


@plant
def plan_a_drain_once(stack: ExitStack) -> None:
    """What is left on a drained broker when its plan is used up, because somebody cancelled a move, stays there."""
    swap(stack, Drains, "_is_due", lambda *_: False)


@found_by("tests/placement/test_moves.py")
@plant
def cancel_a_move_whoever_is_left(stack: ExitStack) -> None:
    """A move is cancelled, replaced and ended though most of the brokers that remain are not in sync, or not there."""
    swap(stack, moves, "_enough", lambda *_: True)
