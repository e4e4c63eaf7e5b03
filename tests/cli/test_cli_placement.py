"""`headrace broker`, `partition`, `cluster rebalance` on a cluster that `headrace cluster up` has started."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from brokers import wait_for
from cli.conftest import Finished, run_command
from headrace.cli.local import cluster_file
from proving import proves

BROKERS = {1, 2, 3}


class Local:
    """A cluster of three brokers and one etcd node, and commands that ask it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bootstrap = ""

    def cluster(self, command: str, *arguments: str, exit_code: int = 0) -> Finished:
        return run_command("cluster", command, "--dir", str(self.folder), *arguments, exit_code=exit_code)

    def ask(self, *arguments: str) -> Any:
        return json.loads(run_command(*arguments, "--json", bootstrap=self.bootstrap).stdout)

    def order(self, *arguments: str, exit_code: int = 0) -> Finished:
        return run_command(*arguments, bootstrap=self.bootstrap, exit_code=exit_code)

    def partition(self, topic: str, number: int) -> dict[str, Any]:
        rows = self.ask("partition", "list", "--topic", topic)
        return next(row for row in rows if row["partition"] == number)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    local = Local(tmp_path_factory.mktemp("local") / "cluster")
    try:
        told = local.cluster("up", "--brokers", "3", "--etcd", "1", "--base-port", "0", "--json")
        local.bootstrap = json.loads(told.stdout)["bootstrap"]
        yield local
    finally:
        found = cluster_file.find(local.folder)
        for node in found.nodes if found is not None else ():
            if node.process is not None:
                node.process.send(signal.SIGKILL)


@proves("G15")
def test_both_views_show_every_replica_with_its_watermark(three: Local) -> None:
    three.order("topic", "create", "views", "--partitions", "3", "--replicas", "3")
    run_command("produce", "views", "--partition", "0", bootstrap=three.bootstrap, stdin="a\nb\n")

    def everywhere() -> bool:
        row = three.partition("views", 0)
        return row["watermarks"] == [2, 2, 2] and set(row["in_sync"]) == BROKERS

    wait_for("the watermark on every replica", everywhere)
    rows = three.ask("partition", "list", "--topic", "views")
    assert {row["leader"] for row in rows} == BROKERS
    held = three.ask("partition", "list", "--topic", "views", "--by", "broker")
    assert len(held) == 9
    assert {row["broker"] for row in held if row["role"] == "leader"} == BROKERS
    assert [row["watermark"] for row in held if row["partition"] == 0] == [2, 2, 2]
    listed = three.ask("broker", "list")
    assert {row["broker"]: row["state"] for row in listed} == dict.fromkeys(BROKERS, "up")
    assert sum(row["controller"] for row in listed) == 1
    described = three.ask("broker", "describe", "2")
    assert {row["topic"] for row in described["replicas"]} >= {"views"}


@proves("G15", "L3")
def test_a_partition_moves_with_its_data_and_its_leader_is_elected_again(three: Local) -> None:
    three.order("topic", "create", "moving", "--partitions", "1", "--replicas", "1")
    run_command("produce", "moving", bootstrap=three.bootstrap, stdin="kept\n")
    (before,) = three.partition("moving", 0)["replicas"]
    target = sorted(BROKERS - {before})
    three.order("partition", "move", "moving", "0", "--to", ",".join(map(str, target)))

    def moved() -> bool:
        row = three.partition("moving", 0)
        return row["replicas"] == target and row["in_sync"] == target and not row["moving_to"]

    wait_for("the move", moved)
    assert three.order("consume", "moving").stdout == "kept\n"
    three.order("partition", "move", "moving", "0", "--to", ",".join(map(str, reversed(target))))
    three.order("partition", "elect", "moving", "0")
    wait_for("the preferred leader", lambda: three.partition("moving", 0)["leader"] == target[-1])


