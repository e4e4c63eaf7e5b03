"""The simulator finds bugs that are planted in the code that it runs."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.simulator.cluster import simulate
from headrace.simulator.scenario import draw
from proving import proves
from simulator import (  # noqa: F401 - more of them
    planted_coordination,
    planted_damage,
    planted_front_end,
    planted_moves,
    planted_transactions,
)
from simulator.planted import FOUND_BY_TESTS, PLANTS, planted

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS_MAX = 2000
QUICK_SEEDS = 40
QUICK = (
    "keep_the_epoch_of_a_returned_leader",
    "elect_outside_the_set",
    "produce_answered_by_the_leader_alone",
    "answers_as_they_come",
    "groups_open_without_a_load",
    "timeouts_end_two_phase_transactions",
    "timeouts_leave_the_epoch",
    "markers_count_when_they_are_written",
    "aborted_transactions_are_not_told",
)
PART = 20


def first_violation(name: str, first: int, last: int) -> tuple[int, str] | None:
    """The first seed that finds the bug, with what it says."""
    with planted(name):
        for seed in range(first, last + 1):
            outcome = simulate(draw(seed))
            if outcome.violation:
                return seed, outcome.violation
    return None


def search(part: tuple[str, int]) -> tuple[int, str] | None:
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        return first_violation(part[0], part[1], part[1] + PART - 1)
    finally:
        gc.enable()
        gc.collect()


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_found(name: str) -> None:
    assert first_violation(name, 1, QUICK_SEEDS) is not None


@pytest.mark.parametrize("name", FOUND_BY_TESTS)
def test_a_planted_bug_is_found_by_its_test(name: str) -> None:
    program = (
        "import sys, pytest\n"
        "from simulator import planted_coordination, planted_damage, planted_front_end, planted_moves\n"
        "from simulator import planted_transactions\n"
        "from simulator.planted import planted\n"
        "with planted(sys.argv[1]):\n"
        "    sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', sys.argv[2]]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, name, FOUND_BY_TESTS[name]],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
@proves("G2")
@pytest.mark.parametrize("name", [name for name in PLANTS if name not in FOUND_BY_TESTS])
def test_every_planted_bug_is_found(name: str, proof_report) -> None:  # type: ignore[no-untyped-def]
    parts = [(name, first) for first in range(1, SEEDS_MAX, PART)]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        found = next(filter(None, pool.imap(search, parts)), None)
        pool.terminate()
    assert found is not None, f"{name} is not found in {SEEDS_MAX} seeds"
    proof_report(bug=name, found_by_seed=found[0], violation=found[1])
