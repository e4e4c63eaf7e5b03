"""`headrace export` and `headrace import`: a topic in a file and back."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brokers import Broker, wait_for
from cli.conftest import COMMAND, Run, environment
from headrace.cli import import_
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import delete_records
from headrace.client.producer.producer import Producer
from headrace.records.partitioner import partition_for_key
from proving import proves

MakeTopic = Callable[..., str]
FILES = ["topic.jsonl", "topic.jsonl.gz", "topic.parquet"]


def send(broker: Broker, name: str, partitions: int) -> None:
    """Records of every kind in every partition, in batches of every codec."""
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        with Producer(broker.bootstrap, codec=codec) as producer:
            for n in range(partitions):
                for key, value, headers in (
                    (b"key", b"value", [("a", b"1"), ("a", None), ("a", b"0"), ("", b"\xff")]),
                    (b"\x00\xff\xfe", b"\xc3\x28 not text \x80", []),
                    (None, None, []),
                    (b"", b"", [("empty", b"")]),
                    ("ä".encode(), None, []),
                    (None, b"line\nbreak\r\n", []),
                ):
                    timestamp_ms = 1_700_000_000_000 + n
                    producer.send_async(name, value, key=key, headers=headers, partition=n, timestamp_ms=timestamp_ms)


def rows(inside: Run, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in inside("consume", name, "--json").stdout.split("\n") if line]
    for row in found:
        del row["topic"]
    return sorted(found, key=lambda row: (row["partition"], row["offset"]))


@pytest.mark.parametrize("file", FILES)
@proves("U1")
def test_a_topic_goes_to_a_file_and_back_unchanged(
    inside: Run, broker: Broker, topic: MakeTopic, tmp_path: Path, file: str
) -> None:
    name = topic(3)
    send(broker, name, 3)
    path = tmp_path / file
    told = json.loads(inside("export", name, str(path), "--json").stdout)
    assert (told["records"], told["partitions"]) == (90, {"0": 30, "1": 30, "2": 30})
    assert told["bytes"] == path.stat().st_size
    assert list(tmp_path.glob(".tmp*")) == []
    copy = f"{name}-copy"
    assert "--create makes it" in inside("import", str(path), copy, exit_code=1).stderr
    told = json.loads(inside("import", str(path), copy, "--create", "--compression", "lz4", "--json").stdout)
    assert told == {"acknowledged": 90, "through": 90, "complete": True, "partitions": {"0": 30, "1": 30, "2": 30}}
    assert rows(inside, copy) == rows(inside, name)


@proves("U1")
def test_what_is_exported_can_be_bounded(inside: Run, topic: MakeTopic, tmp_path: Path) -> None:
    name = topic(2)
    lines = [{"value": str(n), "partition": n % 2, "timestamp": 1_700_000_000_000 + n * 1000} for n in range(10)]
    inside("produce", name, "--json-lines", stdin="".join(json.dumps(line) + "\n" for line in lines))
    bounds = ("--from", "@1700000002", "--until", "@1700000007", "--force")
    inside("export", name, str(tmp_path / "t.jsonl"), *bounds)
    inside("export", name, str(tmp_path / "t.parquet"), *bounds)
    found = sorted(json.loads(line)["value"] for line in (tmp_path / "t.jsonl").read_text().splitlines())
    assert found == sorted(value.decode() for value in pq.read_table(tmp_path / "t.parquet")["value"].to_pylist())
    assert found == ["2", "3", "4", "5", "6"]
    inside("export", name, str(tmp_path / "t.jsonl"), "--partition", "1", "--until", "2", "--force")
    assert [json.loads(line)["value"] for line in (tmp_path / "t.jsonl").read_text().splitlines()] == ["1", "3"]


@proves("U1")
def test_a_file_that_has_its_name_is_whole(inside: Run, broker: Broker, topic: MakeTopic, tmp_path: Path) -> None:
    name = topic()
    inside("produce", name, stdin="a\nb\nc\n")
    path = tmp_path / "t.jsonl"
    path.write_text("mine\n")
    assert "--force replaces it" in inside("export", name, str(path), exit_code=1).stderr
    with Cluster(broker.bootstrap) as cluster:
        delete_records(cluster, name, {0: 2})
    assert (
        "offsets 0 to 1 are gone" in inside("export", name, str(path), "--from", "0", "--force", exit_code=1).stderr
    ), "what the log no longer has is not left out without a word"
    assert path.read_text() == "mine\n"
    assert list(tmp_path.glob(".tmp*")) == []
    assert "cannot write" in inside("export", name, str(tmp_path / "no" / "t.jsonl"), exit_code=1).stderr
    assert ".parquet" in inside("export", name, str(tmp_path / "t.csv"), exit_code=1).stderr


@pytest.mark.parametrize("file", ["topic.jsonl", "topic.parquet"])
@proves("U1")
def test_records_go_where_they_are_mapped_to(inside: Run, topic: MakeTopic, tmp_path: Path, file: str) -> None:
    wide, path = topic(4), str(tmp_path / file)
    lines = [{"key": f"k{n}", "value": str(n), "partition": n % 4} for n in range(40)]
    inside("produce", wide, "--json-lines", stdin="".join(json.dumps(line) + "\n" for line in lines))
    inside("export", wide, path)

    def imported(partitions: int, choice: str) -> dict[int, int]:
        target = topic(partitions)
        inside("import", path, target, "--partitions", choice)
        found = {int(row["value"]): row["partition"] for row in rows(inside, target)}
        assert len(found) == 40
        return found

    by_key = {n: partition_for_key(f"k{n}".encode(), 2) for n in range(40)}
    assert imported(6, "keep") == {n: n % 4 for n in range(40)}
    assert imported(2, "by-key") == by_key
    assert imported(2, "fit") == {n: n % 4 if n % 4 < 2 else by_key[n] for n in range(40)}
    assert sorted(imported(2, "round-robin").values()) == [0] * 20 + [1] * 20
    narrow = topic(2)
    refused = inside("import", path, narrow, "--partitions", "keep", exit_code=1).stderr
    assert f"{narrow} has 2 partitions, and none" in refused


@proves("U1")
def test_a_wrong_line_is_named_and_the_rest_goes_on_behind_it(inside: Run, topic: MakeTopic, tmp_path: Path) -> None:
    name, path = topic(), tmp_path / "t.jsonl"
    path.write_text('{"value": "1"}\n\n{"value": "3"}\n{"vaule": "4"}\n{"value": "5"}\n')
    done = inside("import", str(path), name, "--json", exit_code=1)
    assert json.loads(done.stdout)["through"] == 3
    assert "line 4: unknown field 'vaule'" in done.stderr
    assert "2 records were acknowledged, among them all up to line 3" in done.stderr
    path.write_text(path.read_text().replace("vaule", "value"))
    inside("import", str(path), name, "--skip", "3")
    assert inside("consume", name).stdout.split() == ["1", "3", "4", "5"]
    path.write_text("")
    assert "0 records" in inside("import", str(path), name).stderr


@proves("U1")
def test_of_a_file_that_is_cut_off_what_was_sent_is_told(
    inside: Run, topic: MakeTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_, "ROUND_LINES", 10)
    name, path = topic(1), tmp_path / "cut.jsonl.gz"
    whole = gzip.compress(b"".join(b'{"value": "%d"}\n' % (n * n * 7919) for n in range(1000)))
    path.write_bytes(whole[: len(whole) // 2])
    told = inside("import", str(path), name, "--json", exit_code=1)
    assert "cannot be read any further" in told.stderr
    result = json.loads(told.stdout)
    assert 0 < result["through"] <= result["acknowledged"] < 1000
    assert not result["complete"]


@proves("U1")
def test_a_pipe_is_not_imported_and_the_remedy_is_told(inside: Run, topic: MakeTopic, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    told = inside("import", str(tmp_path / "pipe.jsonl"), topic(), exit_code=1).stderr
    assert "is no regular file" in told
    assert "headrace produce --json-lines" in told


@proves("U1")
def test_of_a_damaged_parquet_file_what_was_sent_is_told(inside: Run, topic: MakeTopic, tmp_path: Path) -> None:
    name, path = topic(1), tmp_path / "damaged.parquet"
    pq.write_table(pa.table({"value": [b"%d" % (n * 7919) for n in range(30_000)]}), path, row_group_size=10_000)
    place = pq.ParquetFile(path).metadata.row_group(2).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 50] = b"\xff" * 50
    path.write_bytes(content)
    told = inside("import", str(path), name, "--json", exit_code=1)
    assert "cannot be read any further" in told.stderr
    result = json.loads(told.stdout)
    assert (result["acknowledged"], result["through"], result["complete"]) == (20_000, 20_000, False)


@proves("U1")
@pytest.mark.parametrize(
    ("column", "values"),
    [("partition", ["0"]), ("partition", [0.5]), ("timestamp", ["2024-01-01"]), ("headers", ["a"])],
)
def test_a_column_of_another_kind_is_told_by_name(
    inside: Run, topic: MakeTopic, tmp_path: Path, column: str, values: list[object]
) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"value": ["a"], column: values}), path)
    told = inside("import", str(path), topic(1), exit_code=1).stderr
    assert f"column '{column}' has" in told
    assert "nothing was sent" in told
    assert "Traceback" not in told


def test_any_parquet_file_with_values_is_taken(inside: Run, topic: MakeTopic, tmp_path: Path) -> None:
    name, path = topic(), tmp_path / "t.parquet"
    pq.write_table(pa.table({"value": ["a", "b", None], "key": [b"1", b"2", b"3"], "more": [1, 2, 3]}), path)
    inside("import", str(path), name, "--skip", "1")
    assert inside("consume", name, "--format", "%k %v").stdout == "2 b\n3 \n"
    pq.write_table(pa.table({"text": ["a"]}), path)
    assert "no column 'value'; it has text" in inside("import", str(path), name, exit_code=1).stderr
    path.write_bytes(b"no Parquet")
    assert "is no Parquet file" in inside("import", str(path), name, exit_code=1).stderr


def test_without_pyarrow_the_remedy_is_told(
    inside: Run, topic: MakeTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = topic()
    monkeypatch.setitem(sys.modules, "headrace.arrow.topic_file", None)
    monkeypatch.delattr("headrace.arrow.topic_file", raising=False)
    assert "headrace[arrow]" in inside("export", name, str(tmp_path / "t.parquet"), exit_code=1).stderr
    (tmp_path / "t.parquet").touch()
    assert "headrace[arrow]" in inside("import", str(tmp_path / "t.parquet"), name, exit_code=1).stderr


@proves("U1")
def test_an_interrupted_import_claims_no_more_than_is_there(
    inside: Run, broker: Broker, topic: MakeTopic, tmp_path: Path
) -> None:
    name, path = topic(), tmp_path / "t.jsonl.gz"
    count = 20 * import_.ROUND_LINES
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"".join(b'{"value": "%d"}\n' % n for n in range(count)))
    process = subprocess.Popen(
        [*COMMAND, "import", str(path), name, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(broker.bootstrap),
    )
    wait_for("the first records", lambda: inside("consume", name, "--count", "1").stdout == "0\n")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    told = json.loads(out)
    end = int(inside("consume", name, "--tail", "1", "--format", "%o").stdout) + 1
    assert told["acknowledged"] == told["through"] == end
    assert (process.returncode, told["complete"]) == ((143, False) if end < count else (0, True))
    if end < count:
        assert f"--skip {end} goes on there" in err.decode()
