"""`headrace topic`, `config`, `cluster` against a broker."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from brokers import LAYOUT_VARIABLE, Broker
from cli.conftest import Run, on_terminal
from headrace.cli.main import main
from proving import proves


@proves("J7")
def test_a_topic_from_creation_to_deletion(run: Run, topic: Callable[..., str]) -> None:
    name = topic(2, "--config", "retention.ms=86400000")
    listed = {row["topic"]: row for row in json.loads(run("topic", "list", "--json").stdout)}
    assert listed[name] == {"topic": name, "partitions": 2, "replicas": 1, "internal": False}
    described = json.loads(run("topic", "describe", name, "--json").stdout)
    assert described["settings"] == {"retention.ms": "86400000"}
    assert [(p["partition"], p["start"], p["end"]) for p in described["partitions"]] == [(0, 0, 0), (1, 0, 0)]
    run("topic", "alter", name, "--partitions", "3", "--config", "segment.bytes=1048576", "--unset", "retention.ms")
    described = json.loads(run("topic", "describe", name, "--json").stdout)
    assert (len(described["partitions"]), described["settings"]) == (3, {"segment.bytes": "1048576"})
    assert run("topic", "delete", name).stdout == f"deleted topic {name}\n"
    done = run("topic", "describe", name, exit_code=1)
    assert done.stderr.startswith(f"headrace: there is no topic '{name}'; ")


@pytest.mark.parametrize("command", [("delete",), ("describe",), ("alter", "--partitions", "2")])
@proves("U1")
def test_a_topic_that_is_not_there_is_told_with_the_nearest_one(
    topic: Callable[..., str], broker: Broker, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    name = topic()
    for asked, hint in ((name + "s", f"did you mean '{name}'"), ("nope", "`headrace topic list` shows what there is")):
        assert main(["topic", *command, asked, "--bootstrap", broker.bootstrap]) == 1
        assert capsys.readouterr().err.startswith(f"headrace: there is no topic '{asked}'; {hint}")


@proves("U1")
def test_a_topic_is_created_like_another_with_what_is_said_otherwise(
    topic: Callable[..., str], broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = topic(3, "--config", "retention.ms=86400000", "--config", "cleanup.policy=compact")
    at = ("--bootstrap", broker.bootstrap)

    def described(name: str, *options: str) -> tuple[int, dict[str, str]]:
        assert main(["topic", "create", name, "--like", pattern, *options, *at]) == 0
        capsys.readouterr()
        assert main(["topic", "describe", name, "--json", *at]) == 0
        told = json.loads(capsys.readouterr().out)
        return len(told["partitions"]), told["settings"]

    same, other = f"{pattern}-same", f"{pattern}-other"
    assert described(same) == (3, {"cleanup.policy": "compact", "retention.ms": "86400000"})
    assert described(other, "--partitions", "2", "--config", "retention.ms=7200000") == (
        2,
        {"cleanup.policy": "compact", "retention.ms": "7200000"},
    )
    assert main(["topic", "create", f"{pattern}-more", "--like", f"{same}s", *at]) == 1
    assert f"did you mean '{same}'" in capsys.readouterr().err


def test_tables_without_a_terminal_are_aligned_text(run: Run, topic: Callable[..., str]) -> None:
    name = topic(2)
    lines = run("topic", "list").stdout.splitlines()
    assert lines[0].split() == ["TOPIC", "PARTITIONS", "REPLICAS"]
    assert [name, "2", "1"] in [line.split() for line in lines]
    assert len({line.index("PARTITIONS") + len("PARTITIONS") for line in lines[:1]}) == 1
    described = run("topic", "describe", name).stdout.splitlines()
    assert described[0].startswith(f"topic {name}, 2 partitions, id ")
    assert described[1].split() == ["PARTITION", "LEADER", "EPOCH", "REPLICAS", "IN_SYNC", "START", "END"]


@proves("F1", "G7")
def test_the_named_levels_and_what_each_can_lose(alone: Run, inside: Run, topic: Callable[..., str]) -> None:
    rows = {row["level"]: row for row in json.loads(alone("topic", "levels", "--json").stdout)}
    assert [name for name, row in rows.items() if not row["lossy"]] == ["all-replicas"]
    assert all(row["loses_records_when"] and row["is_unavailable"] for row in rows.values())
    shown = alone("topic", "levels").stdout
    assert all(f"\n{name} " in shown for name in rows)
    lossy = topic(1, "--config", "reliability=local-disk")
    assert json.loads(inside("topic", "describe", lossy, "--json").stdout)["lossy"] is True
    assert "lossy: acks=-1" in inside("topic", "describe", lossy).stdout
    assert json.loads(inside("topic", "describe", topic(1), "--json").stdout)["lossy"] is False


def test_what_the_broker_refuses_is_one_line_and_exit_code_1(inside: Run, topic: Callable[..., str]) -> None:
    name = topic(2)
    for arguments in (
        ("topic", "create", name),
        ("topic", "create", "not/a/name"),
        ("topic", "create", name + "-x", "--config", "nonsense=1"),
        ("topic", "create", name + "-x", "--replicas", "9"),
        ("topic", "alter", name, "--partitions", "1"),
        ("topic", "delete", "not-there"),
        ("config", "set", "topic", name, "nonsense=1"),
        ("config", "describe", "topic", "not-there"),
        ("consume", "not-there"),
        ("consume", name, "--partition", "2"),
    ):
        done = inside(*arguments, exit_code=1)
        assert done.stderr.startswith("headrace: ")
        assert done.stderr.count("\n") == 1


def test_settings_of_a_topic_are_shown_set_and_unset(inside: Run, topic: Callable[..., str]) -> None:
    name = topic(1)

    def value(setting: str) -> tuple[str, str]:
        rows = json.loads(inside("config", "describe", "topic", name, "--json").stdout)
        return next((row["value"], row["source"]) for row in rows if row["setting"] == setting)

    before = value("retention.ms")
    inside("config", "set", "topic", name, "retention.ms=7200000", "flush.messages=9")
    assert value("retention.ms") == ("7200000", "topic")
    assert value("flush.messages") == ("9", "topic")
    inside("config", "unset", "topic", name, "retention.ms")
    assert value("retention.ms") == before
    changed = inside("config", "describe", "topic", name, "--changed").stdout
    assert "flush.messages" in changed
    assert "retention.ms" not in changed


def test_the_cluster_and_its_brokers_are_described(inside: Run) -> None:
    described = json.loads(inside("cluster", "describe", "--json").stdout)
    (broker,) = described["brokers"]
    assert broker["controller"] is True
    assert broker["layout"] == os.environ.get(LAYOUT_VARIABLE, "partitioned")
    assert inside("cluster", "describe").stdout.startswith(f"cluster {described['cluster_id']}\n")
    rows = json.loads(inside("config", "describe", "broker", str(broker["broker"]), "--json").stdout)
    assert "node.id" in {row["setting"] for row in rows}


@proves("U1")
def test_a_brokers_setting_is_described_with_where_it_was_given(
    fresh_broker: Callable[..., Broker], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("retention.check.ms = 99000\n")
    broker = fresh_broker(
        settings={"checkpoint.ms": 50_000},
        environment={"HEADRACE_NUM_PARTITIONS": "3"},
        prefix=("sh", "-c", f'exec "$@" --config {file}', "-"),
    )
    assert main(["config", "describe", "broker", "1", "--json", "--bootstrap", broker.bootstrap]) == 0
    sources = {row["setting"]: row["source"] for row in json.loads(capsys.readouterr().out)}
    assert sources["checkpoint.ms"] == "flag"
    assert sources["num.partitions"] == "environment HEADRACE_NUM_PARTITIONS"
    assert sources["retention.check.ms"] == f"file {file}"
    assert sources["node.id"] == "default"


def test_a_terminal_gets_a_table(topic: Callable[..., str], broker: Broker) -> None:
    name = topic(2)
    shown = on_terminal(["-m", "headrace.cli.main", "topic", "list"], broker.bootstrap, columns=200)
    assert "─" in shown
    assert name in shown
