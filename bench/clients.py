"""Headrace's Python client beside confluent-kafka, kafka-python and aiokafka: `python bench/clients.py`.

One Headrace broker on the same machine serves all of them. Each row is one kind of work and one size of message; in
each round the clients take turns, every turn in a fresh process (see `client_turns`, which has the settings), and the
medians over the rounds are printed, with ratios within the run. Slow clients get fewer messages; figures are for each
message or for each million.

    send           records handed over as fast as they are taken, until all are acknowledged
    send each      each record is waited for before the next one is sent: latency of a synchronous send
    receive        lists of records
    receive each   record after record, by iteration (confluent-kafka: poll)
    arrow          pyarrow batches of the default columns (confluent-kafka: lists, made into the same columns)

Beside them stands a bare socket, which reads the same answers and does not look at them: no client can be faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from client_turns import WAYS, Turn
from contestants import CONTESTANTS, HOST, Running, start
from report import machine, table
from run import say

from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import list_offsets
from headrace.client.fetch_requests import LATEST
from headrace.records import builder, consumer_records, router

TURN_TIMEOUT_S: Final = 120
SHARE: Final = {"kafka-python": 0.1, "aiokafka": 0.2}
"""Of the messages of a batched row: what keeps a slow client from filling the run."""
OURS: Final = ("headrace", "headrace.aio")
FLOOR: Final = "bare socket"
AIMS: Final = {"receive": 3.0, "arrow": 20.0}
"""How many times confluent-kafka's messages a second."""


@dataclass(frozen=True, slots=True)
class Row:
    kind: str
    message_bytes: int
    count: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.message_bytes} B"


