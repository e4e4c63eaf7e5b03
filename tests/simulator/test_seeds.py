"""Whole clusters under faults, drawn from seeds: nothing that was acknowledged is lost, and a run can be repeated."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster.participant import Participant
from headrace.partitions.leader_core import IsrChange, LeaderCore
from headrace.simulator.cluster import simulate
from headrace.simulator.faults import DECAY, FLIP_BYTE, KINDS
from headrace.simulator.scenario import (
    AT_THE_END,
    CLASSIC,
    CONSUMER,
    IN_BETWEEN,
    draw,
    draw_plain,
    draw_shared,
    transacting,
)
from headrace.simulator.share_courses import SHARE_COURSES
from proving import proves

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS = range(1, 26)
FLIPPING = (31, 47, 19655)
"""Runs in which bytes flip; in 19655 while one broker alone has what was written last."""
RESTORED = (18, 270, 332, 345, 409, 1248, 14038)
"""Runs in which coordination is put back to an older copy."""
QUORUM = (119, 165)
"""Runs in which coordination has several nodes."""
MOVED = (14, 46, 838)
"""Runs with a fourth broker, in which a replica was added again unseen."""
DECAYING = (19, 129, 9505, 34563, 52089)
"""Runs in which bytes flip while brokers run; in 9505 above the checkpoints of two machines, in 34563 when one broker
alone has what was written last, in 52089 below a start that an operator raises then."""
SLOW_ROUNDS = (27, 57)
"""Runs in which a follower leaves the in-sync set because its rounds are slow, where they have a limit."""
TRANSACTING = (11, 33, 43, 56)
"""Runs that are given transactions."""
SHARING = (1, 2, 3, 4, 6, 7, 8, 11)
"""Runs of a share group alone."""
SEEDS_TWICE = (3, 5, 8, 23)
LONG_SEEDS = "1-20000"
LONG_SHARED_SEEDS = "1-3000"


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """A run makes much that is collected in one go after it; in between a collection would only cost time. Nothing is
    logged: pytest keeps what is, and with an error the calls that it went through, and the buffers that they read."""
    gc.disable()
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    gc.enable()
    gc.collect()


@proves("G2", "G14", "F5", "F7")
@pytest.mark.parametrize("seed", SEEDS)
def test_no_seed_breaks_a_rule(seed: int) -> None:
    outcome = simulate(draw(seed))
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.fault_list, *outcome.last_lines[-40:]])


def test_a_mistake_in_a_start_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look like a broker that does not come up."""

    async def fail(_: Participant) -> None:
        raise ValueError("by mistake")

    monkeypatch.setattr(Participant, "open", fail)
    outcome = simulate(draw(1))
    assert "by mistake" in outcome.violation
    assert outcome.simulated_seconds < 1


@proves("G14", "J1")
@pytest.mark.parametrize("seed", FLIPPING)
def test_no_flipped_byte_breaks_a_rule(seed: int) -> None:
    outcome = simulate(replace(draw(seed, shares=False), bytes_flip=True))
    assert outcome.faults[FLIP_BYTE]
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.fault_list, *outcome.last_lines[-40:]])


@proves("L6", "L3")
@pytest.mark.parametrize("seed", MOVED)
def test_no_move_breaks_a_rule(seed: int) -> None:
    outcome = simulate(draw(seed, shares=False))
    assert outcome.counts["moves ordered"]
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.fault_list, *outcome.last_lines[-40:]])


@proves("G14", "J1")
@pytest.mark.parametrize("seed", DECAYING)
def test_no_byte_that_flips_under_a_broker_breaks_a_rule(seed: int) -> None:
    outcome = simulate(replace(draw(seed, shares=False), decays=True))
    assert outcome.faults[DECAY]
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.fault_list, *outcome.last_lines[-40:]])


@pytest.mark.parametrize("seed", RESTORED)
def test_no_restore_of_coordination_breaks_a_rule(seed: int) -> None:
    outcome = simulate(replace(draw_plain(seed), restored=True))
    assert outcome.counts["restores"]
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.fault_list, *outcome.last_lines[-40:]])


@pytest.mark.parametrize("seed", QUORUM)
def test_no_fault_of_single_coordination_nodes_breaks_a_rule(seed: int) -> None:
    scenario = draw(seed)
    assert scenario.quorum
    outcome = simulate(scenario)
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.fault_list, *outcome.last_lines[-40:]])


@proves("T1", "T2", "T4")
@pytest.mark.parametrize("seed", TRANSACTING)
def test_no_transaction_breaks_a_rule(seed: int) -> None:
    scenario = transacting(draw(seed), random.Random(f"{seed} transactional load forced"))
    outcome = simulate(scenario)
    assert outcome.counts["committed"]
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.fault_list, *outcome.last_lines[-40:]])


