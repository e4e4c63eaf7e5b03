"""Runs what `make test` or `make quick` is made of in lanes side by side, each taking the next part when it is free.

    side_by_side.py --proven FILE [arguments of pytest]     all of it
    side_by_side.py --quick [arguments of pytest]           what a minute allows

Tests wait for other processes half of the time, so four lanes keep two cores busy. The parts: tests of Spark's
pipelines and of its sources and sinks, each on a JVM of its own; the checks; tests of our client, with other clients,
of the commands, with brokers, with clusters, and all others; some of the broker's once more on the other layout of
its data.
A part's output is kept in `.work/tests-<part>.log`. When it has ended, one line says how; if it failed, its output is
shown, and at the end what to type to run again what failed. Arguments go to pytest; if they name a file, that alone is
run. What all have proven is put together in one file.

Quick are the tests of the rooms that need no other process, as far as they need nothing beside the package (`needs.py`)
and are not marked `thorough`; those of one broker that a real client uses; lint and types of what changed. Properties
are tried with few examples (tests/hypotheses.py). They wait for nothing, so there is a lane for each of two cores.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import spark_classes
from needs import TESTS, needs_of, tests_of

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".work"
LANES = 4
QUICK_LANES = 2
FOLDERS = {
    "pipelines": ("tests/pipelines",),
    "spark": ("tests/spark",),
    "client": ("tests/client",),
    "brokers": ("tests/arrow", "tests/faults", "tests/kafka_protocol", "tests/http"),
    "cli": ("tests/cli",),
    "clients": ("tests/clients",),
}
CLUSTER_TESTS = (
    *(f"tests/{room}" for room in ("cluster", "coordination", "placement", "replication", "simulator", "virtual")),
    *(
        f"tests/faults/test_{name}.py"
        for name in ("cluster_chaos", "etcd_gone", "transaction_chaos", "transactions_killed")
    ),
    *(f"tests/kafka_protocol/test_{name}.py" for name in ("cluster_clients", "cluster_faults", "cluster_orders")),
    *(f"tests/kafka_protocol/test_{name}.py" for name in ("cluster_routing", "cluster_tls", "archived_elsewhere")),
)
TWICE_TESTED = (
    "tests/clients/test_matrix.py",
    *(f"tests/faults/test_{name}.py" for name in ("kill", "full_disk", "live_fuzz", "start", "compacted_restart")),
    *(f"tests/kafka_protocol/test_{name}.py" for name in ("produce_and_fetch", "cold_reads", "retention_archived")),
)
"""Clients, crashes, fuzz, full disk; `make prove` has the broker's other tests on that layout."""
WITH_PROCESSES = (
    "arrow",
    "cli",
    "client",
    "clients",
    "faults",
    "http",
    "kafka_protocol",
    "old_data",
    "pipelines",
    "registry",
    "simulator",
    "spark",
    "system",
)
"""Tests that start brokers, clients or whole simulated clusters, or use real sockets and disks: not quick."""
OUTCOMES = ("passed", "skipped", "failed")
NOTHING_COLLECTED = 5
STOPPED = -1
POLL_S = 0.05
ENDS_WITHIN_S = 10.0
"""A part that is asked to. A test that runs a pipeline takes SIGTERM for the pipeline's, and the next test goes on."""


class Lanes:
    """Works on a queue of parts; when one fails in a way that makes the others pointless, those under way are ended and
    none is begun any more. A part leads a group of processes, so that what it has started ends with it."""

    def __init__(
        self,
        commands: dict[str, list[str]],
        decisive: str,
        lanes: int = LANES,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.codes: dict[str, int] = {}
        self.again: list[str] = []
        """Commands that run again what failed."""
        self._waiting = deque(commands.items())
        self._decisive = decisive
        self._lanes = lanes
        self._environment = {**os.environ, **environment}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._stopping = False

    def run(self) -> None:
        shown = (WORK / "tests-*.log").relative_to(ROOT)
        print(f"{len(self._waiting)} parts, {self._lanes} at a time; what they say is in {shown}", flush=True)
        threads = [threading.Thread(target=self._work) for _ in range(self._lanes)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._stop()

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._stopping or not self._waiting:
                    return
                name, command = self._waiting.popleft()
                log = WORK / f"tests-{name}.log"
                began = time.monotonic()
                with log.open("w") as output:
                    process = subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=self._environment,
                        stdin=subprocess.DEVNULL,  # another group than the terminal's may not read from it
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        process_group=0,
                    )
                self._running[name] = process
            code = process.wait()
            with self._lock:
                del self._running[name]
                self.codes[name] = STOPPED if self._stopping else code
                self._tell(name, time.monotonic() - began, log.read_text())
            if code and name == self._decisive:
                self._stop()

    def _tell(self, name: str, took_s: float, said: str) -> None:
        code = self.codes[name]
        if code == STOPPED:
            print(f"{name}: stopped after {took_s:.0f} s", flush=True)
        elif code in (0, NOTHING_COLLECTED):
            last = said.splitlines()[-1:] or [""]
            print(f"{name}: {took_s:.0f} s; {last[0].strip('= ')}", flush=True)
        else:
            print(said, f"{name}: FAILED after {took_s:.0f} s", sep="\n", flush=True)
            self.again.append(again(name, said))

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
            groups = [process.pid for process in self._running.values()]
        patience = time.monotonic() + ENDS_WITHIN_S
        signal_groups(groups, signal.SIGTERM)
        while (groups := [group for group in groups if is_alive(group)]) and time.monotonic() < patience:
            time.sleep(POLL_S)
        signal_groups(groups, signal.SIGKILL)


def signal_groups(groups: Iterable[int], number: signal.Signals) -> None:
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, number)


