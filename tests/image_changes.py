"""Changes of topics and settings on an image alone: each plan is folded into `view.image` at once, nothing waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace.cluster.changes import Changes, Plan
from headrace.cluster.image import Image, apply
from headrace.cluster.view import ClusterView
from headrace.coordination.embedded import EmbeddedCoordination
from headrace.coordination.waits import Compute, at_once
from headrace.ports.clock import Clock
from headrace.ports.coordination import Delete, Event, WatchResponse


class ImageChanges(Changes):
    """`follow` hears of every change, with the image before and after it."""

    def __init__(self, clock: Clock, follow: Callable[[Image, Image], None]) -> None:
        coordination = EmbeddedCoordination(":memory:", clock)
        super().__init__(coordination, ClusterView(coordination, "/", clock, _fail))
        self._follow = follow

    async def run(
        self, plan_on: Callable[[Image], Plan], compute: Compute = at_once, *, even_in_doubt: bool = False
    ) -> Image:
        before = self.view.image
        plan = plan_on(before)
        after = apply(before, WatchResponse(before.revision + 1, tuple(_events(before, plan))))
        self.view.image = after
        self._follow(before, after)
        return after


def _events(image: Image, plan: Plan) -> Iterator[Event]:
    revision = image.revision + 1
    for step in plan.steps:
        for action in step.actions:
            if not isinstance(action, Delete):
                yield Event("put", action.key, action.value, revision)
            elif not action.prefix:
                yield Event("delete", action.key, b"", revision)
            else:
                kind, topic, _ = action.key.removeprefix(image.prefix).split("/")
                for state in image.topics[topic].partitions if kind == "partitions" else ():
                    yield Event("delete", f"{action.key}{state.index}", b"", revision)


def _fail(error: BaseException) -> None:
    raise AssertionError("nothing follows coordination here") from error
