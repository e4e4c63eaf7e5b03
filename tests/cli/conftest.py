"""The command line as a person runs it: a process, its output, its exit code."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import click
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
    kept["HEADRACE_CONFIG"] = os.devnull
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


def on_terminal(arguments: list[str], bootstrap: str, columns: int = 80) -> str:
    """What Python writes to a terminal of so many columns, without its styles."""
    ours, theirs = os.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environ = {name: value for name, value in environment(bootstrap).items() if name != "COLUMNS"}
    process = subprocess.Popen([sys.executable, *arguments], stdout=theirs, env={**environ, "TERM": "xterm"})
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux ends a terminal whose other side is gone with EIO.
        while read := os.read(ours, 65536):
            shown += read
    os.close(ours)
    assert process.wait(60) == 0, shown.decode()
    return click.unstyle(shown.decode()).replace("\r\n", "\n")


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


@pytest.fixture
def inside(broker: Broker, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Run:
    """As `run`, without a process for it: half a second less each time."""

    def call(*arguments: str, stdin: str | bytes = "", exit_code: int = 0) -> Finished:
        given = tmp_path / "stdin"
        given.write_bytes(stdin.encode() if isinstance(stdin, str) else stdin)
        before, handler = os.dup(0), signal.getsignal(signal.SIGINT)
        with pytest.MonkeyPatch.context() as patch, given.open("rb") as source:
            patch.setenv("HEADRACE_BOOTSTRAP", broker.bootstrap)
            patch.setattr(sys, "stdin", source)
            capfdbinary.readouterr()
            os.dup2(source.fileno(), 0)
            try:
                code = main(list(arguments))
            finally:
                os.dup2(before, 0)
                os.close(before)
                signal.signal(signal.SIGINT, handler)
        out, err = (part.decode(errors="surrogateescape") for part in capfdbinary.readouterr())
        assert code == exit_code, f"exit code {code} of {arguments}\n{out}\n{err}"
        return Finished(arguments, code, out, err)

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

    @property
    def said(self) -> str:
        """On standard error."""
        return self._errors.read_text()

    def interrupt(self) -> tuple[int, str]:
        """Ctrl-C; the exit code and what was said on standard error."""
        return self.end(signal.SIGINT)

    def end(self, number: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        return code, self.said


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


class Terminal:
    """A command on a terminal of 24 lines of 100 characters."""

    def __init__(self, bootstrap: str, *arguments: str) -> None:
        self._screen, side = os.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.process = subprocess.Popen(
            [*DIES_WITH_PARENT, *COMMAND, *arguments],
            stdin=side,
            stdout=side,
            stderr=side,
            env=environment(bootstrap) | {"TERM": "xterm"},
            start_new_session=True,
            # So that ctrl-C is a signal. Nothing else runs between fork and exec.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        os.close(side)

    def until(self, text: str) -> str:
        """What is written up to and with the text; blocks as long as the test's timeout allows."""
        shown = b""
        while text.encode() not in shown:
            shown += os.read(self._screen, 1)
        return shown.decode(errors="replace")

    def type(self, keys: bytes) -> None:
        os.write(self._screen, keys)

    def wait(self) -> int:
        """The exit code; what it writes until then is read, so that it can end."""
        with contextlib.suppress(OSError):  # so Linux tells that the other side is closed
            while os.read(self._screen, 10_000):
                pass
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


@pytest.fixture
def terminal(broker: Broker) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def begin(*arguments: str) -> Terminal:
        opened.append(Terminal(broker.bootstrap, *arguments))
        return opened[-1]

    yield begin
    for each in opened:
        each.close()


@pytest.fixture
def topic(broker: Broker) -> Callable[..., str]:
    def make(partitions: int = 1, *options: str) -> str:
        name = f"cli-{uuid.uuid4().hex[:12]}"
        given = ("--partitions", str(partitions), "--bootstrap", broker.bootstrap, *options)
        assert main(["topic", "create", name, *given]) == 0
        return name

    return make
