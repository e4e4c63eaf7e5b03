"""An OSError at every disk call of a broker's start and stop, one by one, in both layouts (see `broker_walk`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.broker_walk import ENDINGS, Broker, BrokerOperation, BrokerWalk
from disk_calls import NUMBERS, figures
from proving import proves

SAMPLED = 5
OPERATIONS = {
    "start after a stop": BrokerOperation(Broker.stop, Broker.start),
    "start after a kill": BrokerOperation(Broker.kill, Broker.start),
    "start after a loss of power": BrokerOperation(Broker.lose_power, Broker.start_with_less),
    "stop": BrokerOperation(Broker.nothing, Broker.stop),
    "lost log": BrokerOperation(Broker.nothing, Broker.lose_a_log),
}
LAYOUTS = pytest.mark.parametrize("layout", ["partitioned", "shared"])


@proves("G14", "F7")
@pytest.mark.thorough
@LAYOUTS
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_broker_whose_disk_fails_now_and_then_claims_no_more_than_it_holds(
    operation: str, layout: str, seed: int
) -> None:
    walk = BrokerWalk(layout, OPERATIONS[operation])
    step = max(1, walk.calls // SAMPLED)
    for nth in range(1 + seed % step, walk.calls + 1, step):
        walk.fail(nth, NUMBERS[nth % len(NUMBERS)], ENDINGS[nth // len(NUMBERS) % len(ENDINGS)], seed + nth)


@proves("G14", "F7")
@pytest.mark.long
@pytest.mark.timeout(3600)
@LAYOUTS
def test_a_broker_whose_disk_fails_at_any_call_claims_no_more_than_it_holds(
    layout: str, seed: int, proof_report: Callable[..., None]
) -> None:
    walks = {name: BrokerWalk(layout, operation) for name, operation in OPERATIONS.items()}
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
