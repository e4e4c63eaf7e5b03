"""The moves that empty draining brokers: planned away from the loop, handed out for as long as they hold.

With thousands of partitions a plan takes a second, and elections must not wait for it. So it is made from the image of
the moment by `compute`, in a thread of the real broker, and kept while the controller carries it out a few moves at a
time. A move of it counts only while its partition is where the plan saw it and the brokers are those it was made for;
the writes compare the rest (cluster.controller). A plan that is used up is made again if something is left to move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from headrace.cluster.image import Image
from headrace.coordination.waits import Compute
from headrace.errors import InvalidReplication, InvalidRequest
from headrace.placement.moves import goal
from headrace.placement.plans import ReplicaMove, drain
from headrace.ports.clock import Clock

PAUSE_SECONDS: Final = 1.0
"""Between two plans for the same brokers: what has nowhere to go is not looked at for every image."""


def plan_drains(image: Image) -> tuple[ReplicaMove, ...]:
    """Away from every draining broker. One that has nowhere to go stays until a broker is added; the listing shows
    it.
    """
    moves: list[ReplicaMove] = []
    for broker in sorted(image.controls.draining):
        try:
            moves += drain(image, broker).moves
        except (InvalidReplication, InvalidRequest):
            continue
    return tuple(moves)


def holds(image: Image, move: ReplicaMove) -> bool:
    """Whether the partition is still where the plan saw it."""
    state = image.partition(move.topic, move.partition)
    return state is not None and goal(state) == move.before


class Drains:
    """`ready` is called when a plan is there."""

    def __init__(
        self, clock: Clock, compute: Compute, ready: Callable[[], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._clock = clock
        self._compute = compute
        self._ready = ready
        self._failed = failed
        self._basis: Image | None = None
        self._moves: Sequence[ReplicaMove] = ()
        self._planned_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def moves(self, image: Image) -> Sequence[ReplicaMove]:
        """What is left of the plan; empty while there is none."""
        if not image.controls.draining:
            self._basis, self._moves = None, ()
            return ()
        if not self._is_for(image):
            self._moves = ()
            self._begin(image)
        else:
            self._moves = [move for move in self._moves if holds(image, move)]
            if not self._moves and self._is_due(image):
                self._begin(image)
        return self._moves

    def next_look(self, image: Image) -> float:
        """When a plan that is used up should be looked at again."""
        if self._task is None and image.controls.draining and not self._moves and self._is_stale(image):
            return self._planned_at + PAUSE_SECONDS
        return float("inf")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _is_for(self, image: Image) -> bool:
        basis = self._basis
        return (
            basis is not None and basis.brokers is image.brokers and basis.controls.draining == image.controls.draining
        )

    def _is_stale(self, image: Image) -> bool:
        return self._basis is None or self._basis.topics is not image.topics

    def _is_due(self, image: Image) -> bool:
        return self._is_stale(image) and self._clock.now() >= self._planned_at + PAUSE_SECONDS

    def _begin(self, image: Image) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._plan(image))
            self._task.add_done_callback(self._ended)

    async def _plan(self, image: Image) -> None:
        moves = await self._compute(lambda: plan_drains(image))
        self._basis, self._moves, self._planned_at = image, moves, self._clock.now()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._failed(error)
        else:
            self._ready()
