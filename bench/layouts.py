"""The two storage layouts beside each other: `python bench/layouts.py` from the clone's root, `--short` for minutes.

The axis is that of FMQ's plan for such a comparison: 1, 8, 16, 64, 128, 256 topics (and 2,000), messages of 100 B, 1 KB
and 10 KB, acknowledged from the disk and from the page cache, producers alone and with consumers. In every cell the
layouts take turns, each on its own `headrace serve` in a folder on the same disk, on topics that were written before.

The load: four connections, each with a quarter of the topics, send batches built beforehand (`load_topics.c`). The
number of unanswered batches is the same in all cells, so that only their spread over topics differs. What was
acknowledged is read back and compared byte by byte, or the cell is INVALID. At the end: one cold topic of 256 is read.
"""

import argparse
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from cold_read import chosen_topics, evict, sample
from contestants import Recipe, Running, headrace, headrace_program, start
from layout_report import (
    LAYOUTS,
    MANY_TOPICS,
    PARTITIONED,
    SHARED,
    Cell,
    ColdTaken,
    Figures,
    Row,
    Taken,
    add,
    aims_table,
    as_json,
    cell_table,
    cold_table,
    median_of,
)
from loads import Invalid
from report import machine
from topic_loads import PRODUCERS, Shape, TopicLoad, TopicSet, create, write_plan

SETTING = "log.layout"
COMMIT_LOG = "@commitlog"
DURABILITIES = ("disk", "os")
LOADS = ("produce", "both")
# What a producer that lingers 5 ms gathers for one topic at 4,000, 800 and 200 messages a second.
BATCH_MESSAGES = {100: 20, 1024: 4, 10240: 1}
BATCHES_UNANSWERED = 512
PRIME_BATCHES = 3
COLD_MESSAGE_BYTES = 1024
# A busy machine gets fewer rounds, not a longer run.
LAST_ROUND_S = 1080.0
# To create and remove so many takes longer than to measure them.
ONE_ROUND_TOPICS = 1000


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    topics: tuple[int, ...]
    message_bytes: tuple[int, ...]
    rounds: int
    turns: int
    turn_s: float
    turn_bytes: int
    cold_bytes: int
    cold_samples: int


FULL = Extent((1, 8, 16, 64, 128, 256, 2000), (100, 1024, 10240), 2, 3, 0.5, 100_000_000, 1_000_000_000, 9)
SHORT = Extent((1, 16, 256), (100, 1024), 1, 5, 0.5, 100_000_000, 500_000_000, 5)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def layouts_served() -> tuple[str, ...]:
    """The layouts that this broker knows; before there was a choice, there was one."""
    done = subprocess.run(
        (headrace_program(), "serve", "--print-config", "--json"), capture_output=True, text=True, check=True
    )
    named = {row["setting"] for row in json.loads(done.stdout)}
    return LAYOUTS if SETTING in named else (PARTITIONED,)


def bring_up(layouts: Sequence[str], folder: Path, stack: ExitStack) -> dict[str, Running]:
    """A broker per layout, each in a new folder or, if it has one, on its old data; stopped with the stack."""
    brokers = {}
    for layout in layouts:
        data = folder / layout / "data"
        runs = sum(1 for _ in (folder / layout).glob("run-*"))

        def recipe(run_folder: Path, port: int, layout: str = layout, data: Path = data) -> Recipe:
            plain = headrace(run_folder, port)
            words = list(plain.command)
            words[words.index("--data") + 1] = str(data)
            words[words.index("--http") + 1] = "off"
            chosen = ("--set", f"{SETTING}={layout}") if len(layouts) > 1 else ()
            return replace(plain, name=layout, command=(*words, *chosen))

        started = start(recipe, folder / layout / f"run-{runs}")
        stack.callback(started.stop)
        if (data / COMMIT_LOG).exists() != (layout == SHARED):
            raise SystemExit(f"{data} does not have the layout {layout}: nothing that is measured on it would be true")
        brokers[layout] = replace(started, folder=folder / layout)
    return brokers


