"""Runs the load programs and reads their one line of JSON.

The programs are C on each broker's usual client library (librdkafka, the NATS C client, hiredis), compiled on first use
into the git-ignored `.work/bench`: on a small machine a Python client would take more processor time than the broker.
Without a C compiler or librdkafka, Kafka's protocol is loaded by `load_confluent.py`, which says so.
"""

import functools
import json
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import processes
from contestants import CACHE, HOST, Missing, Running

HERE = Path(__file__).resolve().parent
LOAD_TIMEOUT_S = 120.0
# A broker is quiet when it uses less than this share of one core over the window.
QUIET_CPU_SHARE = 0.15
QUIET_WINDOW_S = 0.1
QUIET_TIMEOUT_S = 2.0
LIBRARIES = {
    "kafka": ("rdkafka", "librdkafka-dev"),
    "nats": ("nats", "libnats-dev"),
    "redis": ("hiredis", "libhiredis-dev"),
}


class Invalid(Exception):
    """The load did not do what it counts as done; its figures must not be used."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Answers of a producing load. Latencies are zero where they were not measured."""

    on_topic: int
    messages: int
    seconds: float
    cpu_s: float
    others_cpu_s: float
    p50_us: float = 0.0
    p99_us: float = 0.0
    p999_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Received:
    """Records of a consuming load, each counted, offsets dense."""

    messages: int
    bytes: int
    seconds: float
    cpu_s: float
    others_cpu_s: float


@dataclass(frozen=True, slots=True)
class Topic:
    name: str
    partitions: int
    message_bytes: int


