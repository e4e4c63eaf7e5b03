"""Two checkouts side by side: `python bench/trees.py OLD NEW -- run.py --only headrace --cells 100x1 --rounds 1`.

Runs the same script of each checkout's `bench/` with that checkout's `src` first on the path, the two in turn and
each round in the other order, and prints the median of every figure of their tables, the new one beside the old.
Both use the environment that runs this; a checkout's kernels must be compiled
(`python setup.py build_ext --inplace` in it).
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from report import table

NUMBER = re.compile(r"-?[\d,]*\.?\d+")
LABELS = {"bytes", "partitions", "producers", "replicas", "topics"}
"""Columns of numbers that say which row it is."""
Figures = dict[tuple[str, str], float]
"""By a row's words and a column's head."""


def figures_of(output: str) -> Figures:
    """Every figure in the tables of a script's output."""
    found: Figures = {}
    head: list[str] = []
    for line in output.splitlines():
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not head:
            head = cells
            continue
        if set(line) <= set("|-: "):
            continue
        numbers = {
            name: None if name in LABELS else NUMBER.match(cell)
            for name, cell in zip(head[1:], cells[1:], strict=False)
        }
        words = [cells[0], *(cell for name, cell in zip(head[1:], cells[1:], strict=False) if not numbers[name])]
        for name, number in numbers.items():
            if number:
                found[" ".join(words), name] = float(number[0].replace(",", ""))
    return found


def run(tree: Path, script: list[str]) -> Figures:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, str(tree / "bench" / script[0]), *script[1:]]
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{tree}: {' '.join(script)} ended with {done.returncode}\n{done.stdout}")
    return figures_of(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python bench/trees.py", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every round's figures to this file")
    parser.add_argument("script", nargs="+", help="a file of bench/ and its arguments, behind --")
    given = parser.parse_args()
    old, new = given.old.resolve(), given.new.resolve()
    taken: dict[Path, list[Figures]] = {old: [], new: []}
    for nth in range(given.rounds):
        for tree in (old, new) if nth % 2 == 0 else (new, old):
            began = time.monotonic()
            taken[tree].append(run(tree, given.script))
            print(f"round {nth + 1}, {tree}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    keys = [key for key in taken[new][0] if all(key in figures for rounds in taken.values() for figures in rounds)]
    lines = []
    for key in keys:
        before, after = (statistics.median(figures[key] for figures in taken[tree]) for tree in (old, new))
        lines.append([*key, f"{before:,.6g}", f"{after:,.6g}", f"{after / before:.2f}" if before else ""])
    print(f"`{' '.join(given.script)}`, medians of {given.rounds} rounds\n")
    print(table(["row", "figure", "old", "new", "new/old"], lines))
    if given.json:
        rounds = {
            name: [{" | ".join(key): figure for key, figure in figures.items()} for figures in taken[tree]]
            for name, tree in (("old", old), ("new", new))
        }
        given.json.write_text(json.dumps(rounds, indent=1) + "\n")


if __name__ == "__main__":
    main()
