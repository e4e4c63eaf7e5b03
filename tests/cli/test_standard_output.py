"""Standard output that cannot be written: a full disk, a closed descriptor, a reader that has gone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from brokers import Broker
from cli.conftest import COMMAND, DEADLINE_S, Run, environment
from proving import proves

MakeTopic = Callable[..., str]
FULL = "headrace: cannot write to standard output: No space left on device\n"


def write_to(target: int, *arguments: str, bootstrap: str | None = None) -> tuple[int, str]:
    """Exit code and standard error of a command whose standard output is that descriptor."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        stdout=target,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment(bootstrap),
        timeout=DEADLINE_S,
        check=False,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.fixture
def full_disk() -> Iterator[int]:
    target = os.open("/dev/full", os.O_WRONLY)
    yield target
    os.close(target)


@pytest.mark.parametrize("arguments", [("--help",), ("topic", "levels"), ("topic", "levels", "--json")])
@proves("U1")
def test_output_that_does_not_fit_is_one_line_and_exit_code_1(full_disk: int, arguments: tuple[str, ...]) -> None:
    assert write_to(full_disk, *arguments) == (1, FULL)


@pytest.mark.parametrize("arguments", [("--help",), ("topic", "levels")])
@proves("U1")
def test_a_reader_that_has_gone_ends_listings_and_help_quietly(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert write_to(writing, *arguments) == (0, "")
    os.close(writing)


@proves("U1")
def test_a_closed_standard_output_is_told() -> None:
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "topic", "levels"]
    done = subprocess.run(closing, stderr=subprocess.PIPE, env=environment(None), timeout=DEADLINE_S, check=False)
    assert done.returncode == 1
    assert done.stderr == b"headrace: cannot write to standard output: Bad file descriptor\n"


@proves("U1")
def test_a_group_has_not_read_what_could_not_be_written(
    run: Run, topic: MakeTopic, broker: Broker, full_disk: int
) -> None:
    name = topic()
    run("produce", name, stdin="0\n1\n")
    reading = ("consume", name, "--group", f"group-of-{name}")
    assert write_to(full_disk, *reading, bootstrap=broker.bootstrap) == (1, FULL)
    assert run(*reading).stdout == "0\n1\n"