@functools.cache
def program(load: str) -> tuple[str, ...]:
    """The command that begins a load of this kind, compiled if need be."""
    library, package = LIBRARIES[load]
    source, binary = HERE / f"load_{load}.c", CACHE / "bench" / f"load_{load}"
    newest = max(source.stat().st_mtime, (HERE / "load.h").stat().st_mtime)
    if binary.exists() and binary.stat().st_mtime > newest:
        return (str(binary),)
    compiler = shutil.which("cc") or shutil.which("gcc")
    trouble = "there is no C compiler: apt-get install gcc libc6-dev"
    if compiler is not None:
        binary.parent.mkdir(parents=True, exist_ok=True)
        command = (compiler, "-O2", "-Wall", "-o", str(binary), str(source), f"-l{library}", "-lpthread")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return (str(binary),)
        trouble = f"{source.name} does not compile (apt-get install {package}): {done.stderr.strip()[:300]}"
    if load != "kafka":
        raise Missing(trouble)
    print(f"!! {trouble}\n!! loading by the Python client instead: it costs more than the broker", file=sys.stderr)
    if subprocess.run((sys.executable, "-c", "import confluent_kafka"), capture_output=True, check=False).returncode:
        subprocess.run((sys.executable, "-m", "pip", "install", "-q", "confluent-kafka"), check=True)
    return (sys.executable, str(HERE / "load_confluent.py"))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a load program printed, and the processor time used meanwhile by the broker and by everyone else but the
    program itself: figures taken while others were busy are the machine's, not the broker's."""

    values: dict[str, float]
    cpu_s: float
    others_cpu_s: float


def _command(broker: Running, mode: str, topic: Topic, count: int = 0, window: int = 1) -> tuple[str, ...]:
    words = (mode, HOST, broker.port, topic.name, topic.partitions, count, topic.message_bytes, window)
    return (*program(broker.recipe.load), *(str(word) for word in words))


class Measured(Protocol):
    """A broker under load, whoever has started it."""

    @property
    def port(self) -> int: ...

    def cpu_seconds(self) -> float: ...


def await_quiet(broker: Measured) -> None:
    """Waits until the broker has done what earlier steps left it to do: compiling, deleting, collecting garbage."""
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    used_s = broker.cpu_seconds()
    while time.monotonic() < deadline:
        time.sleep(QUIET_WINDOW_S)
        before_s, used_s = used_s, broker.cpu_seconds()
        if used_s - before_s < QUIET_CPU_SHARE * QUIET_WINDOW_S:
            return


def _run(broker: Running, mode: str, topic: Topic, count: int, window: int = 1) -> Answer:
    """Runs a load program against the broker; the clocks are read when it is told to begin and when it answers."""
    load = subprocess.Popen(
        _command(broker, mode, topic, count, window),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert load.stdin is not None
    assert load.stdout is not None
    assert load.stderr is not None
    watchdog = threading.Timer(LOAD_TIMEOUT_S, load.kill)
    watchdog.start()
    line = ""
    cpu_s = others_cpu_s = 0.0
    try:
        if load.stdout.readline() == "ready\n":
            await_quiet(broker)
            before = _clocks(broker, load)
            load.stdin.write("\n")
            load.stdin.flush()
            line = load.stdout.readline()
            everyone_s, cpu_s, client_s = (b - a for a, b in zip(before, _clocks(broker, load), strict=True))
            others_cpu_s = max(0.0, everyone_s - cpu_s - client_s)
        trouble = load.stderr.read()
        status = load.wait()
    finally:
        watchdog.cancel()
        load.kill()
        for pipe in (load.stdin, load.stdout, load.stderr):
            pipe.close()
    if status != 0 or not line:
        raise Invalid(f"{mode}: status {status}, at most {LOAD_TIMEOUT_S:.0f} s allowed: {trouble.strip()[-300:]}")
    return Answer(json.loads(line), cpu_s, others_cpu_s)


def _clocks(broker: Running, load: subprocess.Popen[str]) -> tuple[float, float, float]:
    return processes.machine_cpu_seconds(), broker.cpu_seconds(), processes.cpu_seconds(load.pid)


def _administer(broker: Running, mode: str, topic: Topic) -> dict[str, int]:
    command = _command(broker, mode, topic)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as late:
        raise Invalid(f"{mode}: not done in {LOAD_TIMEOUT_S:.0f} s") from late
    if done.returncode != 0:
        raise Invalid(f"{mode}: {done.stderr.strip()[-300:]}")
    answer: dict[str, int] = {key: value for key, value in json.loads(done.stdout).items() if key != "mode"}
    return answer


def create(broker: Running, topic: Topic) -> None:
    _administer(broker, "create", topic)


def prime(broker: Running, topic: Topic) -> int:
    """Makes a new topic a lived-in one, and returns how many messages that took.

    The first index entry of every partition costs Kafka milliseconds, once; with 256 new partitions and a short load
    that would hide what a message costs. Redis and NATS keep nothing of that kind.
    """
    return _administer(broker, "prime", topic)["primed"] if broker.recipe.load == "kafka" else 0


def delete(broker: Running, topic: Topic) -> None:
    _administer(broker, "delete", topic)


def send(broker: Running, mode: str, topic: Topic, count: int, window: int = 1) -> Sent:
    """Loads by `produce`, `pipelined`, `sync`, `transactions` or `portions`; every message must be acknowledged."""
    run = _run(broker, mode, topic, count, window)
    answer = run.values
    if answer["delivered"] != count or answer["failed"]:
        raise Invalid(f"{mode}: {answer['delivered']} of {count} acknowledged, {answer['failed']} refused")
    return Sent(
        on_topic=count + int(answer["warmed"]),
        messages=count,
        seconds=answer["seconds"],
        cpu_s=run.cpu_s,
        others_cpu_s=run.others_cpu_s,
        p50_us=answer.get("p50_us", 0.0),
        p99_us=answer.get("p99_us", 0.0),
        p999_us=answer.get("p999_us", 0.0),
    )


def receive(broker: Running, topic: Topic, expected: int) -> Received:
    """Reads the whole topic; what comes out must be what went in, by count, by bytes and by offsets."""
    run = _run(broker, "consume", topic, expected)
    answer = run.values
    received, size = int(answer["received"]), int(answer["bytes"])
    if received != expected or answer["gaps"] or size != expected * topic.message_bytes:
        raise Invalid(f"consume: {received} records of {expected} came out, {size} bytes, {answer['gaps']} gaps")
    return Received(received, size, answer["seconds"], run.cpu_s, run.others_cpu_s)
