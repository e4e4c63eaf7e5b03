"""`headrace cluster up|status|kill|start|down|demo-loss`: real processes below one folder."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from brokers import DIES_WITH_PARENT, wait_for
from cli.conftest import COMMAND, Run, environment, run_command
from headrace.cli.local import cluster_file
from proving import proves


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`local("status")` runs the command on a folder of this test; its processes are ended with the test."""
    folder = tmp_path / "cluster"

    def call(command: str, *arguments: str, exit_code: int = 0) -> str:
        return run_command("cluster", command, "--dir", str(folder), *arguments, exit_code=exit_code).stdout

    yield call
    end_all(folder)


def end_all(folder: Path) -> None:
    found = cluster_file.find(folder)
    for node in found.nodes if found is not None else ():
        if node.process is not None:
            node.process.send(signal.SIGKILL)


def states(local: Callable[..., str], exit_code: int) -> dict[str, str]:
    shown = json.loads(local("status", "--json", exit_code=exit_code))
    return {row["name"]: row["state"] for row in shown["processes"]}


ALONE = ("--brokers", "1", "--etcd", "0", "--base-port", "0")


@proves("J7")
def test_one_broker_from_up_to_down(local: Callable[..., str], tmp_path: Path) -> None:
    told = json.loads(local("up", *ALONE, "--json"))
    assert told["started"] == ["broker1"]
    bootstrap = told["bootstrap"]
    run_command("produce", "t", bootstrap=bootstrap, stdin="kept\n")
    assert local("kill", "1").startswith("SIGKILL to broker1, process ")
    assert states(local, exit_code=1) == {"broker1": "down"}
    again = json.loads(local("up", "--json"))
    assert (again["started"], again["bootstrap"]) == (["broker1"], bootstrap)
    assert run_command("consume", "t", bootstrap=bootstrap).stdout == "kept\n"
    assert json.loads(local("status", "--json"))["cluster"]["controller"] == 1
    shown = local("up")
    assert "started: nothing, all of it was up\n" in shown
    assert "topic create" not in shown, "it is not new"
    local("kill", "broker1", "--signal", "STOP")
    wait_for("the pause", lambda: states(local, exit_code=1) == {"broker1": "paused"})
    assert local("down") == "stopped: broker1\n"
    assert local("down") == "stopped: nothing, all of it was down\n"
    log = (tmp_path / "cluster" / "broker1" / "broker.log").read_text()
    assert log.count("ready kafka=") == 2


def test_a_cluster_in_the_foreground_goes_with_ctrl_c(local: Callable[..., str], tmp_path: Path) -> None:
    command = [*DIES_WITH_PARENT, *COMMAND, "cluster", "up", "--dir", str(tmp_path / "cluster"), *ALONE, "--foreground"]
    errors = tmp_path / "stderr"
    with errors.open("wb") as target:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=target, env=environment(None))
    wait_for("the cluster", lambda: b"ctrl-C stops the cluster" in errors.read_bytes())
    assert states(local, exit_code=0) == {"broker1": "up"}
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert states(local, exit_code=1) == {"broker1": "down"}


def test_what_cannot_be_is_told_in_one_line(alone: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, told in (
            (("status",), "holds no local cluster"),
            (("up", "--brokers", "2", "--etcd", "0", "--base-port", "0"), "--etcd 1"),
            (("up", "--brokers", "1", "--etcd", "0", "--base-port", str(port)), f"port {port} "),
        ):
            done = alone("cluster", arguments[0], "--dir", str(tmp_path / "none"), *arguments[1:], exit_code=1)
            assert told in done.stderr
            assert done.stderr.count("\n") == 1


def test_without_etcd_its_package_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "cluster", "up", "--dir", str(tmp_path / "cluster"), "--base-port", "0"],
        env={**environment(None), "PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "etcd-server" in done.stderr


def test_a_broker_that_cannot_start_shows_the_end_of_its_log(alone: Run, tmp_path: Path) -> None:
    done = alone(
        "cluster", "up", "--dir", str(tmp_path / "cluster"), *ALONE, "--set", "no.such.setting=1", exit_code=1
    )  # fmt: skip
    assert "broker1 has ended while it started" in done.stderr
    assert "no.such.setting" in done.stderr
