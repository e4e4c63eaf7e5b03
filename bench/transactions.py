"""What transactions cost: `python bench/transactions.py` from the clone's root, `--quick` for a validity run.

Transactions of 1, 100 and 10,000 messages beside the same portions without a transactional id, both by librdkafka:
messages dealt to the partitions, a flush, and then the commit, whose latency is taken alone. Headrace and Apache Kafka
take turns in each cell. Figures are medians over the rounds.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import loads
from contestants import CONTESTANTS, Missing, Running, start
from loads import Sent, Topic
from report import machine, table

PARTITIONS = 4
MESSAGE_BYTES = 100
SIZES = {1: 1_000, 100: 400, 10_000: 40}
"""Messages of a transaction, and how many of such transactions a round has."""
QUICK_SHARE = 0.05
MODES = ("transactions", "portions")
WARM = 200
"""Transactions before the first round: a JVM has compiled by then what it runs."""


@dataclass(frozen=True, slots=True)
class Cell:
    contestant: str
    messages: int
    mode: str


def measure(broker: Running, cell: Cell, transactions: int, name: str) -> Sent:
    topic = Topic(name, PARTITIONS, MESSAGE_BYTES)
    loads.create(broker, topic)
    loads.prime(broker, topic)
    try:
        return loads.send(broker, cell.mode, topic, cell.messages * transactions, cell.messages)
    finally:
        loads.delete(broker, topic)


def run(brokers: Sequence[Running], rounds: int, share: float) -> dict[Cell, list[Sent]]:
    taken: dict[Cell, list[Sent]] = {}
    for broker in brokers:
        measure(broker, Cell(broker.recipe.name, 10, "transactions"), max(int(WARM * share), 1), "warm")
    for nth in range(rounds):
        for messages, transactions in SIZES.items():
            for mode in MODES:
                for broker in brokers if nth % 2 == 0 else reversed(brokers):
                    cell = Cell(broker.recipe.name, messages, mode)
                    count = max(int(transactions * share), 2)
                    taken.setdefault(cell, []).append(measure(broker, cell, count, f"{mode}-{messages}-{nth}"))
        print(f"round {nth + 1} of {rounds}", file=sys.stderr, flush=True)
    return taken


def rows_of(taken: dict[Cell, list[Sent]]) -> list[list[str]]:
    rows = []
    for cell, sent in taken.items():
        per_s = statistics.median(one.messages / one.seconds for one in sent)
        cpu_us = statistics.median(one.cpu_s / one.messages * 1e6 for one in sent)
        p50_ms, p99_ms = (statistics.median(getattr(one, name) / 1e3 for one in sent) for name in ("p50_us", "p99_us"))
        others = statistics.median(one.others_cpu_s / one.seconds for one in sent) * 100
        commit = (f"{p50_ms:.2f}", f"{p99_ms:.2f}") if cell.mode == "transactions" else ("-", "-")
        words = [f"{cell.contestant}, {cell.messages:,} a {cell.mode.removesuffix('s')}"]
        rows.append(
            [*words, f"{per_s:,.0f}", f"{per_s / cell.messages:,.1f}", *commit, f"{cpu_us:.1f}", f"{others:.0f}"]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="headrace,kafka", help="contestants, by comma")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a twentieth of it, one round: does it run at all?")
    parser.add_argument("--json", type=Path, help="write every round's figures to this file")
    given = parser.parse_args()
    folder, began = Path(tempfile.mkdtemp(prefix="headrace-transactions-")), time.monotonic()
    brokers: list[Running] = []
    try:
        for name in given.only.split(","):
            try:
                brokers.append(start(CONTESTANTS[name], folder / name))
            except Missing as why:
                print(f"{name} is missing: {why}", file=sys.stderr)
        taken = run(brokers, 1 if given.quick else given.rounds, QUICK_SHARE if given.quick else 1.0)
    finally:
        for broker in brokers:
            broker.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print("; ".join(f"{key}: {value}" for key, value in machine().items()))
    for broker in brokers:
        print(f"- {broker.recipe.name} {broker.recipe.version}: {broker.recipe.settings}")
    print(
        f"{PARTITIONS} partitions, messages of {MESSAGE_BYTES} bytes; the run took {time.monotonic() - began:.0f} s\n"
    )
    head = ["load", "msg/s", "portions/s", "commit p50 ms", "commit p99 ms", "broker's CPU, us a msg", "others' CPU %"]
    print(table(head, rows_of(taken)))
    if given.json:
        figures = [
            {"contestant": cell.contestant, "messages": cell.messages, "mode": cell.mode, "seconds": one.seconds}
            | {"sent": one.messages, "p50_us": one.p50_us, "p99_us": one.p99_us, "cpu_s": one.cpu_s}
            for cell, sent in taken.items()
            for one in sent
        ]
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
