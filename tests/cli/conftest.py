"""The command line as a person runs it: a process, its output, its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from brokers import DIES_WITH_PARENT, Broker
from headrace.cli.main import main

DEADLINE_S = 120
Finished = subprocess.CompletedProcess[str]
Run = Callable[..., Finished]
COMMAND = [sys.executable, "-m", "headrace.cli.main"]


def environment(bootstrap: str | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    kept["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent / "users_environment"), *sys.path])
    return kept | ({"HEADRACE_BOOTSTRAP": bootstrap} if bootstrap else {})


def run_command(*arguments: str, bootstrap: str | None = None, stdin: str | bytes = "", exit_code: int = 0) -> Finished:
    given = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [*COMMAND, *arguments],
        input=given,
        capture_output=True,
        env=environment(bootstrap),
        timeout=DEADLINE_S,
        check=False,
    )
    out, err = done.stdout.decode(errors="surrogateescape"), done.stderr.decode()
    assert done.returncode == exit_code, f"exit code {done.returncode} of {arguments}\n{out}\n{err}"
    assert "Traceback" not in err, err
    return Finished(arguments, done.returncode, out, err)


@pytest.fixture
def alone() -> Run:
    """Run a command that needs no broker."""
    return run_command


@pytest.fixture
def run(broker: Broker) -> Run:
    """`run("topic", "list", exit_code=0, stdin="...")` against the shared broker."""

    def call(*arguments: str, stdin: str | bytes = "", exit_code: int = 0) -> Finished:
        return run_command(*arguments, bootstrap=broker.bootstrap, stdin=stdin, exit_code=exit_code)

    return call


class Running:
    """A command that goes on until it is interrupted."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.process = process
        self._errors = errors
        assert process.stdout is not None
        self._output: IO[bytes] = process.stdout

    def lines(self, count: int) -> list[str]:
        """The next lines of its output; blocks until they are there, as long as the test's timeout allows."""
        return [self._output.readline().decode().rstrip("\n") for _ in range(count)]

    def interrupt(self) -> tuple[int, str]:
        """Ctrl-C; the exit code and what was said on standard error."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(DEADLINE_S)
        return code, self._errors.read_text()


@pytest.fixture
def start(broker: Broker, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str) -> Running:
        errors = tmp_path / f"stderr-{len(started)}"
        with errors.open("wb") as target:
            process = subprocess.Popen(
                [*DIES_WITH_PARENT, *COMMAND, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=target,
                env=environment(broker.bootstrap),
            )
        started.append(process)
        return Running(process, errors)

    yield begin
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def topic(broker: Broker) -> Callable[..., str]:
    def make(partitions: int = 1, *options: str) -> str:
        name = f"cli-{uuid.uuid4().hex[:12]}"
        given = ("--partitions", str(partitions), "--bootstrap", broker.bootstrap, *options)
        assert main(["topic", "create", name, *given]) == 0
        return name

    return make