def shape_of(message_bytes: int, topics: int, topics_per_request: int) -> Shape:
    at_once = max(1, min(topics_per_request, topics // PRODUCERS))
    return Shape(message_bytes, BATCH_MESSAGES[message_bytes], at_once, BATCHES_UNANSWERED)


def measure(load: TopicLoad, cell: Cell, shape: Shape, extent: Extent) -> Figures:
    """One layout, one cell, one turn."""
    batches = extent.turn_bytes // shape.batch_bytes
    answer = load.tell(f"{cell.load} {extent.turn_s} {batches}", quietly=True)
    counted = answer.counted
    messages = int(counted["acknowledged"])
    if messages != int(counted["batches"]) * shape.batch_messages:
        raise Invalid(f"{messages} messages in {counted['batches']} batches were acknowledged")
    if cell.load == "both" and int(counted["consumed"]) != messages:
        raise Invalid(f"{messages} messages were acknowledged, {counted['consumed']} came out beside them")
    seconds = max(counted["seconds"], counted["consumed_seconds"])
    return Figures(
        messages=messages,
        msg_per_s=messages / seconds,
        mb_per_s=messages * cell.message_bytes / seconds / 1e6,
        cpu_s_per_million=answer.broker_cpu_s / messages * 1e6,
        p50_ms=counted["p50_us"] / 1e3,
        p99_ms=counted["p99_us"] / 1e3,
        client_cpu_percent=counted["client_cpu_s"] / seconds * 100,
        others_cpu_percent=answer.others_cpu_s / seconds * 100,
    )


def run_cell(brokers: dict[str, Running], cell: Cell, topics: TopicSet, shape: Shape, extent: Extent) -> Row:
    """The layouts take short turns, so that what else the machine does weighs on both alike; then all is read back."""
    row: Row = {layout: [] for layout in brokers}
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        plan = write_plan(Path(scratch) / "plan", topics, shape)
        loads = {}
        for layout, broker in brokers.items():
            loads[layout] = stack.enter_context(TopicLoad(broker, plan, topics, shape))
        primed = {layout: prime(row, layout, load, topics) for layout, load in loads.items()}
        for turn in range(extent.turns):
            for layout in list(brokers)[:: 1 if turn % 2 else -1]:
                take(row, layout, loads[layout], cell, shape, extent)
        for layout, load in loads.items():
            read_back(row, layout, load, cell, primed[layout])
    for layout, figures in row.items():
        if figures:
            middle = median_of(figures)
            say(
                f"{cell} {layout}: {middle.msg_per_s:,.0f} msg/s, {middle.mb_per_s:,.0f} MB/s, "
                f"{middle.cpu_s_per_million:.3f} CPU-s/M, p99 {middle.p99_ms:.1f} ms; "
                f"client {middle.client_cpu_percent:.0f} %, others {middle.others_cpu_percent:.0f} %"
            )
    return row


def prime(row: Row, layout: str, load: TopicLoad, topics: TopicSet) -> int:
    """A few batches to each topic, so that no figure has the birth of files in it; how many messages that was."""
    try:
        return int(load.tell(f"produce 60 {PRIME_BATCHES * max(topics.count, PRODUCERS)}").counted["acknowledged"])
    except Invalid as trouble:
        give_up(row, layout, trouble)
        return 0


def take(row: Row, layout: str, load: TopicLoad, cell: Cell, shape: Shape, extent: Extent) -> None:
    turns = row[layout]
    if turns is None:
        return
    try:
        turns.append(measure(load, cell, shape, extent))
    except Invalid as trouble:
        give_up(row, layout, trouble)


def read_back(row: Row, layout: str, load: TopicLoad, cell: Cell, primed: int) -> None:
    """Everything that was acknowledged comes out again, or the figures are void."""
    turns = row[layout]
    if turns is None:
        return
    expected = primed + sum(int(turn.messages) for turn in turns)
    try:
        read = int(load.tell(f"read 0 {cell.topics}").counted["read"])
        if read != expected:
            raise Invalid(f"{expected} messages were acknowledged, {read} can be read")
    except Invalid as trouble:
        give_up(row, layout, trouble)


def give_up(row: Row, layout: str, trouble: Invalid) -> None:
    say(f"!!! INVALID {layout}: {trouble}")
    row[layout] = None


def run_topics(taken: Taken, topics: int, layouts: Sequence[str], extent: Extent, per_request: int) -> None:
    """All cells with so many topics, once, on fresh brokers."""
    with tempfile.TemporaryDirectory(prefix="headrace-layouts-") as scratch, ExitStack() as stack:
        brokers = bring_up(layouts, Path(scratch), stack)
        for broker in brokers.values():
            stack.callback(
                broker.process.kill
            )  # nobody wants the data: a clean stop of many topics would only take time
        for durability in DURABILITIES:
            topic_set = TopicSet(durability, topics, durability)
            for broker in brokers.values():
                create(broker, topic_set)
            for message_bytes, load in itertools.product(extent.message_bytes, LOADS):
                cell = Cell(durability, load, message_bytes, topics)
                shape = shape_of(message_bytes, topics, per_request)
                add(taken, cell, run_cell(brokers, cell, topic_set, shape, extent))


def run_cold(layouts: Sequence[str], extent: Extent, per_request: int) -> ColdTaken:
    taken: ColdTaken = {layout: [] for layout in layouts}
    topics = TopicSet("cold", MANY_TOPICS, "os")
    shape = shape_of(COLD_MESSAGE_BYTES, MANY_TOPICS, per_request)
    batches = extent.cold_bytes // shape.batch_bytes
    with tempfile.TemporaryDirectory(prefix="headrace-layouts-") as scratch:
        folder = Path(scratch)
        plan = write_plan(folder / "plan", topics, shape)
        with ExitStack() as stack:
            for broker in bring_up(layouts, folder, stack).values():
                create(broker, topics)
                with TopicLoad(broker, plan, topics, shape) as load:
                    load.tell(f"produce 60 {batches}")
        for layout in layouts:
            evict(folder / layout)
        with ExitStack() as stack:
            brokers = bring_up(layouts, folder, stack)
            loads = {
                layout: stack.enter_context(TopicLoad(broker, plan, topics, shape))
                for layout, broker in brokers.items()
            }
            for load in loads.values():
                load.tell("whole")
            for topic in chosen_topics(topics.count, extent.cold_samples):
                for layout, broker in brokers.items():
                    take_cold(taken, layout, broker, loads[layout], topic)
    return taken


def take_cold(taken: ColdTaken, layout: str, broker: Running, load: TopicLoad, topic: int) -> None:
    samples = taken[layout]
    if samples is None:
        return
    try:
        figures = sample(broker, load, topic)
    except Invalid as trouble:
        say(f"!!! INVALID cold read of {layout}: {trouble}")
        taken[layout] = None
        return
    samples.append(figures)
    say(
        f"cold topic {topic} {layout}: {figures.topic_mb:.1f} MB in {figures.seconds * 1000:.0f} ms, "
        f"{figures.disk_mb:.1f} MB from the disk"
    )


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python bench/layouts.py", description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer cells and rounds, a few minutes")
    parser.add_argument("--topics", type=numbers, help="counts of topics, by comma")
    parser.add_argument(
        "--bytes", type=numbers, help=f"message sizes, by comma, of {', '.join(map(str, BATCH_MESSAGES))}"
    )
    parser.add_argument("--rounds", type=int, help="rounds to take medians over")
    parser.add_argument(
        "--topics-per-request", type=int, default=1, help="topics in one produce request, one batch each (1)"
    )
    parser.add_argument("--cold", action=argparse.BooleanOptionalAction, default=True, help="the cold read too")
    parser.add_argument("--json", type=Path, help="write the figures of every round here")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    extent = SHORT if options.short else FULL
    extent = replace(
        extent,
        topics=options.topics or extent.topics,
        message_bytes=options.bytes or extent.message_bytes,
        rounds=options.rounds or extent.rounds,
    )
    where, began = machine(), time.monotonic()
    # A terminated run must still stop its brokers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    layouts = layouts_served()
    taken: Taken = {}
    for nth in range(extent.rounds):
        for topics in extent.topics:
            if nth and time.monotonic() - began > LAST_ROUND_S:
                say(f"no time for round {nth + 1} with {topics} topic(s)")
            elif topics < ONE_ROUND_TOPICS:
                say(f"round {nth + 1} of {extent.rounds}, {topics} topic(s)")
                run_topics(taken, topics, layouts, extent, options.topics_per_request)
            elif nth == 0:
                say(f"all rounds in one, {topics} topic(s)")
                all_turns = replace(extent, turns=extent.turns * extent.rounds)
                run_topics(taken, topics, layouts, all_turns, options.topics_per_request)
    cold = run_cold(layouts, extent, options.topics_per_request) if options.cold else {}
    took_s = time.monotonic() - began
    print("; ".join(f"{key}: {value}" for key, value in where.items()))
    turns = extent.rounds * extent.turns
    print(
        f"medians of up to {turns} turns of {extent.turn_s} s in {extent.rounds} round(s); the run took {took_s:.0f} s"
    )
    print("times: median of shared / partitioned over turns that followed each other")
    batches = ", ".join(f"{count} x {size:,} B" for size, count in BATCH_MESSAGES.items())
    print(
        f"{PRODUCERS} connections, {BATCHES_UNANSWERED} batches unanswered, batches of {batches}, "
        f"up to {options.topics_per_request} topic(s) in a request, acks=-1, no compression\n"
    )
    print(cell_table(taken), end="\n\n")
    if cold:
        print(cold_table(cold), end="\n\n")
    print(aims_table(taken, cold))
    if options.json:
        whole = {"machine": where, "rounds": extent.rounds, "topics_per_request": options.topics_per_request}
        options.json.write_text(json.dumps(whole | as_json(taken, cold), indent=1) + "\n")
    invalid = any(figures is None for row in taken.values() for figures in row.values())
    return 1 if invalid or any(samples is None for samples in cold.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
