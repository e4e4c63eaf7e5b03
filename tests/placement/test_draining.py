"""Plans that empty brokers are made away from the loop, and used only for the image that they fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.cluster.controller_state import Controls
from headrace.cluster.image import Image
from headrace.cluster.orders import plan_moves
from headrace.coordination.waits import at_once
from headrace.placement.drains import PAUSE_SECONDS, Drains, plan_drains
from headrace.virtual.loop import VirtualLoop
from placement.placed import image_of
from proving import proves


class Elsewhere:
    """Work that is done when the test lets it be."""

    def __init__(self) -> None:
        self.begun = 0
        self.open = asyncio.Event()

    async def compute(self, work: Callable[[], Any]) -> Any:
        self.begun += 1
        await self.open.wait()
        return work()


class Rung:
    def __init__(self) -> None:
        self.count = 0

    def ring(self) -> None:
        self.count += 1


def unexpected(error: BaseException) -> None:
    raise AssertionError from error


def three(*, draining: int | None = 1) -> Image:
    """Three brokers, and ten partitions on the first two."""
    return image_of([1, 2, 3], {"t": [[1, 2]] * 10}, draining=() if draining is None else (draining,))


@proves("L3")
def test_nobody_waits_while_a_plan_is_made_and_it_is_dropped_when_brokers_have_changed() -> None:
    loop = VirtualLoop()

    async def body() -> None:
        elsewhere, rung = Elsewhere(), Rung()
        drains = Drains(loop.clock, elsewhere.compute, rung.ring, unexpected)
        image = three()
        assert drains.moves(image) == ()
        assert drains.moves(image) == ()
        await asyncio.sleep(1)
        assert elsewhere.begun == 1, "one plan at a time, and this one is not ready"
        other = replace(image, brokers=dict(image.brokers))
        elsewhere.open.set()
        await asyncio.sleep(0.1)
        assert rung.count == 1
        assert drains.moves(other) == (), "it was made for other registrations"
        await asyncio.sleep(0.1)
        assert (elsewhere.begun, rung.count) == (2, 2)
        moves = drains.moves(other)
        assert [(move.before, set(move.after)) for move in moves] == [((1, 2), {2, 3})] * 10
        await drains.close()

    loop.run_until_complete(body())


@proves("L3")
def test_a_plan_is_used_up_move_by_move_and_made_again_when_something_is_left() -> None:
    loop = VirtualLoop()

    async def body() -> None:
        rung = Rung()
        drains = Drains(loop.clock, at_once, rung.ring, unexpected)
        image = three()
        drains.moves(image)
        await asyncio.sleep(0.1)
        assert len(drains.moves(image)) == 10
        states = [replace(state, target=(3, 2)) for state in image.topics["t"].partitions]
        most = replace(
            image, topics={"t": replace(image.topics["t"], partitions=(*states[:9], three().topics["t"].partitions[9]))}
        )
        assert [move.partition for move in drains.moves(most)] == [9]
        # A topic that was being created when the broker began to drain.
        late = replace(image.topics["t"], name="late")
        image = replace(most, topics={"t": replace(image.topics["t"], partitions=tuple(states)), "late": late})
        assert drains.moves(image) == []
        assert loop.clock.now() < drains.next_look(image) <= loop.clock.now() + PAUSE_SECONDS
        await asyncio.sleep(PAUSE_SECONDS)
        drains.moves(image)
        await asyncio.sleep(0.1)
        assert {move.topic for move in drains.moves(image)} == {"late"}
        assert drains.moves(replace(image, controls=Controls())) == ()
        await drains.close()

    loop.run_until_complete(body())


def test_what_has_nowhere_to_go_is_planned_once() -> None:
    loop = VirtualLoop()

    async def body() -> None:
        rung = Rung()
        drains = Drains(loop.clock, at_once, rung.ring, unexpected)
        image = image_of([1, 2], {"t": [[1, 2]]}, draining=[1])
        assert plan_drains(image) == ()
        for _ in range(5):
            assert not drains.moves(image)
            await asyncio.sleep(PAUSE_SECONDS)
        assert rung.count == 1
        assert drains.next_look(image) == float("inf")
        await drains.close()

    loop.run_until_complete(body())


class Unwalked(dict[str, Any]):
    """Topics that are looked up by name and never gone through."""

    def items(self) -> Any:
        raise AssertionError("all topics were gone through for the order of one partition")

    values = items


@proves("L3")
def test_an_order_looks_at_its_own_partition_only() -> None:
    image = three(draining=None)
    plan = plan_moves(replace(image, topics=Unwalked(image.topics)), {("t", 4): [3, 2]}, keep_count=True, refusals={})
    assert len(plan.steps) == 1
