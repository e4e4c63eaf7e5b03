"""`headrace log` on a folder that a broker has left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from brokers import Brokers
from cli.conftest import Run
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.produce import produce
from headrace.client.producer.request import Outgoing
from headrace.records import kernel
from headrace.storage.folder import PARTITIONED, SHARED
from proving import proves
from storage.harness import append, batch, real_harness
from storage.transactional import Writer


@pytest.fixture(scope="module")
def stopped(brokers: Brokers, request: pytest.FixtureRequest) -> Path:
    """The folder of a stopped broker with two topics."""
    if request.config.getoption("--apache-kafka"):
        pytest.skip("Apache Kafka's folders are not read")
    broker = brokers.start()
    with Cluster(broker.bootstrap) as cluster:
        operations.create_topic(cluster, "orders", partitions=2, configs={"segment.bytes": "4096"})
        operations.create_topic(cluster, "other", partitions=1)
        for n in range(5):
            batch = kernel.build([(1, None, b"x" * 1500, []), (2, None, b"%d" % n, [])])
            produce(cluster, [Outgoing("orders", 1, batch)])
        produce(cluster, [Outgoing("other", 0, kernel.build([(3, b"k", b"v", [("h", b"v")])]))])
    broker.stop()
    return broker.data


@pytest.fixture
def data(stopped: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(stopped, tmp_path / "data"))


def test_a_whole_folder_is_said_to_be_whole(alone: Run, data: Path) -> None:
    shown = json.loads(alone("log", "verify", str(data), "--json").stdout)
    assert (shown["whole"], shown["problems"], shown["set_aside"]) == (True, [], [])
    orders = next(p for p in shown["partitions"] if (p["topic"], p["partition"]) == ("orders", 1))
    assert (orders["start"], orders["end"]) == (0, 10)
    assert sum(segment["records"] for segment in orders["segments"]) == 10
    assert len(orders["segments"]) > 1
    text = alone("log", "verify", str(data), "--topic", "orders").stdout.splitlines()
    assert text[0].split() == ["PARTITION", "SEGMENT", "FIRST", "NEXT", "BATCHES", "RECORDS", "BYTES", "COMPACTED"]
    assert "orders-1" in text[-2]
    assert " is whole; 2 partitions" in text[-1]


@proves("J1")
def test_a_flipped_byte_is_named_with_file_place_and_offset(alone: Run, data: Path) -> None:
    log = sorted((data / "orders" / "orders-1").glob("*.log"))[0]
    content = bytearray(log.read_bytes())
    content[200] ^= 0x10
    log.write_bytes(content)
    done = alone("log", "verify", str(data), exit_code=1)
    assert "NOT whole" in done.stdout.splitlines()[-1]
    shown = json.loads(alone("log", "verify", str(data), "--json", exit_code=1).stdout)
    problem = shown["problems"][0]
    assert (problem["path"], problem["position"], problem["offset"]) == (str(log), 0, 0)
    assert "CRC" in problem["what"]
    assert f"{log} at byte 0, offset 0: " in alone("log", "dump", str(data), exit_code=1).stdout


def test_batches_and_records_are_dumped(alone: Run, data: Path) -> None:
    only = (str(data), "--topic", "other", "--partition", "0")
    rows = [json.loads(line) for line in alone("log", "dump", *only, "--json", "--records").stdout.splitlines()]
    batch, record = rows
    assert (batch["first"], batch["last"], batch["records"], batch["codec"]) == (0, 0, 1, "none")
    assert (record["key"], record["value"]) == ("k", "v")
    assert record["headers"] == [{"name": "h", "value": "v"}]
    lines = alone("log", "dump", str(data), "--topic", "orders").stdout.splitlines()
    assert lines[0].split()[:3] == ["PARTITION", "FIRST", "LAST"]
    assert [line.split()[:3] for line in lines[1:]] == [["orders-1", str(n), str(n + 1)] for n in range(0, 10, 2)]


def test_what_is_no_data_folder_is_refused(alone: Run, data: Path, tmp_path: Path) -> None:
    assert "there is no folder" in alone("log", "verify", str(tmp_path / "nothing"), exit_code=1).stderr
    assert "is not the data folder of a broker" in alone("log", "dump", str(tmp_path), exit_code=1).stderr
    assert "holds no such partition" in alone("log", "dump", str(data), "--topic", "nothing", exit_code=1).stderr


def test_a_folder_is_converted_and_read_in_either_layout(alone: Run, data: Path) -> None:
    before = _batches(alone, data)
    planned = json.loads(alone("log", "convert", "--to", "shared", "--data", str(data), "--dry-run", "--json").stdout)
    assert (planned["dry_run"], planned["source"], planned["records"]) == (True, "partitioned", 11)
    assert not (data / "@commitlog").exists()
    text = alone("log", "convert", "--to", "shared", "--data", str(data), "--keep").stdout
    assert f"{data} is now shared, was partitioned; 3 partitions, 11 records" in text
    assert (data / "@kept-partitioned-0" / "orders" / "orders-1").is_dir()
    shown = json.loads(alone("log", "verify", str(data), "--json").stdout)
    assert (shown["layout"], shown["whole"], len(shown["commit_log"])) == ("shared", True, 1)
    assert f"{data} (shared) is whole; 3 partitions, 1 commit files" in alone("log", "verify", str(data)).stdout
    assert _batches(alone, data) == before
    assert (
        "has the layout 'shared' already"
        in alone("log", "convert", "--to", "shared", "--data", str(data), exit_code=1).stderr
    )
    alone("log", "convert", "--to", "partitioned", "--data", str(data))
    assert _batches(alone, data) == before
    assert len(list((data / "orders" / "orders-1").glob("*.log"))) > 1  # its topic has small segments


def test_converted_files_have_the_size_of_the_settings(alone: Run, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for harness in real_harness(str(data)):
        log = harness.log()
        for _ in range(100):
            append(log, batch(b"x" * 2000))
            assert not harness.write()
        assert harness.store is not None
        harness.store.close()
    small = "commitlog.file.bytes=65536"
    alone("log", "convert", "--to", "shared", "--data", str(data), "--set", small)
    assert len(list((data / "@commitlog").glob("*.log"))) == 4
    (tmp_path / "broker.toml").write_text("[log]\nsegment.bytes = 65536\n")
    alone("log", "convert", "--to", "partitioned", "--data", str(data), "--config", str(tmp_path / "broker.toml"))
    assert len(list((data / "orders" / "orders-0").glob("*.log"))) == 4
    refused = alone(
        "log", "convert", "--to", "shared", "--data", str(data), "--set", "commitlog.file.bytes=1", exit_code=2
    )
    assert "commitlog.file.bytes" in refused.stderr


def _batches(alone: Run, data: Path) -> list[object]:
    rows = [json.loads(line) for line in alone("log", "dump", str(data), "--json", "--records").stdout.splitlines()]
    return [{name: value for name, value in row.items() if name not in ("path", "position")} for row in rows]


@proves("J1")
def test_a_flipped_byte_of_a_commit_log_is_named(alone: Run, data: Path) -> None:
    alone("log", "convert", "--to", "shared", "--data", str(data))
    (log,) = (data / "@commitlog").glob("*.log")
    content = bytearray(log.read_bytes())
    content[300] ^= 0x10
    log.write_bytes(content)
    shown = json.loads(alone("log", "verify", str(data), "--json", exit_code=1).stdout)
    assert shown["problems"][0]["path"] == str(log)
    assert shown["problems"][0]["position"] <= 300
    refused = alone("log", "convert", "--to", "partitioned", "--data", str(data), exit_code=1).stderr
    assert "is not whole, problems: " in refused


def test_how_to_convert_is_told(alone: Run, tmp_path: Path) -> None:
    assert "Missing option '--data'" in alone("log", "convert", exit_code=2).stderr
    assert "partitioned" in alone("log", "convert", "--to", "x", "--data", str(tmp_path), exit_code=2).stderr
    refused = alone("log", "convert", "--to", "shared", "--data", str(tmp_path), exit_code=1).stderr
    assert "is not the data folder of a broker" in refused
    assert not list(tmp_path.iterdir())


@proves("T2")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_open_aborted_and_committed_transactions_are_named(alone: Run, tmp_path: Path, layout: str) -> None:
    data = tmp_path / "data"
    writer = Writer()
    for harness in real_harness(str(data), layout):
        log = harness.log()
        for producer_id, committed in ((1, True), (2, False), (3, None)):
            writer.write(log, producer_id)
            if committed is not None:
                writer.mark(log, producer_id, committed=committed)
        append(log, batch(b"plain"))
        harness.write()
        assert harness.store is not None
        assert harness.store.close()
        harness.store = None
    shown = json.loads(alone("log", "verify", str(data), "--json").stdout)
    assert shown["whole"]
    (partition,) = shown["partitions"]
    assert partition["transactions"] == {"committed": 1, "aborted": 1, "open": [{"producer_id": 3, "first": 4}]}
    text = alone("log", "verify", str(data)).stdout
    assert "orders-0: transactions: 1 committed, 1 aborted, 1 open" in text
    assert "orders-0: open since offset 4, of producer 3" in text
    dumped = [json.loads(line) for line in alone("log", "dump", str(data), "--json").stdout.splitlines()]
    outcomes = ["committed", "committed here", "aborted", "aborted here", "open", None]
    assert [each["transaction"] for each in dumped] == outcomes