@proves("G10")
@pytest.mark.parametrize("seed", SLOW_ROUNDS)
def test_no_limit_of_rounds_breaks_a_rule(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, reasons = LeaderCore.judge_isr, []

    def judged(*given: Any) -> IsrChange | None:
        change = judge(*given)
        reasons.append(change.reason if change is not None else "")
        return change

    monkeypatch.setattr(LeaderCore, "judge_isr", judged)
    scenario = draw(seed)
    outcome = simulate(replace(scenario, settings=scenario.settings | {"replica.round.max.ms": 20}))
    assert any("too often" in reason for reason in reasons)
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.fault_list, *outcome.last_lines[-40:]])


@proves("Q1")
@pytest.mark.parametrize("seed", SHARING)
def test_no_share_group_breaks_a_rule(seed: int) -> None:
    outcome = simulate(draw_shared(seed))
    assert outcome.counts.get("deliveries")
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.fault_list, *outcome.last_lines[-40:]])


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    program = (
        "import json, sys\n"
        "from headrace.simulator.cluster import simulate\n"
        "from headrace.simulator.scenario import draw\n"
        f"print(json.dumps([simulate(draw(seed)).trace_sum for seed in {SEEDS_TWICE!r}]))\n"
    )
    sums = []
    for hash_seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT / "src")}
        ran = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        sums.append(json.loads(ran.stdout))
    assert sums[0] == sums[1]
    assert sums[0] == [simulate(draw(seed)).trace_sum for seed in SEEDS_TWICE]
    assert len(set(sums[0])) == len(SEEDS_TWICE)


def test_seeds_draw_both_layouts_and_levels() -> None:
    scenarios = [draw(seed) for seed in range(1, 201)]
    assert {layout for scenario in scenarios for layout in scenario.layouts} == {"partitioned", "shared"}
    assert {topic.durability for scenario in scenarios for topic in scenario.topics} == {"disk", "os"}
    assert {scenario.restored for scenario in scenarios} == {True, False}
    assert {scenario.renewed for scenario in scenarios} == {True, False}
    plans = [scenario.transactions for scenario in scenarios if scenario.transactions is not None]
    assert {plan.compacted for plan in plans} == {True, False}
    assert {plan.versions for plan in plans} == {(1,), (2,), (1, 2)}
    assert {bool(plan.owners) for plan in plans} == {bool(plan.copied_partitions) for plan in plans} == {True, False}
    plans = [plan for seed in range(1, 1001) if (plan := draw(seed).transactions) is not None]
    assert {plan.members for plan in plans} == {"", CLASSIC, CONSUMER}
    assert {bool(plan.retention) for plan in plans} == {plan.deletions for plan in plans} == {True, False}
    assert {plan.unclean for plan in plans} == {plan.passing for plan in plans} == {True, False}
    shared = [drawn for seed in range(1, 1001) if (drawn := draw(seed).shares) is not None]
    assert {plan.reset for plan in shared} == {"", IN_BETWEEN, AT_THE_END}
    assert {plan.compacted for plan in shared} == {plan.deletions for plan in shared} == {True, False}
    assert {bool(plan.retention) for plan in shared} == {bool(plan.calm_seconds) for plan in shared} == {True, False}
    assert all(plan.members > plan.partitions for plan in shared)


def _run_many(proof_report: Callable[..., None], seeds: str, *flags: str) -> tuple[int, str, Counter[str]]:
    """Whether all passed, the seeds that failed, and how often each fault came."""
    course = ROOT / ".work" / "seeds.log"  # to look at while it goes on
    with course.open("w") as output:
        ran = subprocess.run(
            [sys.executable, str(ROOT / "tools" / "simulate.py"), seeds, *flags],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stdout=output, check=False,
        )  # fmt: skip
    *_, last, faults, failing = course.read_text().splitlines()
    proof_report(seeds=" ".join([seeds, *flags]), course=last, faults=faults.removeprefix("faults: "), failing=failing)
    counted = Counter(dict(fault.rsplit(" ", 1) for fault in faults.removeprefix("faults: ").split(", ")))
    return ran.returncode, failing, counted


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
@proves("G2", "G14", "F5", "F7")
def test_many_seeds_break_no_rule(proof_report: Callable[..., None]) -> None:
    code, failing, counted = _run_many(proof_report, LONG_SEEDS)
    assert set(counted) == set(KINDS)
    assert code == 0, failing


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
@proves("Q1")
def test_many_share_groups_break_no_rule(proof_report: Callable[..., None]) -> None:
    code, failing, counted = _run_many(proof_report, LONG_SHARED_SEEDS, "--shares-alone")
    assert set(counted) > set(SHARE_COURSES)
    assert code == 0, failing
