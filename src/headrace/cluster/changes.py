"""Changes of the cluster's keys: a pure plan made from an image, and the driver that carries it out.

A plan is one transaction, or several when it is larger than a transaction may be. Its compares make it hold only for
the image that it was planned on; when somebody else was faster, it is planned again on the newer image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from headrace.cluster.image import Image
from headrace.cluster.view import ClusterView
from headrace.coordination.waits import Compute, at_once
from headrace.errors import CoordinationError, MetadataInDoubt
from headrace.ports.coordination import Compare, Coordination, Delete, Put

PLANS_MAX: Final = 20
"""Times that one task is planned again because others changed the same keys."""

Action = Put | Delete


@dataclass(frozen=True, slots=True)
class Step:
    compares: tuple[Compare, ...]
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in order. With `claim`, every later step also compares that key with the revision that the first step
    gave it.
    """

    steps: tuple[Step, ...]
    claim: str = ""


def unchanged(key: str, revision: int) -> Compare:
    """The key still has this revision; 0 for a key that is not there."""
    return Compare(key, "mod_revision", "=", revision)


def check_no_doubt(image: Image) -> None:
    """Refuse a change while a broker doubts that the metadata is the cluster's newest (cluster.lineage)."""
    doubts = image.controls.doubts
    if doubts:
        doubt = next(iter(doubts.values()))
        raise MetadataInDoubt(
            "the cluster's metadata was restored from an older copy, and nothing is changed until an operator decides: "
            f"broker {doubt.broker} has seen revision {doubt.seen} and found {doubt.found}. Look at `headrace cluster "
            "accept-metadata --dry-run`"
        )


class Changes:
    """Carries plans out. An answered change is in `view.image` of this node."""

    def __init__(self, coordination: Coordination, view: ClusterView) -> None:
        self._coordination = coordination
        self.view = view

    async def run(
        self, plan_on: Callable[[Image], Plan], compute: Compute = at_once, *, even_in_doubt: bool = False
    ) -> Image:
        """The image with the change in it. What `plan_on` raises is the caller's answer; `compute` runs it."""
        for _ in range(PLANS_MAX):
            if not even_in_doubt:
                check_no_doubt(self.view.image)
            done, revision = await self._carry_out(await compute(partial(plan_on, self.view.image)))
            image = await self.view.wait_for_revision(revision)
            if done:
                return image
        raise CoordinationError(f"the same keys were changed by others {PLANS_MAX} times in a row; try again")

    async def _carry_out(self, plan: Plan) -> tuple[bool, int]:
        """Whether all of it was done, and the revision at which that is known."""
        revision = self.view.image.revision
        held: tuple[Compare, ...] = ()
        for step in plan.steps:
            result = await self._coordination.transact((*step.compares, *held), step.actions)
            revision = result.revision
            if not result.succeeded:
                return False, revision
            if plan.claim and not held:
                held = (unchanged(plan.claim, revision),)
        return True, revision
