"""Rows of a Delta or Parquet table written to a topic: each once, in their order, whatever happens in between."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

import headrace.arrow
from brokers import Broker
from clients.topics import create_topic
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.transactions import list_transactions
from headrace.client.errors import UnknownTopic
from headrace.errors import HeadraceError, OperatorError, SettingError
from headrace.pipelines import replay
from headrace.pipelines.replay_table import TableReplay
from headrace.spark.faults import VARIABLE
from proving import proves

START = datetime.datetime(2026, 11, 18, 12, tzinfo=datetime.UTC)
MAPPING = {"key": "user_id", "value": "payload", "timestamp": "ts", "headers": "tags", "partition": "shard"}
FLAG = ",".join(f"{field}={column}" for field, column in MAPPING.items())

Make = Callable[[Path, pa.Table], None]


def rows(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table(
        {
            "user_id": [f"user-{n % 5}" for n in numbers],
            "payload": [json.dumps({"n": n}) for n in numbers],
            "ts": pa.array([START + datetime.timedelta(minutes=n) for n in numbers], pa.timestamp("us", tz="UTC")),
            "tags": pa.array([[("n", str(n))] for n in numbers], pa.map_(pa.string(), pa.string())),
            "shard": pa.array([n % 3 for n in numbers], pa.int32()),
            "amount": [n * 1.5 for n in numbers],
        }
    )


def add_delta(path: Path, more: pa.Table) -> None:
    write_deltalake(path, more, mode="append")


def add_parquet(path: Path, more: pa.Table) -> None:
    path.mkdir(exist_ok=True)
    pq.write_table(more, path / f"part-{len(list(path.iterdir())):03}.parquet", row_group_size=16)


@pytest.fixture(params=[add_delta, add_parquet], ids=["delta", "parquet"])
def add(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


@pytest.fixture
def table(add: Make, tmp_path: Path) -> Path:
    for first in range(0, 120, 40):
        add(tmp_path / "a table", rows(first, 40))
    return tmp_path / "a table"


def new_topic() -> str:
    return f"t{uuid.uuid4().hex[:8]}"


def replayed(broker: Broker, topic: str) -> dict[int, list[tuple[Any, ...]]]:
    """By partition, in the order of the topic."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    columns = ("partition", "timestamp", "key", "value", "headers")
    for row in headrace.arrow.read(topic, bootstrap=broker.bootstrap, columns=columns).read_all().to_pylist():
        number = json.loads(row["value"])["n"]
        found.setdefault(row["partition"], []).append((number, row["timestamp"], row["key"], row["headers"]))
    return found


def expected(count: int) -> dict[int, list[tuple[Any, ...]]]:
    found: dict[int, list[tuple[Any, ...]]] = {}
    for n in range(count):
        headers = [{"key": "n", "value": str(n).encode()}]
        row = (n, START + datetime.timedelta(minutes=n), f"user-{n % 5}".encode(), headers)
        found.setdefault(n % 3, []).append(row)
    return found


def numbers(broker: Broker, topic: str) -> list[int]:
    return sorted(row[0] for of_partition in replayed(broker, topic).values() for row in of_partition)


@proves("S5")
def test_a_table_becomes_a_topic_as_its_columns_are_mapped(broker: Broker, table: Path, add: Make) -> None:
    options = TableReplay(table, broker.bootstrap, new_topic(), MAPPING)
    summary = replay.run(options)
    assert summary.ok
    assert replayed(broker, options.to) == expected(120)
    add(table, rows(120, 5)) if add is add_delta else None
    again = replay.run(options)
    assert (again.facts["records"], again.facts["went_on"]) == (0, True)
    if add is add_delta:
        assert (again.facts["version"], again.facts["newest_version"]) == (2, 3)


