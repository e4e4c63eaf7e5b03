"""`headrace produce` and `headrace consume` against a broker."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from brokers import Broker
from cli.conftest import COMMAND, Run, Running, environment
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.records.partitioner import partition_for_key
from proving import proves

MakeTopic = Callable[..., str]
Start = Callable[..., Running]


def test_lines_go_in_and_come_out(run: Run, topic: MakeTopic) -> None:
    name = topic()
    lines = [f"line {n} äöü" for n in range(25_000)]
    done = run("produce", name, stdin="\n".join(lines))
    assert done.stderr == "25000 records acknowledged in 1 partition\n"
    assert run("consume", name).stdout.splitlines() == lines


@pytest.mark.parametrize(
    ("compression", "acks"),
    [("none", "0"), ("none", "1"), ("none", "all"), ("gzip", "all"), ("snappy", "1"), ("lz4", "all"), ("zstd", "0")],
)
@proves("G5", "J1")
def test_every_compression_and_every_acks(inside: Run, topic: MakeTopic, compression: str, acks: str) -> None:
    name = topic()
    inside("produce", name, "--compression", compression, "--acks", acks, stdin="a\nb\n\nd\n")
    inside("produce", name, stdin="end\n")
    assert inside("consume", name).stdout == "a\nb\n\nd\nend\n"


@proves("G17")
def test_keys_decide_the_partition_and_a_named_one_overrides(inside: Run, topic: MakeTopic) -> None:
    name = topic(4)
    keys = [f"key-{n}" for n in range(20)]
    inside("produce", name, "--key-separator", "=>", stdin="".join(f"{key}=>{key}!\n" for key in keys))
    found = [line.split(" ") for line in inside("consume", name, "--format", "%p %k %v").stdout.splitlines()]
    assert {(key, value, int(n)) for n, key, value in found} == {
        (key, key + "!", partition_for_key(key.encode(), 4)) for key in keys
    }
    inside("produce", name, "--partition", "3", "--key-separator", ":", stdin="key-0:named\n")
    assert (
        inside("consume", name, "--partition", "3", "--format", "key-value").stdout.splitlines()[-1] == "key-0\tnamed"
    )


def test_without_a_key_all_partitions_get_their_share(inside: Run, topic: MakeTopic) -> None:
    name = topic(3)
    done = inside("produce", name, "--json", stdin="".join(f"{n:0100}\n" for n in range(20_000)))
    told = json.loads(done.stdout)
    assert (told["acknowledged"], told["failed"]) == (20_000, 0)
    assert set(told["partitions"]) == {"0", "1", "2"}
    counted = Counter(inside("consume", name, "--format", "%p").stdout.splitlines())
    assert counted == told["partitions"]


def test_json_lines_survive_the_round_trip(inside: Run, topic: MakeTopic) -> None:
    first, second = topic(2), topic(2)
    given = [
        {"key": "k", "value": "v", "headers": {"a": "1", "b": None}, "partition": 1, "timestamp": 1_700_000_000_000},
        {"key": None, "value": None, "partition": 0, "timestamp": 5},
        {"key_base64": "/w==", "value_base64": "AAH/", "partition": 0, "timestamp": 6},
    ]
    inside("produce", first, "--json-lines", "--header", "all=x", stdin="".join(json.dumps(g) + "\n" for g in given))
    printed = inside("consume", first, "--format", "json").stdout
    rows = sorted(
        (json.loads(line) for line in printed.splitlines()), key=lambda row: (row["partition"], row["offset"])
    )
    assert [row.get("value_base64") for row in rows] == [None, "AAH/", None]
    assert rows[2]["headers"] == [
        {"name": "all", "value": "x"},
        {"name": "a", "value": "1"},
        {"name": "b", "value": None},
    ]
    inside("produce", second, "--json-lines", stdin=printed)
    again = inside("consume", second, "--format", "json").stdout.replace(second, first)
    assert sorted(again.splitlines()) == sorted(printed.splitlines())


def test_a_wrong_line_is_named_and_what_came_before_is_sent(run: Run, topic: MakeTopic, tmp_path: Path) -> None:
    name = topic()
    file = tmp_path / "records"
    file.write_text('{"value": "good"}\n{"value": }\n')
    done = run("produce", name, "--json-lines", stdin=file.read_text(), exit_code=1)
    assert done.stderr.startswith("headrace: line 2: not valid JSON")
    assert "of the records before it 1 were sent" in done.stderr
    assert run("consume", name).stdout == "good\n"
    done = run("produce", name, "--file", str(tmp_path / "nothing"), exit_code=1)
    assert "No such file" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ('{"headers": 5}', "headers must be"),
        ('{"value": }', "not valid JSON"),
        ('{"value": "x", "partition": 1}', "has no partition 1, only 0 to 0"),
    ],
)
@proves("U1")
def test_nothing_of_a_file_with_a_wrong_line_is_sent(
    inside: Run, topic: MakeTopic, tmp_path: Path, wrong: str, why: str
) -> None:
    name = topic()
    file = tmp_path / "records"
    file.write_text('{"value": "good"}\n' * 3 + wrong + "\n")
    done = inside("produce", name, "--json-lines", "--file", str(file), exit_code=1)
    assert done.stderr.startswith("headrace: line 4: ")
    assert why in done.stderr
    assert done.stderr.endswith("; nothing was sent\n")
    assert inside("consume", name).stdout == ""


@proves("U1")
def test_a_file_is_sent_from_where_standard_input_stands(
    inside: Run, topic: MakeTopic, tmp_path: Path, broker: Broker
) -> None:
    name = topic()
    file = tmp_path / "records"
    file.write_text("title\n" + "".join(f"k{n}:{n}\n" for n in range(3)))
    with file.open("rb", buffering=0) as given:
        given.seek(6)
        command = [*COMMAND, "produce", name, "--key-separator", ":"]
        subprocess.run(command, stdin=given, env=environment(broker.bootstrap), check=True)
    assert inside("consume", name).stdout == "0\n1\n2\n"


@proves("U1")
def test_input_that_cannot_be_read_is_told(inside: Run, topic: MakeTopic, broker: Broker, tmp_path: Path) -> None:
    name = topic()
    done = inside("produce", name, "--file", str(tmp_path), exit_code=1)
    assert done.stderr == "headrace: cannot read the input: Is a directory\n"
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "produce", name]
    ended = subprocess.run(closed, env=environment(broker.bootstrap), capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "headrace: standard input is closed; pipe lines in, or give --file\n"


@proves("U1")
def test_no_topic_is_created_before_there_is_a_record_for_it(inside: Run, topic: MakeTopic) -> None:
    name = f"new-{topic()}"
    assert inside("produce", name).stderr == "no line came in: nothing was sent\n"
    assert name not in inside("topic", "list").stdout.split()
    inside("produce", name, stdin="first\n")
    assert inside("consume", name).stdout == "first\n"


def test_what_was_not_acknowledged_is_told_and_fails(inside: Run, topic: MakeTopic) -> None:
    name = topic(1, "--config", "max.message.bytes=2000")
    done = inside("produce", name, stdin="x" * 5000 + "\n", exit_code=1)
    assert "1 of 1 records were not acknowledged" in done.stderr


@proves("G18")
def test_where_to_start_and_how_many(inside: Run, topic: MakeTopic) -> None:
    name = topic()
    now_ms = int(time.time() * 1000)
    hour_ms = 3_600_000  # so that it does not matter how long the commands take
    rows = [{"value": str(n), "timestamp": now_ms - (10 - n) * hour_ms} for n in range(10)]
    inside("produce", name, "--json-lines", stdin="".join(json.dumps(row) + "\n" for row in rows))

    def values(*options: str) -> list[int]:
        return [int(line) for line in inside("consume", name, *options).stdout.split()]

    assert values() == values("--from", "beginning") == list(range(10))
    assert values("--from", "7") == [7, 8, 9]
    assert values("--from", "3", "--count", "2", "--partition", "0") == [3, 4]
    assert values("--from", "end") == []
    assert values("--from-time", "7.5h ago") == [3, 4, 5, 6, 7, 8, 9]
    assert values("--from-time", str(now_ms - 2 * hour_ms)) == [8, 9]
    assert values("--from-time", "1s ago") == []


def test_an_offset_before_the_log_is_refused_with_the_remedy(inside: Run, topic: MakeTopic, broker: Broker) -> None:
    name = topic()
    inside("produce", name, stdin="0\n1\n2\n")
    with Cluster(broker.bootstrap) as cluster:
        operations.delete_records(cluster, name, {0: 2})
    assert "start at `beginning` or `end`" in inside("consume", name, "--from", "0", exit_code=1).stderr
    assert inside("consume", name).stdout == "2\n"


def test_following_prints_what_arrives_until_ctrl_c(inside: Run, start: Start, topic: MakeTopic) -> None:
    name = topic(2)
    inside("produce", name, stdin="early\n")
    following = start("consume", name, "--follow")
    assert following.lines(1) == ["early"]
    for n in range(3):
        inside("produce", name, stdin=f"{n}\n")
        assert following.lines(1) == [str(n)]
    code, said = following.interrupt()
    assert code == 130
    assert said.strip() == ""


def test_lines_typed_slowly_are_sent_before_the_end_of_input(inside: Run, start: Start, topic: MakeTopic) -> None:
    name = topic()
    typing = start("produce", name)
    following = start("consume", name, "--follow")
    assert typing.process.stdin is not None
    for n in range(3):
        typing.process.stdin.write(f"typed {n}\n".encode())
        typing.process.stdin.flush()
        assert following.lines(1) == [f"typed {n}"]
    code, said = typing.interrupt()
    assert code == 130
    assert "3 records acknowledged" in said


def test_a_reader_that_has_seen_enough_ends_it_quietly(inside: Run, topic: MakeTopic, broker: Broker) -> None:
    name = topic()
    inside("produce", name, stdin="".join(f"{n:0200}\n" for n in range(20_000)))
    process = subprocess.Popen(
        [*COMMAND, "consume", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(broker.bootstrap),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.readline() == b"0" * 200 + b"\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.wait(60) == 0


def test_a_group_goes_on_where_it_left_off(inside: Run, topic: MakeTopic) -> None:
    name = topic(2)
    group = f"group-of-{name}"
    inside("produce", name, stdin="".join(f"{n}\n" for n in range(10)))
    first = inside("consume", name, "--group", group, "--count", "4").stdout.split()
    second = inside("consume", name, "--group", group).stdout.split()
    assert sorted(map(int, first + second)) == list(range(10))
    assert inside("consume", name, "--group", group).stdout == ""
    inside("produce", name, stdin="new\n")
    assert inside("consume", name, "--group", group).stdout == "new\n"


def test_a_group_begins_where_it_is_told_and_then_goes_on(inside: Run, topic: MakeTopic) -> None:
    name = topic()
    inside("produce", name, stdin="".join(f"{n}\n" for n in range(5)))

    def values(group: str, *options: str) -> list[int]:
        return [int(line) for line in inside("consume", name, "--group", f"{group}-of-{name}", *options).stdout.split()]

    assert values("offset", "--from", "3") == [3, 4]
    assert values("offset", "--from", "3") == [], "it is for partitions of which nothing was committed"
    assert values("end", "--from", "end") == []
    assert values("time", "--from-time", "1h ago", "--count", "1") == [0]
    assert values("time", "--from-time", "1s ago") == [1, 2, 3, 4]


def test_a_group_goes_on_at_the_beginning_of_a_log_that_has_lost_its_place(
    inside: Run, topic: MakeTopic, broker: Broker
) -> None:
    name = topic()
    inside("produce", name, stdin="0\n1\n2\n3\n")
    assert inside("consume", name, "--group", f"group-of-{name}", "--count", "1").stdout == "0\n"
    with Cluster(broker.bootstrap) as cluster:
        operations.delete_records(cluster, name, {0: 2})
    done = inside("consume", name, "--group", f"group-of-{name}")
    assert done.stdout == "2\n3\n"
    assert done.stderr == f"headrace: {name}-0 has no offset 1; going on at 2\n"
