#!/usr/bin/env python
"""Run seeds of the simulator, on all cores: `tools/simulate.py 1-2000`. One seed alone is told in full; with
`--transactions` only those run that have some, one in five, with `--shares` those with a share group, one in eight.

Prints a line as it goes; at the end how often each fault was injected, and the seeds that broke a rule, each with the
faults and the last events of its run. A seed gives the same run every time.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from headrace.simulator.cluster import Outcome, simulate
from headrace.simulator.scenario import draw, draw_shared

LINES_SHOWN = 60
PART_SEEDS = 4
PROCESS_SEEDS = 60
"""A process runs so many and ends: to have the kernel take back what they leave, some 3 MB each, costs a tenth of what
it costs to find it by collection."""


def run_seed(seed: int) -> Outcome:
    return simulate(draw(seed))


def run_shared(seed: int) -> Outcome:
    return simulate(draw_shared(seed))


def quieten() -> None:
    """Brokers that fail on purpose have much to say."""
    logging.disable(logging.CRITICAL)
    gc.disable()


def parse_seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def outcomes(seeds: Sequence[int], processes: int, run: Callable[[int], Outcome]) -> Iterator[Outcome]:
    """Processes are forked from one that has run seeds already, so that codecs and caches are built once."""
    quieten()
    if len(seeds) == 1:
        yield run(seeds[0])
        return
    for seed in seeds[:PART_SEEDS]:
        run(seed)
    gc.collect()
    gc.freeze()
    parts = PROCESS_SEEDS // PART_SEEDS
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=parts) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=PART_SEEDS)


def tell(outcome: Outcome, lines: int) -> None:
    print(f"\nseed {outcome.seed}: {outcome.violation or 'no rule broken'}")
    print(f"  again: make sim SEEDS={outcome.seed}-{outcome.seed}; trace {outcome.trace_sum}, {outcome.events} events")
    for fault in outcome.fault_list:
        print(f"  fault {fault}")
    for line in outcome.last_lines[-lines:]:
        print(f"  {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=parse_seeds, help="one seed, or first-last")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--lines", type=int, default=LINES_SHOWN, help="events shown of a run that broke a rule")
    parser.add_argument("--transactions", action="store_true", help="only seeds that have transactions")
    parser.add_argument("--shares", action="store_true", help="only seeds that have a share group")
    parser.add_argument("--shares-alone", action="store_true", help="each seed with a share group and nothing else")
    given = parser.parse_args()
    seeds: Sequence[int] = given.seeds
    if given.transactions:
        seeds = [seed for seed in seeds if draw(seed).transactions is not None]
    if given.shares:
        seeds = [seed for seed in seeds if draw(seed).shares is not None]
    run = run_shared if given.shares_alone else run_seed
    faults: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    failing: list[Outcome] = []
    began = told = time.monotonic()
    simulated = 0.0
    for done, outcome in enumerate(outcomes(seeds, given.processes, run), 1):
        faults.update(outcome.faults)
        counts.update(outcome.counts)
        simulated += outcome.simulated_seconds
        if outcome.violation:
            failing.append(outcome)
            tell(outcome, given.lines)
        now = time.monotonic()
        if now - told > 5 or done == len(seeds):
            told = now
            pace = done / (now - began)
            print(
                f"{done} of {len(seeds)} seeds, {pace:.1f} a second, {simulated:.0f} s simulated, "
                f"{counts['acknowledged']} batches acknowledged, {sum(faults.values())} faults, {len(failing)} failing",
                flush=True,
            )
    if len(seeds) == 1 and not failing:
        tell(outcome, given.lines)
    print("faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items())))
    print("failing seeds: " + (", ".join(str(each.seed) for each in sorted(failing, key=lambda o: o.seed)) or "none"))
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