@proves("S5")
@pytest.mark.parametrize("point", ["replay-written:0", "replay-committed:1", "replay-written:2"])
def test_a_replay_of_a_table_that_is_killed_goes_on_where_it_was(
    broker: Broker, table: Path, add: Make, point: str
) -> None:
    """A Delta table that is written to in between is read to the end as it was."""
    to = new_topic()
    given = ["--table", str(table), "--to", to, "--columns", FLAG, "--bootstrap", broker.bootstrap]
    command = [str(Path(sys.executable).with_name("headrace")), "pipeline", "replay", *given]
    env = {**os.environ, VARIABLE: point}
    killed = subprocess.run([*command, "--rate", "50"], env=env, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    began = not point.endswith(":0")
    if add is add_delta:
        write_deltalake(table, rows(120, 7), mode="append")
        if began:
            DeltaTable(table).optimize.compact()
    done = subprocess.run([*command, "--json"], check=True, capture_output=True)
    assert json.loads(done.stdout)["went_on"] is began
    assert replayed(broker, to) == expected(120 if began or add is add_parquet else 127)
    with Cluster(broker.bootstrap) as cluster:
        ids = [each for each in list_transactions(cluster) if to in each.transactional_id]
    assert not [each for each in ids if each.state == "Ongoing"]


@proves("S5")
def test_rows_of_a_table_may_be_chosen(broker: Broker, table: Path) -> None:
    def chosen(**more: Any) -> list[int]:
        options = TableReplay(table, broker.bootstrap, new_topic(), MAPPING, **more)
        replay.run(options)
        return numbers(broker, options.to)

    at_ms = round((START + datetime.timedelta(minutes=50)).timestamp() * 1000)
    assert chosen(from_ms=at_ms) == list(range(50, 120))
    assert chosen(until_ms=at_ms) == list(range(50))
    assert chosen(key=b"user-3", from_ms=at_ms) == list(range(53, 120, 5))
    assert chosen(where="amount >= 60 and user_id <> 'user-0'") == [n for n in range(40, 120) if n % 5]
    with pytest.raises(
        SettingError, match=r"condition 'nothing > 3' cannot be asked: .*The table has user_id, payload"
    ):
        chosen(where="nothing > 3")


def test_all_columns_as_json_and_the_broker_decides_the_partitions(broker: Broker, table: Path) -> None:
    to = create_topic(broker, new_topic(), 2)
    replay.run(TableReplay(table, broker.bootstrap, to, {"key": "user_id", "value": "*"}))
    found = headrace.arrow.read(to, bootstrap=broker.bootstrap, columns=("partition", "key", "value")).read_all()
    values = [json.loads(value) for value in found["value"].to_pylist()]
    assert sorted(value["amount"] for value in values) == [n * 1.5 for n in range(120)]
    assert {value["user_id"] for value in values} == {f"user-{n}" for n in range(5)}
    for key in (b"user-%d" % n for n in range(5)):
        mine = [value["ts"] for value, of in zip(values, found["key"].to_pylist(), strict=True) if of == key]
        assert mine == sorted(mine)


def test_a_table_that_is_not_what_it_was_is_not_gone_on_with(broker: Broker, tmp_path: Path) -> None:
    path, to = tmp_path / "table", new_topic()
    add_parquet(path, rows(0, 40))
    replay.run(TableReplay(path, broker.bootstrap, to, MAPPING))
    add_parquet(path, rows(40, 40))
    told = "cannot go on from row 40: the files of .* have changed since: .* --name begins another one"
    with pytest.raises(OperatorError, match=told):
        replay.run(TableReplay(path, broker.bootstrap, to, MAPPING))
    replay.run(TableReplay(path, broker.bootstrap, to, MAPPING, name=f"{to}-2"))
    assert numbers(broker, to) == sorted([*range(40), *range(80)])
    with pytest.raises(OperatorError, match="was begun with another table, topic, mapping or choice of rows"):
        replay.run(TableReplay(path, broker.bootstrap, to, {"value": "payload"}, name=f"{to}-2"))


def test_what_does_not_fit_is_told_before_anything_is_written(broker: Broker, table: Path) -> None:
    topic = new_topic()

    def refused(told: str, columns: dict[str, str], to: str = topic, **more: Any) -> None:
        with pytest.raises(HeadraceError, match=told):
            replay.run(TableReplay(table, broker.bootstrap, to, columns, **more))

    refused("value=payloads: the table has no column 'payloads'; it has user_id, payload", {"value": "payloads"})
    refused("the table has no column 'value': name one", {})
    refused("'payload' is .*string.*, and has to be a timestamp", {"value": "payload", "timestamp": "payload"})
    refused("--from needs a column: name it as --columns timestamp=COLUMN", {"value": "payload"}, from_ms=0)
    refused("--key needs a column", {"value": "payload"}, key=b"a")
    with Cluster(broker.bootstrap) as cluster, pytest.raises(UnknownTopic):
        cluster.topic(topic)
    small = create_topic(broker, new_topic(), 2)
    refused("has 2 partitions, and column 'shard' has partition 2: enlarge it", MAPPING, small)
    assert replayed(broker, small) == {}


def test_partitions_that_cannot_be_meant_make_no_topic(broker: Broker, tmp_path: Path) -> None:
    for wrong, told in ((1_000_000, "make the topic first"), (-1, "partitions begin at 0")):
        pq.write_table(pa.table({"value": ["a"], "partition": [wrong]}), tmp_path / "one.parquet")
        with pytest.raises(OperatorError, match=told):
            replay.run(TableReplay(tmp_path / "one.parquet", broker.bootstrap, new_topic()))


def test_a_row_too_large_is_named(broker: Broker, tmp_path: Path) -> None:
    to = create_topic(broker, new_topic(), 1, max_message_bytes=100_000)
    values = ["x" * (200_000 if n == 33 else 10) for n in range(50)]
    pq.write_table(pa.table({"key": [f"k{n}" for n in range(50)], "value": values}), tmp_path / "one.parquet")
    told = "row 33 of the table, with key b'k33', has 200003 bytes, and topic .* takes 100000 in a batch"
    with pytest.raises(OperatorError, match=told):
        replay.run(TableReplay(tmp_path / "one.parquet", broker.bootstrap, to, where="key <> 'k3'"))
    assert len(headrace.arrow.read(to, bootstrap=broker.bootstrap).read_all()) == 0
