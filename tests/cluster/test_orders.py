"""Orders of operators as plans: which are taken, which are refused, and what they write."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from headrace.cluster.changes import Plan, unchanged
from headrace.cluster.controller_state import PREFERRED, UNCLEAN, Controls, Order
from headrace.cluster.image import NO_LEADER, Broker, Image, PartitionState, Topic
from headrace.cluster.orders import (
    ORDERS_A_STEP,
    Refusals,
    carried_out,
    election_needed,
    moved,
    plan_elections,
    plan_moves,
)
from headrace.errors import InvalidAssignment, InvalidRequest, NoMoveUnderWay, UnknownPartition
from headrace.ports.coordination import Put
from proving import proves

BROKERS = {number: Broker(number, {}, f"i{number}", 0) for number in (1, 2, 3)}


def image_of(*states: PartitionState, controls: Controls | None = None) -> Image:
    return Image(
        "/headrace/c/",
        brokers=BROKERS,
        topics={"t": Topic("t", bytes(16), states)},
        controls=controls or Controls(),
    )


def led(index: int = 0, leader: int = 1, replicas: tuple[int, ...] = (1, 2), **more: Any) -> PartitionState:
    known = {broker: f"i{broker}" for broker in replicas}
    return PartitionState(index, leader, 4, replicas, replicas, revision=10 + index, incarnations=known, **more)


def written(plan: Plan) -> dict[str, Any]:
    puts = [put for step in plan.steps for put in step.actions if isinstance(put, Put)]
    return {put.key.removeprefix("/headrace/c/"): json.loads(put.value) for put in puts}


@proves("G14")
def test_a_move_is_written_into_the_key_that_it_was_planned_on() -> None:
    refusals: Refusals = {}
    plan = plan_moves(image_of(led(), led(1)), {("t", 0): [3, 2]}, keep_count=True, refusals=refusals)
    assert refusals == {}
    (key, value), *others = written(plan).items()
    assert (key, value["target"], value["adding"], value["replicas"]) == ("partitions/t/0", [3, 2], [3], [1, 2, 3])
    assert others == []
    assert [each for step in plan.steps for each in step.compares] == [unchanged("/headrace/c/partitions/t/0", 10)]


@proves("G14")
def test_what_is_refused_leaves_the_others() -> None:
    refusals: Refusals = {("old", 0): UnknownPartition("of an earlier plan")}
    targets = {("t", 0): [3, 2], ("t", 1): None, ("t", 2): [1], ("u", 0): [1], ("t", 3): [1, 9]}
    states = [led(index) for index in range(4)]
    plan = plan_moves(image_of(*states), targets, keep_count=True, refusals=refusals)
    assert list(written(plan)) == ["partitions/t/0"]
    assert {where: type(error) for where, error in refusals.items()} == {
        ("t", 1): NoMoveUnderWay,
        ("t", 2): InvalidAssignment,
        ("u", 0): UnknownPartition,
        ("t", 3): InvalidAssignment,
    }


def test_a_move_is_ended_by_an_order_without_brokers() -> None:
    moving = led(replicas=(1, 2, 3), target=(2, 3), adding=(3,))
    image = image_of(replace(moving, isr=(1, 2)))
    assert moved(image, ("t", 0), None).replicas == (1, 2)


@proves("L6")
@pytest.mark.parametrize("target", [None, (1, 2)])
def test_an_order_does_not_leave_a_partition_to_brokers_that_are_gone(target: tuple[int, ...] | None) -> None:
    """Broker 3, to which the partition moves, holds all and leads; 1 has just died and is still in the set."""
    moving = replace(led(leader=3, replicas=(1, 2, 3), target=(3,), adding=(3,)), isr=(1, 3))
    image = image_of(moving)
    image = replace(image, brokers={number: broker for number, broker in image.brokers.items() if number != 1})
    with pytest.raises(InvalidRequest, match=r"of brokers \[1, 2\] only \[\] are in sync"):
        moved(image, ("t", 0), target)


def test_many_orders_are_cut_into_transactions() -> None:
    states = [led(index) for index in range(2 * ORDERS_A_STEP + 1)]
    image = image_of(*states)
    plan = plan_elections(image, [("t", state.index) for state in states], PREFERRED)
    assert [len(step.actions) for step in plan.steps] == [ORDERS_A_STEP, ORDERS_A_STEP, 1]
    assert written(plan)["orders/t/0"] == {"kind": PREFERRED}


@pytest.mark.parametrize(
    ("leader", "kind", "needed"),
    [(1, PREFERRED, False), (2, PREFERRED, True), (2, UNCLEAN, False), (NO_LEADER, UNCLEAN, True)],
)
def test_an_election_is_needed_only_where_it_would_change_something(leader: int, kind: str, needed: bool) -> None:
    assert election_needed(led(leader=leader), kind) is needed


def test_an_order_is_carried_out_when_its_key_is_gone_or_the_epoch_has_changed() -> None:
    before = led(leader=2)
    done = carried_out({("t", 0): before})
    ordered = Controls(orders={("t", 0): Order(PREFERRED, 5)})
    assert not done(image_of(before, controls=ordered))
    assert done(image_of(before))
    assert done(image_of(replace(before, leader_epoch=5), controls=ordered))
    assert done(Image("/headrace/c/"))
