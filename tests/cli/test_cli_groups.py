"""`headrace group` against a broker."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer as KafkaConsumer

from brokers import Broker, wait_for
from cli.conftest import Run, Running
from proving import proves

MakeTopic = Callable[..., str]
Start = Callable[..., Running]


@pytest.fixture
def group(inside: Run, topic: MakeTopic) -> tuple[str, str]:
    """A topic of two partitions with three records in each, and a group that has read all."""
    name = topic(2)
    for partition in ("0", "1"):
        inside("produce", name, "--partition", partition, stdin="a\nb\nc\n")
    group_id = f"group-of-{name}"
    assert len(inside("consume", name, "--group", group_id).stdout.split()) == 6
    return group_id, name


def described(inside: Run, group_id: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(inside("group", "describe", group_id, "--json").stdout)
    return shown


def committed(inside: Run, group_id: str) -> list[int]:
    return [row["committed"] for row in described(inside, group_id)["partitions"]]


def test_groups_are_listed_and_their_lag_is_shown(run: Run, group: tuple[str, str]) -> None:
    group_id, name = group
    listed = {row["group"]: row["state"] for row in json.loads(run("group", "list", "--json").stdout)}
    assert listed[group_id] == "Empty"
    rows_shown = [line.split() for line in run("group", "list").stdout.splitlines()]
    assert [group_id, "Empty", "classic", "consumer"] in rows_shown
    run("produce", name, "--partition", "1", stdin="d\ne\n")
    rows = described(run, group_id)["partitions"]
    assert [(row["committed"], row["end"], row["lag"]) for row in rows] == [(3, 3, 0), (3, 5, 2)]
    lines = run("group", "describe", group_id).stdout.splitlines()
    assert lines[0] == f"group {group_id}, Empty, assignor -, lag 2"
    assert lines[-1].split() == [name, "1", "3", "5", "2", "-"]


@proves("N1")
def test_a_group_of_the_consumer_protocol_is_shown_with_its_epochs(
    inside: Run, broker: Broker, topic: MakeTopic
) -> None:
    name = topic(2)
    group_id = f"group-of-{name}"
    settings = {"bootstrap.servers": broker.bootstrap, "group.id": group_id, "group.protocol": "consumer"}
    consumer = KafkaConsumer({**settings, "client.id": "reader"})
    try:
        consumer.subscribe([name])
        wait_for("partitions", lambda: consumer.poll(0.05) or len(consumer.assignment()) == 2)
        listed = {row["group"]: row["type"] for row in json.loads(inside("group", "list", "--json").stdout)}
        assert listed[group_id] == "consumer"
        shown = described(inside, group_id)
        assert (shown["state"], shown["type"], shown["assignor"]) == ("Stable", "consumer", "uniform")
        assert (shown["epoch"], shown["assignment_epoch"]) == (1, 1)
        (member,) = shown["members"]
        assert (member["client"], member["partitions"], member["target"], member["epoch"]) == ("reader", 2, 2, 1)
        lines = inside("group", "describe", group_id).stdout.splitlines()
        assert lines[0] == f"group {group_id}, Stable, assignor uniform, epoch 1, assigned in 1, lag 0"
        assert "stop its consumers first" in inside("group", "delete", group_id, exit_code=1).stderr
    finally:
        consumer.close()
    inside("group", "delete", group_id)
    assert "group" in inside("group", "describe", group_id, exit_code=1).stderr


def test_members_are_shown_and_protect_the_group(inside: Run, start: Start, group: tuple[str, str]) -> None:
    group_id, name = group
    member = start("consume", name, "--group", group_id, "--follow")
    inside("produce", name, "--partition", "0", stdin="hello\n")
    assert member.lines(1) == ["hello"]
    shown = described(inside, group_id)
    assert (shown["state"], shown["assignor"]) == ("Stable", "range")
    assert [m["partitions"] for m in shown["members"]] == [2]
    assert {row["member"] for row in shown["partitions"]} == {shown["members"][0]["member"]}
    assert "stop its consumers first" in inside("group", "reset", group_id, "--to", "earliest", exit_code=1).stderr
    assert "stop its consumers first" in inside("group", "delete", group_id, exit_code=1).stderr
    code, _ = member.interrupt()
    assert code == 130
    assert committed(inside, group_id) == [4, 3], "what was printed is committed on the way out"
    assert described(inside, group_id)["members"] == []


@proves("U1")
def test_a_sigterm_lets_the_member_leave_at_once(inside: Run, start: Start, topic: MakeTopic) -> None:
    name = topic()
    group_id = f"group-of-{name}"
    inside("produce", name, stdin="a\nb\nc\n")
    member = start("consume", name, "--group", group_id, "--follow")
    assert member.lines(3) == ["a", "b", "c"]
    assert len(described(inside, group_id)["members"]) == 1
    code, said = member.end(signal.SIGTERM)
    assert (code, said) == (143, "")
    assert described(inside, group_id)["members"] == [], "its session would have lasted for ten seconds more"
    assert committed(inside, group_id) == [3], "what was printed is committed on the way out"


def test_two_members_share_a_topic(inside: Run, start: Start, topic: MakeTopic) -> None:
    name = topic(2)
    group_id = f"group-of-{name}"
    members = [start("consume", name, "--group", group_id, "--follow") for _ in range(2)]
    wait_for("both members", lambda: [m["partitions"] for m in settled(inside, group_id)] == [1, 1])
    for partition in ("0", "1"):
        inside("produce", name, "--partition", partition, stdin="x\n")
    assert [member.lines(1) for member in members] == [["x"], ["x"]]


def settled(inside: Run, group_id: str) -> list[dict[str, Any]]:
    try:
        shown = described(inside, group_id)
    except AssertionError:
        return []  # Neither has joined yet.
    return list(shown["members"]) if shown["state"] == "Stable" else []


@pytest.mark.parametrize(
    ("target", "expected"),
    [("earliest", [0, 0]), ("latest", [3, 3]), ("2", [2, 2]), ("99", [3, 3]), ("1h ago", [0, 0]), ("now", [3, 3])],
)
def test_a_group_is_reset_to_a_place_or_a_time(
    inside: Run, group: tuple[str, str], target: str, expected: list[int]
) -> None:
    group_id, name = group
    shown = json.loads(inside("group", "reset", group_id, "--to", target, "--dry-run", "--json").stdout)
    assert shown["partitions"] == [
        {"topic": name, "partition": n, "committed": 3, "new": expected[n]} for n in range(2)
    ]
    assert committed(inside, group_id) == [3, 3], "a dry run changes nothing"
    inside("group", "reset", group_id, "--to", target)
    assert committed(inside, group_id) == expected


@proves("U1")
def test_a_reset_says_that_a_log_does_not_reach_so_far(inside: Run, group: tuple[str, str]) -> None:
    group_id, name = group
    assert inside("group", "reset", group_id, "--to", "2", "--dry-run").stderr == ""
    told = inside("group", "reset", group_id, "--to", "99", "--dry-run").stderr.splitlines()
    assert told == [f"headrace: {name}-{n} does not have offset 99; 3 is the nearest" for n in range(2)]


@proves("U1")
def test_seconds_since_1970_are_not_taken_for_milliseconds(inside: Run, topic: MakeTopic) -> None:
    name = topic()
    inside("produce", name, stdin="a\nb\nc\n")

    def reset(target: str, exit_code: int = 0) -> str:
        given = ("--to", target, "--topic", name, "--dry-run", "--json")
        done = inside("group", "reset", f"group-of-{name}", *given, exit_code=exit_code)
        return done.stderr if exit_code else str(json.loads(done.stdout)["partitions"][0]["new"])

    an_hour_on = int(time.time()) + 3600
    assert reset(f"@{an_hour_on}") == reset(f"@{an_hour_on}000") == "3", "nothing is so late"
    assert reset(f"@{an_hour_on - 7200}") == reset("yesterday") == "0"
    assert "neither seconds since 1970" in reset(f"@{an_hour_on}000000", exit_code=2)


def test_only_what_is_named_is_reset(inside: Run, group: tuple[str, str]) -> None:
    group_id, name = group
    inside("group", "reset", group_id, "--to", "1", "--topic", name, "--partition", "1")
    assert committed(inside, group_id) == [3, 1]
    fresh = f"fresh-{group_id}"
    assert "--topic" in inside("group", "reset", fresh, "--to", "latest", exit_code=1).stderr
    inside("group", "reset", fresh, "--to", "latest", "--topic", name)
    assert committed(inside, fresh) == [3, 3]
    inside("group", "reset", fresh, "--to", "nonsense", exit_code=2)


def test_a_group_is_deleted(inside: Run, group: tuple[str, str]) -> None:
    group_id, _ = group
    assert inside("group", "delete", group_id).stdout == f"deleted group {group_id}\n"
    assert "there is no such group" in inside("group", "describe", group_id, exit_code=1).stderr
    assert "there is no such group" in inside("group", "delete", group_id, exit_code=1).stderr


def test_settings_of_a_group_are_shown_set_and_unset(inside: Run) -> None:
    """They are kept by name, whether the group is there or not."""

    def values() -> dict[str, tuple[str, str]]:
        rows = json.loads(inside("config", "describe", "group", "readers", "--json").stdout)
        return {row["setting"]: (row["value"], row["source"]) for row in rows}

    before = values()
    assert before["consumer.session.timeout.ms"] == ("45000", "default")
    assert inside("config", "set", "group", "readers", "consumer.session.timeout.ms=20000").stdout == (
        "changed group readers\n"
    )
    assert values()["consumer.session.timeout.ms"] == ("20000", "group")
    assert "consumer.session.timeout.ms" in inside("config", "describe", "group", "readers", "--changed").stdout
    inside("config", "unset", "group", "readers", "consumer.session.timeout.ms")
    assert values() == before
    refused = inside("config", "set", "group", "readers", "retention.ms=1", exit_code=1)
    assert "retention.ms" in refused.stderr
