"""What a consumer group's commit costs the broker: `python bench/group_commits.py [TREE ...]`.

One client commits one offset at a time, of one group, over one connection: each commit waits for the one before it, or
so many are on their way. With several checkouts their brokers run side by side and take turns. Figures are medians
over the rounds. Processor time is that of the broker's process tree, and is what counts on a busy machine.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import processes
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from report import table

from headrace.wire import api
from headrace.wire.codec import encode_request, write_request
from headrace.wire.message import Message

HERE = Path(__file__).resolve().parent.parent
TOPIC, GROUP = "orders", "committing"
VERSION = 8
WINDOWS = (1, 32)
READY_S = 60.0


class Broker:
    """A broker of one checkout, with a topic, and a connection to it that has committed once."""

    def __init__(self, tree: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "headrace.cli.main", "serve", "--data", str(folder), "--listen", "127.0.0.1:0"]
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        self._process = subprocess.Popen(
            [*command, "--set", "http.listen=off"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        assert self._process.stdout is not None
        ready = next(line for line in self._process.stdout if line.startswith(b"ready ")).decode()
        address = dict(word.split("=", 1) for word in ready.split()[1:])["kafka"]
        admin = AdminClient({"bootstrap.servers": address})
        admin.create_topics([NewTopic(TOPIC, 1, 1)])[TOPIC].result()
        consumer = Consumer({"bootstrap.servers": address, "group.id": GROUP, "enable.auto.commit": False})
        consumer.commit(offsets=[TopicPartition(TOPIC, 0, 1)], asynchronous=False)
        consumer.close()
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), READY_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def commits(self, count: int, window: int) -> tuple[float, float]:
        """Seconds, and seconds of the broker's processor, for so many commits."""
        frame = _frame()
        self._socket.sendall(frame)
        answer_bytes = len(self._socket.recv(1 << 16))
        began, cpu = time.perf_counter(), processes.cpu_seconds(self._process.pid)
        for _ in range(count // window):
            self._socket.sendall(frame * window)
            left = answer_bytes * window
            while left:
                left -= len(self._socket.recv(1 << 16))
        return time.perf_counter() - began, processes.cpu_seconds(self._process.pid) - cpu

    def stop(self) -> None:
        self._socket.close()
        processes.stop(self._process)


def _frame() -> bytes:
    part = Message(partition_index=0, committed_offset=7, committed_leader_epoch=-1, committed_metadata="")
    topic = Message(name=TOPIC, partitions=[part])
    body = Message(
        group_id=GROUP, generation_id_or_member_epoch=-1, member_id="", group_instance_id=None, topics=[topic]
    )
    return write_request(api.OFFSET_COMMIT, VERSION, 1, "bench", encode_request(api.OFFSET_COMMIT, VERSION, body))


def measure(brokers: Sequence[Broker], rounds: int, count: int) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """By broker and window, what each round took."""
    taken: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for window in WINDOWS:
            for nth, broker in enumerate(brokers):
                taken.setdefault((nth, window), []).append(broker.commits(count, window))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, metavar="tree", help="checkouts; this one by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=3200, help="commits of a round")
    given = parser.parse_args()
    trees = given.trees or [HERE]
    with tempfile.TemporaryDirectory(prefix="commits-") as folder:
        brokers: list[Broker] = []
        try:
            for nth, tree in enumerate(trees):
                brokers.append(Broker(tree.resolve(), Path(folder) / str(nth)))
            taken = measure(brokers, given.rounds, given.count)
        finally:
            for broker in brokers:
                broker.stop()
    rows = []
    for (nth, window), rounds in taken.items():
        wall_s, cpu_s = (statistics.median(values) for values in zip(*rounds, strict=True))
        figures = f"{given.count / wall_s:,.0f}", f"{cpu_s / given.count * 1e6:.1f}"
        rows.append([str(trees[nth]), str(window), *figures])
    print(table(["tree", "on their way", "commits/s", "broker's CPU, us a commit"], rows))


if __name__ == "__main__":
    main()