def is_alive(group: int) -> bool:
    """Whether a process of the group is left, be it one that its leader has left behind."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def run(proven: Path, arguments: list[str]) -> int:
    began = time.monotonic()
    parts = {
        **{name: [*folders, *apart(CLUSTER_TESTS)] for name, folders in FOLDERS.items()},
        "others": ["tests", *apart((*CLUSTER_TESTS, *chain.from_iterable(FOLDERS.values())))],
        "clusters": [*CLUSTER_TESTS],
        "shared": [*TWICE_TESTED, "--layout", "shared"],
    }
    files = {name: WORK / f"proven-{name}.json" for name in parts}
    pytest = [sys.executable, "-m", "pytest", *arguments]
    if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments):
        return subprocess.run([*pytest, "--proven", str(proven)], cwd=ROOT, check=False).returncode
    for file in files.values():  # a part that does not come to its end would be spoken for by the last run's
        file.unlink(missing_ok=True)
    tests = {name: [*pytest, "--proven", str(files[name]), *chosen] for name, chosen in parts.items()}
    # The longest first, so that the lanes end together; the checks early, because they fail early. When they are done,
    # the first part has made the classes that every JVM of the next one maps.
    environment = spark_classes.environment()
    tests["pipelines"] = [sys.executable, "tools/spark_classes.py", *tests["pipelines"]]
    first = {name: tests.pop(name) for name in ("pipelines", "others", "client")}
    tests = {name: tests.pop(name) for name in ("spark", "clusters", "cli")} | tests
    lanes = Lanes({**first, "checks": ["make", "--no-print-directory", "check"], **tests}, "checks", LANES, environment)
    lanes.run()
    tell_all(lanes, time.monotonic() - began)
    proven.write_text(json.dumps(together([json.loads(file.read_text()) for file in files.values() if file.exists()])))
    return outcome(lanes)


def quick_tests() -> dict[str, list[str]]:
    """By part, the longest first. A new folder is quick unless it is said to have processes."""
    folders = [folder for folder in sorted(TESTS.iterdir()) if folder.name not in WITH_PROCESSES]
    rooms = {folder.name: f"tests/{folder.name}" for folder in folders if any(folder.glob("test_*.py"))}
    apart = {"wire": [rooms.pop("wire"), rooms.pop("records")], "storage": [rooms.pop("storage")]}
    return {
        "rooms": list(rooms.values()),
        **apart,
        "broker": [
            "tests/kafka_protocol/test_produce_and_fetch.py",
            *(f"tests/test_{name}.py" for name in ("tidy", "unasync")),
        ],
    }


def run_quick(arguments: list[str]) -> int:
    began = time.monotonic()
    WORK.mkdir(exist_ok=True)
    os.environ["FEW_EXAMPLES"] = "1"
    pytest = [sys.executable, "-m", "pytest", "-m", "not long and not thorough", *arguments]
    parts = {
        name: [*pytest, *(str(test.relative_to(ROOT)) for test in tests_of(chosen) if not needs_of(test))]
        for name, chosen in quick_tests().items()
    }
    lanes = Lanes({"checks": [sys.executable, "tools/check.py", "--changed"], **parts}, "checks", QUICK_LANES)
    lanes.run()
    tell_all(lanes, time.monotonic() - began)
    return outcome(lanes)


def again(part: str, said: str) -> str:
    """What to type to run again what failed in a part."""
    if part == "checks":
        return "make check"
    failed = dict.fromkeys(re.findall(r"^(?:FAILED|ERROR) (tests/[^\s\[]+)", said, re.MULTILINE))
    if not failed:
        return f"make test  # {part} did not come to its end: .work/tests-{part}.log says how far it came"
    layout = ("--layout", "shared") if part == "shared" else ()
    return f"make test ARGS='{' '.join((*layout, *failed))}'"


def tell_all(lanes: Lanes, took_s: float) -> None:
    print(
        f"all together: {took_s:.0f} s", *(f"to run again what failed: {command}" for command in lanes.again), sep="\n"
    )


def outcome(lanes: Lanes) -> int:
    codes = list(lanes.codes.values())
    return next((code for code in codes if code not in (0, NOTHING_COLLECTED)), min(codes))


def apart(paths: Iterable[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


def together(found: list[dict[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    merged: dict[str, dict[str, str]] = {}
    for part in found:
        for id, outcomes in part.items():
            known = merged.setdefault(id, {})
            for test, outcome in outcomes.items():
                known[test] = max(outcome, known.get(test, outcome), key=OUTCOMES.index)
    return merged


if __name__ == "__main__":
    if sys.argv[1:2] not in (["--proven"], ["--quick"]) or sys.argv[1:] == ["--proven"]:
        sys.exit(__doc__)
    # Shells let what they start in the background ignore it, and so would the programs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Else what is under way would go on alone.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run_quick(sys.argv[2:]) if sys.argv[1] == "--quick" else run(ROOT / sys.argv[2], sys.argv[3:]))
