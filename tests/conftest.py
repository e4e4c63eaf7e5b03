"""What every test may use: brokers as processes, and the record of what a run has proven.

`--proven FILE` writes, per inventory id, the tests that passed, failed or were skipped (see tools/inventory.py).
`--proof FILE` appends what long runs hand to the fixture `proof_report`, with commit, seed and command.
`--layout shared` runs brokers on that layout of their data folders.
`--apache-kafka DIR` runs the tests that need a broker against Apache Kafka's jars in DIR instead of Headrace,
which shows that they expect what Kafka does.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brokers import LAYOUT_VARIABLE, Broker, Brokers

ROOT = Path(__file__).resolve().parent.parent
proven: dict[str, dict[str, str]] = {}
WORST_LAST = ("passed", "skipped", "failed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("headrace")
    group.addoption("--proven", help="write what was proven to this JSON file")
    group.addoption("--proof", help="append the figures of long runs to this Markdown file")
    group.addoption("--seed", type=int, help="seed of the randomised tests; drawn and printed when not given")
    group.addoption("--layout", choices=["partitioned", "shared"], help="layout of the brokers' data folders")
    group.addoption("--apache-kafka", metavar="DIR", help="test Apache Kafka from these jars instead of Headrace")


def pytest_configure(config: pytest.Config) -> None:
    # A shell that runs something in the background has it ignore Ctrl-C, and all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seed: int | None = config.getoption("--seed")
    config.stash[SEED] = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    if layout := config.getoption("--layout"):
        os.environ[LAYOUT_VARIABLE] = layout
    os.environ["HEADRACE_CONFIG"] = os.devnull  # contexts of whoever runs the tests are no part of them
    os.environ.setdefault("HEADRACE_SPARK_CLASSES", "off")  # nothing is left behind in their cache, nor made there
    # kafka-python reads its schemas the old way; that is not ours to mend.
    config.addinivalue_line("filterwarnings", "ignore:(read|open)_text is deprecated:DeprecationWarning")


SEED = pytest.StashKey[int]()


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[SEED]} (again with --seed {config.stash[SEED]})"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"seed of this run: --seed {config.stash[SEED]}")


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Note the outcome for each id that the test proves; the worst phase and the worst parameter count."""
    function, owner = getattr(item, "function", None), getattr(item, "cls", None)
    ids = (*getattr(function, "proven_ids", ()), *getattr(owner, "proven_ids", ()))
    if not ids or (call.when != "call" and call.excinfo is None):
        return
    outcome = "passed"
    if call.excinfo is not None:
        outcome = "skipped" if call.excinfo.errisinstance(pytest.skip.Exception) else "failed"
    test = item.nodeid.split("[")[0]
    for id in ids:
        outcomes = proven.setdefault(id, {})
        known = outcomes.get(test, outcome)
        outcomes[test] = max(known, outcome, key=WORST_LAST.index)


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = session.config.getoption("--proven")
    if target:
        Path(target).write_text(json.dumps(proven, indent=1, sort_keys=True) + "\n")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this test, drawn from the run's seed and the test's name."""
    drawn = random.Random(f"{request.config.stash[SEED]} {request.node.nodeid}").randrange(1 << 32)
    print(f"seed of this test: {drawn}")
    return drawn


ProofReport = Callable[..., None]


@pytest.fixture
def proof_report(request: pytest.FixtureRequest) -> Iterator[ProofReport]:
    """Call it with figures by name: `proof_report(kills=20, records_acknowledged=81234)`."""
    figures: dict[str, object] = {}
    yield figures.update
    if not figures:
        return
    test = request.node.nodeid
    print(f"figures of {test}: {figures}")
    target = request.config.getoption("--proof")
    if target:
        command = f"make prove ARGS='--seed {request.config.stash[SEED]} {test}'"
        append_proof(Path(target), test, command, request.config.stash[SEED], figures)


def append_proof(target: Path, test: str, command: str, seed: int, figures: dict[str, object]) -> None:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not target.exists():
        target.write_text("# What the long runs have shown\n\nWritten by `make prove`; the newest run is at the end.\n")
    lines = [
        f"\n## {test}",
        f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC; commit: {described.stdout.strip()}; "
        f"Python {sys.version.split()[0]}, {os.cpu_count()} cores",
        f"- command: `{command}`; seed: {seed}",
        *(f"- {name.replace('_', ' ')}: {value}" for name, value in figures.items()),
    ]
    with target.open("a") as file:
        file.write("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def brokers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    jars = request.config.getoption("--apache-kafka")
    started = Brokers(tmp_path_factory.mktemp("brokers"), Path(jars).resolve() if jars else None)
    yield started
    started.close()


@pytest.fixture(scope="session")
def shared_broker(brokers: Brokers) -> Broker:
    """One broker for all tests that only need topics of their own."""
    settings = {"group.initial.rebalance.delay.ms": 50}
    if not brokers.apache_kafka:
        # Records of tests may bear times long past: they are not to go while a test looks at them.
        settings["retention.check.ms"] = 86_400_000
    return brokers.start(settings=settings)


@pytest.fixture
def broker(shared_broker: Broker, request: pytest.FixtureRequest) -> Iterator[Broker]:
    """The shared broker; it has to be alive before and after."""
    shared_broker.check_alive()
    yield shared_broker
    shared_broker.check_alive()


@pytest.fixture
def fresh_broker(brokers: Brokers) -> Iterator[Callable[..., Broker]]:
    """Start a broker for this test alone: `fresh_broker(settings={...}, listen=(...), data=folder)`."""
    mine: list[Broker] = []

    def start(**how: object) -> Broker:
        broker = brokers.start(**how)  # type: ignore[arg-type]
        mine.append(broker)
        return broker

    yield start
    for broker in mine:
        broker.discard()