@proves("L3", "U1")
def test_a_broker_is_emptied_and_filled_again_by_plans_that_are_shown_first(three: Local) -> None:
    three.order("topic", "create", "drained", "--partitions", "3", "--replicas", "2")
    run_command("produce", "drained", "--partition", "2", bootstrap=three.bootstrap, stdin="kept\n")
    assert "add a broker" in three.order("broker", "drain", "3", "--dry-run", exit_code=1).stderr
    three.order("topic", "delete", "views")
    plan = three.ask("broker", "drain", "3", "--dry-run")
    assert plan["draining"] == []
    assert plan["moves"]
    assert all(3 in move["from"] and 3 not in move["to"] for move in plan["moves"])
    assert three.ask("broker", "drain", "3")["moves"] == plan["moves"]
    wait_for("an empty broker", lambda: three.ask("broker", "describe", "3")["replicas"] == [])
    assert {row["broker"]: row["state"] for row in three.ask("broker", "list")}[3] == "draining"
    assert three.order("consume", "drained").stdout == "kept\n"
    three.order("broker", "drain", "3", "--cancel")
    planned = three.ask("cluster", "rebalance", "--dry-run")["moves"]
    assert any(3 in move["to"] for move in planned)
    assert "leaders elected" in three.order("cluster", "rebalance").stdout
    rows = three.ask("partition", "list", "--topic", "drained")
    assert sum(3 in row["replicas"] for row in rows) == 2
    assert {row["leader"] for row in rows} == BROKERS, "every broker leads as much, at once"
    again = three.ask("cluster", "rebalance")
    assert (again["moves"], again["elections"]) == ([], 0)


@pytest.mark.long
@proves("F9")
def test_an_unclean_election_is_an_order_and_its_cost_is_shown(three: Local) -> None:
    """KIP-966: the last replica standing dies, and an operator lets one lead that has less."""
    three.order("topic", "create", "strict", "--replicas", "2", "--config", "min.insync.replicas=1")
    first, second = three.partition("strict", 0)["replicas"]
    three.cluster("kill", str(second))
    wait_for("the last replica standing", lambda: three.partition("strict", 0)["in_sync"] == [first])
    run_command("produce", "strict", bootstrap=three.bootstrap, stdin="a\nb\nc\n")
    three.cluster("kill", str(first))
    wait_for("no leader", lambda: three.partition("strict", 0)["leader"] is None)
    three.cluster("start", str(second))
    assert three.partition("strict", 0)["leader"] is None
    assert "name TOPIC" in three.order("partition", "elect", "--unclean", exit_code=2).stderr
    three.order("partition", "elect", "--unclean", "strict", "0")
    row = three.partition("strict", 0)
    assert (row["leader"], row["lost"][0]) == (second, 0)
    assert " LOST" in three.order("partition", "list", "--topic", "strict").stdout
    three.cluster("start", str(first))
    wait_for("both replicas", lambda: sorted(three.partition("strict", 0)["in_sync"]) == sorted([first, second]))
    three.order("topic", "delete", "strict")


@proves("U1")
def test_a_broker_that_is_down_is_told_with_who_waits_for_it(three: Local) -> None:
    three.order("topic", "create", "solo", "--replicas", "1")
    (holder,) = three.partition("solo", 0)["replicas"]
    three.cluster("kill", str(holder))
    wait_for("no leader", lambda: three.partition("solo", 0)["leader"] is None)
    for command in ("status", "describe"):
        told = three.order("cluster", command, exit_code=1).stdout
        assert [line.split()[:2] for line in told.splitlines() if " down " in line] == [[str(holder), "down"]]
        assert f"\ndown: broker {holder}\n" in told
        assert f"\n  solo-0: waits for broker {holder}\n" in told
    shown = three.ask("top", "--once", "--every", "10ms")["brokers"]
    assert [row["broker"] for row in shown] == sorted(BROKERS)
    assert [row["broker"] for row in shown if row["address"] is None] == [holder]
    three.cluster("start", str(holder))
    three.order("topic", "delete", "solo")


@proves("G14", "J5")
def test_a_killed_broker_loses_nothing_and_comes_back(three: Local) -> None:
    verdict = json.loads(three.cluster("demo-loss", "--seconds", "10", "--down", "0.5", "--json").stdout)
    assert verdict["whole"] is True
    assert verdict["acknowledged"] == verdict["read"] > 0
    assert verdict["kills"][0]["led_after_s"] is not None
    wait_for("all replicas in sync", lambda: not any(row["behind"] for row in three.ask("broker", "list")))
    assert json.loads(three.cluster("status", "--json").stdout)["healthy"]
    assert three.cluster("down").stdout == "stopped: broker1, broker2, broker3, etcd1\n"
