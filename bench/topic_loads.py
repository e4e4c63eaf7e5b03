"""Loads one broker's many topics by `load_topics.c`: topics created, batches built beforehand, every answer counted.

The program is plain C on sockets, compiled on first use into the git-ignored `.work/bench`. It sends batches that were
built once, here, so that on a small machine nearly all processor time is the broker's.
"""

import functools
import json
import os
import random
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import processes
from contestants import CACHE, HOST, Missing
from loads import Invalid, Measured, await_quiet

from headrace.client.admin.cluster import Cluster
from headrace.client.errors import check
from headrace.records import kernel
from headrace.wire import api as apis
from headrace.wire.message import Message

SOURCE = Path(__file__).resolve().with_name("load_topics.c")
PRODUCERS = 4
CONSUMERS = 4
LOAD_TIMEOUT_S = 120.0
CREATE_TIMEOUT_MS = 120_000
TOPICS_A_REQUEST = 500
KNOWN_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class TopicSet:
    """Topics of one partition each, in one durability."""

    name: str
    count: int
    durability: str

    def names(self) -> list[str]:
        return [f"{self.name}-{nth:04}" for nth in range(self.count)]


@dataclass(frozen=True, slots=True)
class Shape:
    """How the load looks: what a batch holds, how many topics a request has, how many batches are unanswered."""

    message_bytes: int
    batch_messages: int
    topics_per_request: int
    batches_unanswered: int

    @property
    def batch_bytes(self) -> int:
        return self.message_bytes * self.batch_messages

    def window(self) -> int:
        """Requests unanswered on each connection."""
        return max(1, self.batches_unanswered // PRODUCERS // self.topics_per_request)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the program counted, and the processor time of the broker and of everyone else meanwhile."""

    counted: dict[str, float]
    broker_cpu_s: float
    others_cpu_s: float


@functools.cache
def compiled(source: Path) -> str:
    """A program in plain C, compiled if need be."""
    binary = CACHE / "bench" / source.stem
    newest = max(source.stat().st_mtime, source.with_name("load.h").stat().st_mtime)
    if binary.exists() and binary.stat().st_mtime > newest:
        return str(binary)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Missing("there is no C compiler: apt-get install gcc libc6-dev")
    binary.parent.mkdir(parents=True, exist_ok=True)
    command = (compiler, "-O2", "-Wall", "-Wextra", "-o", str(binary), str(source))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"{source.name} does not compile: {done.stderr.strip()[:300]}")
    return str(binary)


def create(
    broker: Measured,
    topics: TopicSet,
    replicas: Sequence[int] = (),
    configs: Mapping[str, str] | None = None,
) -> None:
    """The topics on one broker, or on these, of which the first leads."""
    names = topics.names()
    configs = configs or {"durability": topics.durability}
    with Cluster(f"{HOST}:{broker.port}", timeout_ms=CREATE_TIMEOUT_MS) as cluster:
        for first in range(0, len(names), TOPICS_A_REQUEST):
            wanted = [
                Message(
                    name=topic,
                    num_partitions=-1 if replicas else 1,
                    replication_factor=-1 if replicas else 1,
                    assignments=[Message(partition_index=0, broker_ids=list(replicas))] if replicas else [],
                    configs=[Message(name=name, value=value) for name, value in configs.items()],
                )
                for topic in names[first : first + TOPICS_A_REQUEST]
            ]
            request = Message(topics=wanted, timeout_ms=CREATE_TIMEOUT_MS)
            answer = cluster.call(cluster.controller(), apis.CREATE_TOPICS, request, CREATE_TIMEOUT_MS)
            for created in answer.topics:
                check(created.error_code, f"create topic {created.name}", created.error_message)
    _await_known(broker, names)


def _await_known(broker: Measured, names: Sequence[str]) -> None:
    """The controller knows new topics first; the load goes to this broker."""
    deadline = time.monotonic() + CREATE_TIMEOUT_MS / 1000
    with Cluster(f"{HOST}:{broker.port}", timeout_ms=CREATE_TIMEOUT_MS) as cluster:
        while (refused := cluster.topology(names).refused) and time.monotonic() < deadline:
            time.sleep(KNOWN_POLL_S)
    if refused:
        raise Invalid(f"{len(refused)} topics are not known to the broker that is to be loaded")


def write_plan(path: Path, topics: TopicSet, shape: Shape) -> Path:
    """The program's input: a batch for every topic, of bytes that do not compress and that no other topic has."""
    draw = random.Random(shape.message_bytes)
    now_ms = int(time.time() * 1000)
    payload = draw.randbytes(shape.batch_bytes)
    with path.open("wb") as plan:
        plan.write(struct.pack("=I", topics.count))
        for name in topics.names():
            label = name.encode()
            values = [
                label + payload[at + len(label) : at + shape.message_bytes]
                for at in range(0, len(payload), shape.message_bytes)
            ]
            batch = kernel.build([(now_ms, None, value, ()) for value in values])
            plan.write(struct.pack("=H", len(label)) + label)
            plan.write(struct.pack("=II", len(values), len(batch)) + batch)
    return path


class TopicLoad:
    """One run of the program, connected to one broker; use as a context manager."""

    def __init__(self, broker: Measured, plan: Path, topics: TopicSet, shape: Shape) -> None:
        self._broker = broker
        words = (
            *(HOST, broker.port, plan, PRODUCERS, shape.topics_per_request, shape.window()),
            min(CONSUMERS, topics.count),
        )
        self._process = subprocess.Popen(
            (compiled(SOURCE), *map(str, words)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        try:
            if self._line() != "ready\n":
                raise self._broken("connecting")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def tell(self, command: str, *, quietly: bool = False) -> Answer:
        """One command and its answer; `quietly` waits before it until nothing is left of what came before."""
        if quietly:
            os.sync()
            await_quiet(self._broker)
        before = self._clocks()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._broken(command) from None
        line = self._line()
        everyone_s, broker_s, client_s = (b - a for a, b in zip(before, self._clocks(), strict=True))
        if not line:
            raise self._broken(command)
        counted: dict[str, Any] = json.loads(line)
        return Answer(counted, broker_s, max(0.0, everyone_s - broker_s - client_s))

    def _clocks(self) -> tuple[float, float, float]:
        own_s = processes.cpu_seconds(self._process.pid)
        return processes.machine_cpu_seconds(), self._broker.cpu_seconds(), own_s

    def _line(self) -> str:
        assert self._process.stdout is not None
        watchdog = threading.Timer(LOAD_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            return self._process.stdout.readline()
        finally:
            watchdog.cancel()

    def _broken(self, command: str) -> Invalid:
        assert self._process.stderr is not None
        self._process.kill()
        self._process.wait()
        return Invalid(f"{command}: {self._process.stderr.read().strip()[-300:] or 'the load ended without a word'}")
