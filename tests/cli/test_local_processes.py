"""Processes of a local cluster: found again, paused, ended, and never taken for another."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from brokers import DIES_WITH_PARENT, wait_for
from headrace.cli.local.processes import Process, State, spawn
from headrace.errors import OperatorError

SAYS_READY = "import signal; print('ready', flush=True); signal.pause()"


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    started: list[Process] = []

    def start(script: str) -> Process:
        setpriv = "/usr/bin/" + DIES_WITH_PARENT[0]
        command = [setpriv, *DIES_WITH_PARENT[1:], sys.executable, "-c", script]
        started.append(spawn(command, tmp_path / "log", dict(os.environ)))
        return started[-1]

    yield start
    for each in started:
        each.send(signal.SIGKILL)


def test_a_process_is_up_paused_up_and_down(process: Callable[[str], Process], tmp_path: Path) -> None:
    running = process(SAYS_READY)
    wait_for("its output in the log", lambda: (tmp_path / "log").read_text() == "ready\n")
    assert running.state() is State.UP
    assert running.send(signal.SIGSTOP)
    wait_for("the pause", lambda: running.state() is State.PAUSED)
    assert running.send(signal.SIGCONT)
    wait_for("the end of the pause", lambda: running.state() is State.UP)
    assert running.send(signal.SIGTERM)
    wait_for("its end", lambda: running.state() is State.DOWN)
    assert not running.send(signal.SIGTERM)


def test_a_number_that_belongs_to_another_process_now_is_not_signalled(process: Callable[[str], Process]) -> None:
    other = process(SAYS_READY)
    for stranger in (replace(other, started_ticks=other.started_ticks - 1), replace(other, boot="an earlier boot")):
        assert stranger.state() is State.DOWN
        assert not stranger.send(signal.SIGKILL)
    assert other.state() is State.UP


def test_signals_blocked_or_ignored_here_are_not_so_there(process: Callable[[str], Process], tmp_path: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        running = process(SAYS_READY)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    wait_for("its output in the log", lambda: (tmp_path / "log").read_text() == "ready\n")
    assert running.send(signal.SIGTERM)
    wait_for("its end", lambda: running.state() is State.DOWN)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"/no/such/program: No such file"):
        spawn(["/no/such/program"], tmp_path / "log", {})
