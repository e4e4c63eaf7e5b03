"""A command whose broker is not there yet waits for it, and says so on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Callable
from contextlib import suppress

import pytest

from brokers import DIES_WITH_PARENT, Broker, free_port, wait_for
from cli.conftest import COMMAND, DEADLINE_S, environment
from headrace.cli.main import main
from proving import proves


@proves("U1")
@pytest.mark.parametrize("command", [("topic", "list"), ("broker", "list")])
def test_a_command_says_that_it_waits_and_is_done_when_the_broker_is_there(
    fresh_broker: Callable[..., Broker], command: tuple[str, ...]
) -> None:
    broker = fresh_broker()
    broker.kill()
    ours, theirs = pty.openpty()
    shown = b""
    with subprocess.Popen(
        [*DIES_WITH_PARENT, *COMMAND, *command], stderr=theirs, env=environment(broker.bootstrap)
    ) as asking:
        os.close(theirs)
        os.set_blocking(ours, False)

        def says_so() -> bool:
            nonlocal shown
            with suppress(BlockingIOError):
                shown += os.read(ours, 4096)
            return f"headrace: waiting for a broker at {broker.bootstrap} ...".encode() in shown

        wait_for("a word about what is waited for", says_so)
        broker.start()
        assert asking.wait(DEADLINE_S) == 0
    os.close(ours)
    assert shown.count(b"waiting") == 1


@proves("U1")
@pytest.mark.parametrize("command", [("topic", "list"), ("broker", "list"), ("consume", "t"), ("produce", "t")])
def test_a_command_gives_up_after_its_timeout(command: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    assert main([*command, "--bootstrap", nowhere, "--timeout", "0.3"]) == 1
    told = capfd.readouterr().err
    assert told.startswith(f"headrace: no broker answers at {nowhere} (tried for ")
    assert told.endswith("s); start a broker with `headrace serve`\n")