def rows(bulk: int, each: int) -> list[Row]:
    """`bulk` messages of 100 B in batched rows, fewer of 1 KB; `each` synchronous sends."""
    return [
        *(Row("send", size, count) for size, count in ((100, bulk), (1024, bulk // 4))),
        *(Row("send each", size, each) for size in (100, 1024)),
        *(Row("receive", size, count) for size, count in ((100, bulk), (1024, bulk // 4))),
        *(Row("receive each", size, count) for size, count in ((100, bulk // 2), (1024, bulk // 4))),
        *(Row("arrow", size, count) for size, count in ((100, bulk), (1024, bulk // 4))),
    ]


class Contest:
    """One broker, and turns against it."""

    def __init__(self, broker: Running, partitions: int) -> None:
        self._broker = broker
        self._partitions = partitions
        self._bootstrap = f"{HOST}:{broker.port}"
        self._made = 0
        self._full: set[str] = set()

    def turn(self, client: str, row: Row) -> dict[str, float]:
        """One turn's figures; SystemExit if it failed or lost something."""
        count = max(100, int(row.count * (1.0 if row.kind == "send each" else SHARE.get(client, 1.0))))
        sends = row.kind.startswith("send")
        topic = self._topic() if sends else self._filled(row.message_bytes, count)
        asked = Turn(
            client, row.kind, self._bootstrap, topic, self._partitions, count, row.message_bytes,
            self._broker.process.pid,
        )  # fmt: skip
        figures = run_turn(asked)
        if sends:
            there = self._ends(topic)
            if there < count:
                raise SystemExit(f"{client} sent {count} records, {there} are in the log")
            self._delete(topic)
        return {name: value for name, value in figures.items() if isinstance(value, float)}

    def _topic(self) -> str:
        self._made += 1
        name = f"sent-{self._made}"
        with Cluster(self._bootstrap) as cluster:
            operations.create_topic(cluster, name, partitions=self._partitions)
        return name

    def _filled(self, message_bytes: int, count: int) -> str:
        """A topic of so many records, written once, by a client that takes no part in receiving them."""
        name = f"filled-{message_bytes}-{count}"
        if name not in self._full:
            self._full.add(name)
            with Cluster(self._bootstrap) as cluster:
                operations.create_topic(cluster, name, partitions=self._partitions)
            fill(self._bootstrap, name, self._partitions, message_bytes, count)
        return name

    def _ends(self, topic: str) -> int:
        with Cluster(self._bootstrap) as cluster:
            found = list_offsets(cluster, topic, dict.fromkeys(range(self._partitions), LATEST))
            return sum(each.offset for each in found.values())

    def _delete(self, topic: str) -> None:
        with Cluster(self._bootstrap) as cluster:
            operations.delete_topic(cluster, topic)


def fill(bootstrap: str, topic: str, partitions: int, message_bytes: int, count: int) -> None:
    from confluent_kafka import Producer

    producer = Producer({
        "bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 50, "batch.size": 64 << 10,
        "batch.num.messages": 100_000, "queue.buffering.max.messages": 2_000_000,
        "queue.buffering.max.kbytes": 2 << 20,
    })  # fmt: skip
    value = os.urandom(message_bytes)
    for nth in range(count):
        producer.produce(topic, value, partition=nth * partitions // count)
    if producer.flush(TURN_TIMEOUT_S):
        raise SystemExit("the topic to be received could not be filled")


def run_turn(turn: Turn) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("client_turns.py")), json.dumps(asdict(turn))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TURN_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{turn.client}, {turn.row}: {done.stderr.strip()[-1500:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


Taken = dict[Row, dict[str, list[dict[str, float]]]]


def contest(chosen: Sequence[Row], clients: Sequence[str], rounds: int, partitions: int) -> Taken:
    taken: Taken = {row: {name: [] for name in clients if row.kind in WAYS[name]} for row in chosen}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        broker = start(CONTESTANTS["headrace"], Path(folder) / "headrace")
        try:
            turns = Contest(broker, partitions)
            for nth in range(1, rounds + 1):
                for row, by_client in taken.items():
                    for name, figures in by_client.items():
                        figures.append(turns.turn(name, row))
                    told = (f"{name} {figures[-1]['msg_per_s']:,.0f}/s" for name, figures in by_client.items())
                    say(f"round {nth}: {row}: {', '.join(told)}")
        finally:
            broker.stop()
    return taken


def medians(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in figures) for name in figures[0]}


def throughput_table(found: dict[Row, dict[str, dict[str, float]]]) -> str:
    lines = []
    for row, by_client in found.items():
        first = next(iter(by_client.values()))
        for name, each in by_client.items():
            line = [str(row), name, f"{each['msg_per_s']:,.0f}", f"{each['cpu_s_per_million']:.2f}"]
            line += [f"{each['broker_cpu_s_per_million']:.2f}", f"{first['msg_per_s'] / each['msg_per_s']:.2f}"]
            line += [f"{each['cpu_s_per_million'] / first['cpu_s_per_million']:.2f}"]
            line += [f"{each[p]:,.0f}" if p in each else "" for p in ("p50_us", "p99_us")]
            lines.append(line)
    head = ["row", "client", "msg/s", "client CPU-s/M", "broker CPU-s/M", "times slower", "times the CPU"]
    return table([*head, "p50 us", "p99 us"], lines)


def aim_table(found: dict[Row, dict[str, dict[str, float]]]) -> str:
    """What the client is to reach; a missed aim is a line to explain, never a failed run."""
    lines = []
    for row, by_client in found.items():
        if "headrace" not in by_client:
            continue
        ours = by_client["headrace"]["msg_per_s"]
        others = {name: each["msg_per_s"] for name, each in by_client.items() if name not in (*OURS, FLOOR)}
        for name, theirs in others.items():
            aim = AIMS.get(row.kind, 1.0) if name == "confluent-kafka" else 1.0
            verdict = "reached" if ours >= aim * theirs else "MISSED"
            lines.append([str(row), name, f">= {aim:g} x", f"{ours / theirs:.2f} x", verdict])
    return table(["row", "beside", "aim", "measured", "verdict"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python bench/clients.py", description=__doc__)
    parser.add_argument("--short", action="store_true", help="few messages, one round: whether it runs at all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=1_000_000, help="of 100 B in a batched row")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--clients", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rows", nargs="+", choices=["send", "send each", "receive", "receive each", "arrow"])
    parser.add_argument("--json", type=Path, help="write every turn's figures to this file")
    given = parser.parse_args()
    if not (builder.compiled and router.compiled and consumer_records.compiled):
        sys.exit("the kernels are not compiled here: run `pip install -e .` with Cython and a C compiler")
    bulk, each, rounds = (20_000, 100, 1) if given.short else (given.messages, 5_000, given.rounds)
    chosen = [row for row in rows(bulk, each) if given.rows is None or row.kind in given.rows]
    about = machine()
    began = time.monotonic()
    taken = contest(chosen, given.clients, rounds, given.partitions)
    found = {row: {name: medians(figures) for name, figures in by.items()} for row, by in taken.items()}
    print(table(["machine", ""], [[name, text] for name, text in about.items()]), end="\n\n")
    print(f"{given.partitions} partitions, medians of {rounds} rounds, {time.monotonic() - began:,.0f} s\n")
    print(throughput_table(found), end="\n\n")
    print(aim_table(found))
    if given.json:
        turns = [
            {**asdict(row), "client": name, "turns": figures}
            for row, by_client in taken.items()
            for name, figures in by_client.items()
        ]
        given.json.write_text(json.dumps({"machine": about, "turns": turns}, indent=1) + "\n")


if __name__ == "__main__":
    main()
