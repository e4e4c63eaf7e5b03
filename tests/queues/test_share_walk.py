"""An OSError at every disk call on the way of deliveries and of the states of share partitions, one by one, in both
layouts (see `share_walk`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disk_calls import NUMBERS, figures
from proving import proves
from queues.share_walk import ENDINGS, OPERATIONS, ShareWalk

SAMPLED = 12
LAYOUTS = pytest.mark.parametrize("layout", ["partitioned", "shared"])


@proves("G14", "Q1")
@pytest.mark.thorough
@LAYOUTS
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_share_group_loses_nothing_to_a_disk_that_fails_now_and_then(operation: str, layout: str, seed: int) -> None:
    walk = ShareWalk(layout, OPERATIONS[operation])
    step = max(1, walk.calls // SAMPLED)
    for nth in range(1 + seed % step, walk.calls + 1, step):
        walk.fail(nth, NUMBERS[nth % len(NUMBERS)], ENDINGS[nth // len(NUMBERS) % len(ENDINGS)], seed + nth)


@proves("G14", "Q1")
@pytest.mark.long
@pytest.mark.timeout(3600)
@LAYOUTS
def test_a_share_group_loses_nothing_to_a_disk_that_fails_at_any_call(
    layout: str, seed: int, proof_report: Callable[..., None]
) -> None:
    walks = {name: ShareWalk(layout, operation) for name, operation in OPERATIONS.items()}
    failures: list[str] = []
    for name, walk in walks.items():
        for nth in range(1, walk.calls + 1):
            for at, number in enumerate(NUMBERS):
                try:
                    walk.fail(nth, number, ENDINGS[(nth + at) % len(ENDINGS)], seed + nth)
                except AssertionError as error:
                    failures.append(f"{name}: {error}")
    proof_report(layout=layout, **figures(walks, failures))
    assert failures == []
