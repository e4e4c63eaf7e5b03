"""`headrace consume` as a search: the last records, those of a time, and those that a filter lets through."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from brokers import wait_for
from cli.conftest import Run, Running
from headrace.records.partitioner import partition_for_key
from proving import proves

MakeTopic = Callable[..., str]
Start = Callable[..., Running]
HOUR_MS = 3_600_000


def send(inside: Run, name: str, rows: list[dict[str, Any]], *options: str) -> None:
    inside("produce", name, "--json-lines", *options, stdin="".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def hours(inside: Run, topic: MakeTopic) -> str:
    """A topic of two partitions with a record an hour in turn, 0 eleven hours ago and 9 two hours ago."""
    name = topic(2)
    now_ms = int(time.time() * 1000)
    rows = [{"value": str(n), "partition": n % 2, "timestamp": now_ms - (11 - n) * HOUR_MS} for n in range(10)]
    send(inside, name, rows)
    return name


def values(inside: Run, name: str, *options: str) -> list[str]:
    return inside("consume", name, *options).stdout.split()


@proves("U1")
def test_the_tail_is_the_last_of_all_partitions_in_the_order_of_time(inside: Run, hours: str) -> None:
    assert values(inside, hours, "--tail", "3") == ["7", "8", "9"]
    assert values(inside, hours, "--tail", "2", "--partition", "0") == ["6", "8"]
    assert values(inside, hours, "--tail", "100") == [str(n) for n in range(10)]
    assert values(inside, hours, "--tail", "2", "--until", "5.5h ago") == ["4", "5"]
    assert sorted(values(inside, hours, "--from", "-1")) == ["8", "9"], "one before the end of each partition"
    assert sorted(values(inside, hours, "--from", "-99")) == [str(n) for n in range(10)]


@proves("U1")
def test_the_tail_looks_back_until_there_are_enough_that_match(inside: Run, topic: MakeTopic) -> None:
    name = topic()
    rows = [{"key": "rare" if n in {3, 700} else "often", "value": str(n)} for n in range(5000)]
    send(inside, name, rows, "--compression", "zstd")
    assert values(inside, name, "--tail", "2", "--key", "rare") == ["3", "700"]
    assert values(inside, name, "--tail", "1", "--key", "rare") == ["700"]
    assert values(inside, name, "--tail", "3", "--key", "never") == []
    assert values(inside, name, "--tail", "3") == ["4997", "4998", "4999"]


@proves("U1")
def test_the_tail_is_followed(inside: Run, start: Start, hours: str) -> None:
    following = start("consume", hours, "--tail", "2", "--follow", "--grep", "^[89]|new")
    assert following.lines(2) == ["8", "9"]
    inside("produce", hours, stdin="other\nnew\n")
    assert following.lines(1) == ["new"]
    assert following.interrupt()[0] == 130


@proves("U1")
def test_time_bounds_are_given_as_people_say_them(inside: Run, hours: str) -> None:
    assert sorted(values(inside, hours, "--since", "6h30m", "--until", "3.5 hours ago")) == ["5", "6", "7"]
    half_past = f"@{int(time.time()) - int(9.5 * 3600)}"
    assert sorted(values(inside, hours, "--from", "2 days ago", "--until", half_past)) == ["0", "1"]
    assert values(inside, hours, "--partition", "1", "--from", "1", "--until", "3") == ["3", "5"]
    assert values(inside, hours, "--from", "now") == []
    assert "2 days ago" in inside("consume", hours, "--from", "soon", exit_code=2).stderr
    assert "before --from 5" in inside("consume", hours, "--from", "5", "--until", "3", exit_code=2).stderr


@proves("U1")
def test_a_start_beyond_the_end_is_told(inside: Run, start: Start, topic: MakeTopic) -> None:
    name = topic(2)
    inside("produce", name, "--partition", "0", stdin="a\nb\nc\n")
    done = inside("consume", name, "--from", "9999", exit_code=1)
    assert done.stderr.splitlines() == [
        f"headrace: {name}-0 ends at 3, before offset 9999: nothing to read there",
        f"headrace: {name}-1 ends at 0, before offset 9999: nothing to read there",
    ]
    done = inside("consume", name, "--from", "1")
    assert done.stdout.split() == ["b", "c"]
    assert done.stderr == f"headrace: {name}-1 ends at 0, before offset 1: nothing to read there\n"
    assert inside("consume", name, "--from", "3", "--partition", "0").stderr == "", "the end itself is no mistake"
    grouped = inside("consume", name, "--group", f"group-of-{name}", "--from", "7")
    assert f"headrace: {name}-0 ends at 3, before offset 7\n" in grouped.stderr
    following = start("consume", name, "--from", "4", "--partition", "0", "--follow", "--format", "%o %v")
    told = f"headrace: {name}-0 ends at 3, before offset 4: waiting for it\n"
    wait_for("it to say so", lambda: following.said == told)
    inside("produce", name, "--partition", "0", stdin="d\ne\nf\n")
    assert following.lines(2) == ["4 e", "5 f"]


@pytest.fixture
def orders(inside: Run, topic: MakeTopic) -> str:
    name = topic(3)
    rows: list[dict[str, Any]] = [
        {"key": "a", "value": {"id": 1, "order": {"total": 5}}, "headers": {"kind": "x", "n": "1"}},
        {"key": "b", "value": {"id": 2, "order": {"total": 50}}, "headers": {"kind": "y"}},
        {"key": "a", "value": {"id": 3, "order": {"total": 500}}, "headers": {"kind": "x", "none": None}},
        {"key": "ä", "value": "Text, kein JSON", "headers": []},
        {"key_base64": "/w==", "value_base64": "/wD+"},
        {"key": "a", "value": None},
    ]
    send(inside, name, rows)
    return name


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--key", "a"], [1, 3, None]),
        (["--key", "ä"], ["T"]),
        (["--grep", '"total": 50+'], [2, 3]),
        (["--grep", "(?i)^TEXT"], ["T"]),
        (["--grep", "^b$"], [2]),
        (["--header", "kind=x"], [1, 3]),
        (["--header", "kind", "--header", "n=1"], [1]),
        (["--header", "none"], [3]),
        (["--where", "order.total > 5"], [2, 3]),
        (["--where", "not (order.total > 5)", "--key", "a"], [1]),
        (["--key", "a", "--count", "1"], [1]),
    ],
)
@proves("U1")
def test_only_what_passes_the_filters_is_printed(
    inside: Run, orders: str, options: list[str], expected: list[object]
) -> None:
    found = [json.loads(line) for line in inside("consume", orders, "--json", *options).stdout.splitlines()]
    shown = [None if row["value"] is None else row["value"][:1] for row in found]
    shown = [json.loads(row["value"])["id"] if first == "{" else first for row, first in zip(found, shown, strict=True)]
    assert sorted(shown, key=str) == sorted(expected, key=str)


def test_wrong_filters_are_refused_with_the_reason(inside: Run, orders: str) -> None:
    assert "not a regular expression" in inside("consume", orders, "--grep", "(", exit_code=2).stderr
    assert "where a field" in inside("consume", orders, "--where", "a =", exit_code=2).stderr
    assert "NAME=VALUE" in inside("consume", orders, "--header", "=x", exit_code=2).stderr
    assert "--group and --tail exclude" in inside("consume", orders, "--tail", "1", "--group", "g", exit_code=2).stderr


@proves("U1")
def test_a_group_has_read_what_its_filter_passed_over(inside: Run, orders: str) -> None:
    group = f"group-of-{orders}"
    found = values(inside, orders, "--group", group, "--where", "id = 2", "--format", "%k")
    assert found == ["b"]
    assert values(inside, orders, "--group", group, "--format", "%k") == []


@proves("U1")
def test_what_json_prints_goes_through_json_lines_unchanged(inside: Run, topic: MakeTopic) -> None:
    first, second = topic(), topic()
    rows: list[dict[str, Any]] = [
        {"key": "k", "value": "v\n\t\u2028\u0000", "timestamp": 1_700_000_000_001, "headers": [
            {"name": "same", "value": "2"}, {"name": "same", "value": None}, {"name": "same", "value": "1"},
            {"name": "raw", "value_base64": "/wA="}, {"name": "", "value": ""},
        ]},
        {"key": "", "value": "", "timestamp": 0},
        {"key": None, "value": None, "timestamp": 5},
        {"key_base64": "gA==", "value_base64": "AP8=", "timestamp": 6},
        {"key": "null", "value": "null", "timestamp": 7},
    ]  # fmt: skip
    send(inside, first, rows)
    printed = inside("consume", first, "--json").stdout
    assert json.loads(printed.split("\n")[0])["headers"] == rows[0]["headers"]
    inside("produce", second, "--json-lines", stdin=printed)
    assert inside("consume", second, "--json").stdout.replace(second, first) == printed


@proves("U1")
def test_a_topic_is_copied_to_one_with_other_partitions(inside: Run, topic: MakeTopic) -> None:
    wide, narrow = topic(5), topic(2)
    send(inside, wide, [{"key": f"k{n}", "value": str(n), "partition": n % 5} for n in range(50)])
    printed = inside("consume", wide, "--json").stdout

    def copied(target: str, *options: str) -> set[tuple[int, int]]:
        """Value and partition of each."""
        done = inside("produce", target, "--json-lines", *options, stdin=printed)
        told = "30 records were in partitions that" in done.stderr
        assert told == (target == narrow and not options), done.stderr
        rows = [json.loads(line) for line in inside("consume", target, "--json").stdout.splitlines()]
        return {(int(row["value"]), row["partition"]) for row in rows}

    fitted = copied(narrow)
    assert len(fitted) == 50
    assert {(n, n % 5) for n in range(50) if n % 5 < 2} <= fitted, "kept where the topic has it"
    assert {(n, p) for n, p in fitted if n % 5 > 1} == {
        (n, partition_for_key(f"k{n}".encode(), 2)) for n in range(50) if n % 5 > 1
    }
    assert copied(topic(9), "--partitions", "keep") == {(n, n % 5) for n in range(50)}
    assert copied(topic(2), "--partitions", "by-key") == {
        (n, partition_for_key(f"k{n}".encode(), 2)) for n in range(50)
    }
    refused = inside("produce", narrow, "--json-lines", "--partitions", "keep", stdin=printed, exit_code=1)
    assert "partition 2" in refused.stderr or "partitions" in refused.stderr
    named = inside("produce", narrow, "--json-lines", stdin='{"value": "x", "partition": 4}', exit_code=1)
    assert "partition" in named.stderr, "one that a person names is an order"


@proves("U1")
def test_since_leaves_out_what_is_older_wherever_it_lies(inside: Run, topic: MakeTopic) -> None:
    name, now_ms = topic(), int(time.time() * 1000)
    hours_ago = (48, 1, 9000, 0)
    rows = [{"value": str(n), "timestamp": now_ms - n * 3_600_000} for n in hours_ago]
    inside("produce", name, "--json-lines", stdin="".join(json.dumps(row) + "\n" for row in rows))
    assert values(inside, name, "--since", "24h ago") == ["1", "0"]
    assert values(inside, name, "--from-time", "24h ago", "--until", "30m ago") == ["1"]
    assert values(inside, name, "--from", "24h ago") == ["1", "9000", "0"], "--from is a place alone"
    group = ("--group", f"group-of-{name}", "--since", "24h ago")
    assert values(inside, name, *group) == ["1", "9000", "0"], "what is left out would count as read"


@proves("U1")
def test_a_time_that_is_none_is_told_by_the_name_of_its_option(inside: Run) -> None:
    assert "Invalid value for --since" in inside("consume", "t", "--since", "tomorow", exit_code=2).stderr


@proves("U1")
def test_a_group_that_has_progress_says_that_it_does_not_start_elsewhere(inside: Run, topic: MakeTopic) -> None:
    name = topic()
    inside("produce", name, stdin="0\n1\n2\n")
    reading = ("consume", name, "--group", f"group-of-{name}")
    first = inside(*reading, "--from", "1", "--count", "1")
    assert (first.stdout, first.stderr) == ("1\n", "")
    again = inside(*reading, "--from", "0")
    assert again.stdout == "2\n"
    assert again.stderr.startswith(f"headrace: group group-of-{name} goes on where it left off in {name}-0, not at")
    assert again.stderr.count("\n") == 1
    assert inside(*reading).stderr == ""


@proves("U1")
def test_partitions_are_dealt_out_for_every_line(inside: Run, topic: MakeTopic) -> None:
    def sent(choice: str, *options: str, lines: list[str]) -> list[int]:
        """Partitions of the values 0, 1 and so on."""
        name = topic(4)
        inside("produce", name, "--partitions", choice, *options, stdin="".join(f"{line}\n" for line in lines))
        rows = [json.loads(line) for line in inside("consume", name, "--json").stdout.splitlines()]
        return [row["partition"] for row in sorted(rows, key=lambda row: int(row["value"]))]

    plain = [str(n) for n in range(20)]
    written = [json.dumps({"key": f"k{n}", "value": str(n), "partition": 3}) for n in range(20)]
    dealt = [n % 4 for n in range(20)]
    by_key = [partition_for_key(f"k{n}".encode(), 4) for n in range(20)]
    assert sent("round-robin", lines=plain) == dealt
    assert sent("round-robin", "--json-lines", lines=written) == dealt
    assert sent("by-key", "--json-lines", lines=written) == by_key
    assert sent("keep", "--json-lines", lines=written) == sent("fit", "--json-lines", lines=written) == [3] * 20
    assert sent("keep", "--partition", "2", lines=plain) == [2] * 20
    refused = inside("produce", "t", "--partition", "1", "--partitions", "round-robin", exit_code=2)
    assert "exclude each other" in refused.stderr
