"""The benchmark: `python bench/run.py` from the clone's root. Starts every contestant on loopback, then goes through
the cells (message size x partitions) with the contestants taking turns in each, and prints medians over the rounds.

Per cell and contestant: a throughput load, the same topic read back with every record counted, then synchronous and
pipelined sends to it, counted likewise. A contestant that cannot be had is named with the reason.
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import loads
from contestants import CONTESTANTS, Missing, Running, start
from loads import Invalid, Topic
from report import (
    LATENCY,
    THROUGHPUT,
    Cell,
    Entrant,
    Figures,
    as_json,
    cell_table,
    entrant_table,
    machine,
    median_of,
    reach_table,
)

SIZES_BYTES = (100, 1024, 10240)
PARTITIONS = (1, 16, 64, 256)
QUICK_CELLS = (Cell(100, 1), Cell(100, 256), Cell(1024, 16), Cell(10240, 1))
BULK_MESSAGES_MAX = 1_000_000
BULK_BYTES = 150_000_000
SYNC_SENDS = 2_000
PIPELINED_SENDS = 8_000
WINDOW = 256
SETTLE_S = 3.0
Taken = dict[Cell, dict[str, list[Figures] | None]]
"""Figures of every round by cell and contestant; None once a record was lost, doubled or refused there."""
WARM_CELLS = (Cell(100, 256), Cell(10240, 4))
WARM_VOLUME = 0.4
WARM_TIMEOUT_S = 120.0
# A pass that is not this much cheaper than the cheapest before it brought nothing; two in a row end the warming.
WARM_GAIN = 0.05


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def bring_up(names: Sequence[str], folder: Path, starts: int) -> tuple[list[Running], dict[str, float], dict[str, str]]:
    """Starts each contestant `starts` times in fresh folders and leaves the last one running."""
    running, start_s, missing = [], {}, {}
    for name in names:
        took_s = []
        try:
            loads.program("kafka" if name == "headrace" else name)
            for attempt in range(starts):
                broker = start(CONTESTANTS[name], folder / f"{name}-{attempt}")
                took_s.append(broker.start_s)
                if attempt < starts - 1:
                    broker.stop()
                    shutil.rmtree(broker.folder)
        except Missing as reason:
            missing[name] = str(reason)
            say(f"{name} is missing: {reason}")
            continue
        running.append(broker)
        start_s[name] = statistics.median(took_s)
        say(f"{name} {broker.recipe.version}: up in {start_s[name]:.2f} s (median of {starts})")
    return running, start_s, missing


def observe_idle(brokers: Sequence[Running], start_s: dict[str, float]) -> list[Entrant]:
    """Memory and processor time of the brokers while nobody asks them anything."""
    time.sleep(SETTLE_S)
    before = [broker.cpu_seconds() for broker in brokers]
    time.sleep(SETTLE_S)
    entrants = []
    for broker, cpu_s in zip(brokers, before, strict=True):
        memory = broker.memory()
        entrants.append(
            Entrant(
                name=broker.recipe.name,
                version=broker.recipe.version,
                settings=broker.recipe.settings,
                start_s=start_s[broker.recipe.name],
                start_cpu_s=broker.start_cpu_s,
                idle_mb=memory.rss_bytes / 1e6,
                idle_shared_once_mb=memory.pss_bytes / 1e6,
                idle_cpu_percent=(broker.cpu_seconds() - cpu_s) / SETTLE_S * 100,
            )
        )
    return entrants


def measure(broker: Running, cell: Cell, label: str, volume: float = 1.0) -> Figures:
    """One contestant, one cell, one round."""
    topic = Topic(f"bench-{label}", cell.partitions, cell.message_bytes)
    count = min(BULK_MESSAGES_MAX, BULK_BYTES // cell.message_bytes)
    count = max(cell.partitions, int(count * broker.recipe.bulk_share * volume))
    try:
        loads.create(broker, topic)
        on_topic = loads.prime(broker, topic)
        sent = loads.send(broker, "produce", topic, count)
        on_topic += sent.on_topic
        received = loads.receive(broker, topic, on_topic)
        memory = broker.memory()
        sync = loads.send(broker, "sync", topic, int(SYNC_SENDS * volume))
        pipelined = loads.send(broker, "pipelined", topic, int(PIPELINED_SENDS * volume), WINDOW)
        loads.receive(broker, topic, on_topic + sync.on_topic + pipelined.on_topic)
    finally:
        try:
            loads.delete(broker, topic)
        except Invalid as trouble:
            say(f"{broker.recipe.name}: {topic.name} was not deleted: {trouble}")
    steps = (sent, received, sync, pipelined)
    others_s = sum(step.others_cpu_s for step in steps)
    sent_bytes = sent.messages * cell.message_bytes
    return Figures(
        produce_msg_per_s=sent.messages / sent.seconds,
        produce_mb_per_s=sent_bytes / sent.seconds / 1e6,
        produce_cpu_s_per_million=sent.cpu_s / sent.messages * 1e6,
        produce_cpu_s_per_gb=sent.cpu_s / sent_bytes * 1e9,
        sync_p50_us=sync.p50_us,
        sync_p99_us=sync.p99_us,
        sync_p999_us=sync.p999_us,
        pipelined_p50_us=pipelined.p50_us,
        pipelined_p99_us=pipelined.p99_us,
        pipelined_p999_us=pipelined.p999_us,
        pipelined_per_s=pipelined.messages / pipelined.seconds,
        pipelined_cpu_us=pipelined.cpu_s / pipelined.messages * 1e6,
        fetch_msg_per_s=received.messages / received.seconds,
        fetch_mb_per_s=received.bytes / received.seconds / 1e6,
        fetch_gb_per_cpu_s=received.bytes / received.cpu_s / 1e9,
        memory_mb=memory.rss_bytes / 1e6,
        others_cpu_percent=others_s / sum(step.seconds for step in steps) / (os.cpu_count() or 1) * 100,
    )


def warm(broker: Running) -> str:
    """Loads a contestant until its costs stop falling: a virtual machine that compiles as it runs starts several times
    dearer than it ends, and must not be measured on the way. The rule is the same for everyone."""
    deadline = time.monotonic() + WARM_TIMEOUT_S
    best = math.inf
    gainless = passes = 0
    while gainless < 2 and time.monotonic() < deadline:
        costs: list[float] = []
        for cell in WARM_CELLS:
            figures = measure(broker, cell, f"warm-{cell}-{passes}", WARM_VOLUME)
            costs += [figures.produce_cpu_s_per_gb, figures.pipelined_cpu_us, 1 / figures.fetch_gb_per_cpu_s]
        cost = statistics.geometric_mean(costs)
        gainless = 0 if cost < (1 - WARM_GAIN) * best else gainless + 1
        best = min(best, cost)
        passes += 1
    outcome = f"{passes} passes" + ("" if gainless >= 2 else ", still getting cheaper when its time was up")
    say(f"{broker.recipe.name} warmed: {outcome}")
    return outcome


def warm_all(brokers: Sequence[Running]) -> dict[str, str]:
    """Warms everyone. One that fails here stays in the run: its cells will say INVALID, where nobody can miss it."""
    warmed = {}
    for broker in brokers:
        try:
            warmed[broker.recipe.name] = warm(broker)
        except Invalid as trouble:
            say(f"!!! INVALID {broker.recipe.name} while warming: {trouble}")
            warmed[broker.recipe.name] = f"nothing: {trouble}"
    return warmed


def run_cells(brokers: Sequence[Running], cells: Sequence[Cell], rounds: int) -> Taken:
    """Every cell, every round, the contestants taking turns, another one first in each round."""
    taken: Taken = {cell: {broker.recipe.name: [] for broker in brokers} for cell in cells}
    for round_number in range(rounds):
        first = round_number % len(brokers)
        order = [*brokers[first:], *brokers[:first]]
        for cell in cells:
            for broker in order:
                name = broker.recipe.name
                rounds_so_far = taken[cell][name]
                if rounds_so_far is None:
                    continue
                try:
                    figures = measure(broker, cell, f"{cell}-{round_number}")
                except Invalid as trouble:
                    say(f"!!! INVALID {name} {cell} round {round_number + 1}: {trouble}")
                    taken[cell][name] = None
                    continue
                rounds_so_far.append(figures)
                say(
                    f"round {round_number + 1} {cell} {name}: {figures.produce_msg_per_s:,.0f} msg/s, "
                    f"{figures.produce_cpu_s_per_million:.3f} CPU-s/M, "
                    f"{figures.pipelined_cpu_us:.1f} CPU-us/request, fetch {figures.fetch_gb_per_cpu_s:.2f} GB/CPU-s; "
                    f"others used {figures.others_cpu_percent:.0f} % of the machine"
                )
    return taken


def medians(taken: Taken) -> dict[Cell, dict[str, Figures | None]]:
    return {
        cell: {name: median_of(rounds) if rounds else None for name, rounds in row.items()}
        for cell, row in taken.items()
    }


def parse_cells(text: str) -> list[Cell]:
    return [Cell(*(int(number) for number in word.split("x"))) for word in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python bench/run.py", description=__doc__)
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, by comma")
    parser.add_argument("--cells", type=parse_cells, help="cells as BYTESxPARTITIONS, by comma: 100x1,10240x16")
    parser.add_argument("--rounds", type=int, help="rounds to take medians over (3; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="four cells, one round")
    parser.add_argument("--dir", type=Path, help="where the brokers' data goes (a new folder under the system's temp)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    names = options.only.split(",")
    for name in names:
        if name not in CONTESTANTS:
            raise SystemExit(f"there is no contestant {name}; there are {', '.join(CONTESTANTS)}")
    every_cell = [Cell(size, partitions) for size in SIZES_BYTES for partitions in PARTITIONS]
    cells = options.cells or (QUICK_CELLS if options.quick else every_cell)
    rounds = options.rounds or (1 if options.quick else 3)
    where, began = machine(), time.monotonic()
    # A terminated run must still stop its brokers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=options.dir))
    brokers: list[Running] = []
    try:
        brokers, start_s, missing = bring_up(names, folder, rounds)
        if not brokers:
            raise SystemExit("no contestant could be had")
        entrants = observe_idle(brokers, start_s)
        warmed = warm_all(brokers)
        taken = run_cells(brokers, cells, rounds)
    finally:
        for broker in brokers:
            broker.stop()
        shutil.rmtree(folder, ignore_errors=True)
    results = medians(taken)
    print_report(where, entrants, missing, warmed, results, rounds, time.monotonic() - began)
    if options.json:
        whole = {
            "machine": where,
            "rounds": rounds,
            "missing": missing,
            "warmed": warmed,
            "entrants": [asdict(e) for e in entrants],
        }
        whole["cells"] = as_json(taken)
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 1 if any(figures is None for row in results.values() for figures in row.values()) else 0


def print_report(
    where: dict[str, str],
    entrants: Sequence[Entrant],
    missing: dict[str, str],
    warmed: dict[str, str],
    results: dict[Cell, dict[str, Figures | None]],
    rounds: int,
    took_s: float,
) -> None:
    print("; ".join(f"{key}: {value}" for key, value in where.items()))
    print(f"medians of {rounds} round(s), contestants taking turns in every cell; the run took {took_s:.0f} s")
    for entrant in entrants:
        print(f"- {entrant.name} {entrant.version}: {entrant.settings}; warmed by {warmed[entrant.name]}")
    for name, reason in missing.items():
        print(f"- {name} is MISSING: {reason}")
    print(
        "produce: linger 5 ms and acks 1 (Kafka protocol), up to 4,000 unanswered (NATS), pipelines of 1,000 (Redis)"
        f"; sync: one at a time; pipelined: one message per request, {WINDOW} unanswered; "
        "no compression; topics of the Kafka protocol are primed past the first index entry of each partition\n"
    )
    print(entrant_table(entrants), end="\n\n")
    print(cell_table(results, THROUGHPUT), end="\n\n")
    print(cell_table(results, LATENCY), end="\n\n")
    for entrant in entrants:
        if entrant.name == "headrace":
            print(reach_table(results, entrant))


if __name__ == "__main__":
    sys.exit(main())
