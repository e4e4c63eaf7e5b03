"""`headrace load` and `headrace produce --ledger`: what the ledger claims is what the topic has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import headrace.arrow
from brokers import DIES_WITH_PARENT, Broker, wait_for
from cli.conftest import COMMAND, Run, environment
from headrace.arrow.ledger import SCHEMA, Ledger, counting_from
from headrace.arrow.rolling_files import RollingFiles
from headrace.errors import OperatorError
from proving import proves

MakeTopic = Callable[..., str]
COLUMNS = ("partition", "offset", "timestamp", "digest", "key", "value")


def topic_name() -> str:
    return f"load-{uuid.uuid4().hex[:12]}"


def read_ledger(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("*.parquet"))])


def claimed(ledger: pa.Table) -> Counter[object]:
    return Counter(
        zip(*(ledger[name].to_pylist() for name in ("partition", "offset", "timestamp", "digest")), strict=True)
    )


def kept(broker: Broker, topic: str) -> pa.Table:
    return headrace.arrow.read(topic, bootstrap=broker.bootstrap, columns=COLUMNS).read_all()


@proves("S6")
def test_the_ledger_claims_exactly_what_the_topic_has(run: Run, broker: Broker, tmp_path: Path) -> None:
    topic = topic_name()
    done = run(
        *("load", topic, "--partitions", "3", "--records", "10007", "--producers", "3", "--compression", "lz4"),
        *("--ledger", str(tmp_path / "ledger"), "--traces", str(tmp_path / "traces"), "--json"),
    )
    told = json.loads(done.stdout)
    assert (told["acknowledged"], told["failed"], told["producers"]) == (10007, 0, 3)
    assert told["latency_ms"]["p50"] <= told["latency_ms"]["p99"] <= told["latency_ms"]["p999"]
    ledger, rows = read_ledger(tmp_path / "ledger"), kept(broker, topic)
    assert ledger.schema.equals(SCHEMA)
    assert claimed(ledger) == claimed(rows)
    for producer in set(ledger["producer"].to_pylist()):
        mine = ledger.filter(pc.equal(ledger["producer"], producer)).sort_by("sequence")
        assert mine["sequence"].to_pylist() == list(range(len(mine)))
    traces = pq.read_table(tmp_path / "traces")
    assert pc.sum(traces["records"]).as_py() == 10007
    assert pc.sum(traces["bytes"]).as_py() == told["bytes"]


def test_events_are_json_with_uneven_keys(run: Run, broker: Broker) -> None:
    for kind, fields in (("orders", {"order", "customer", "price"}), ("clicks", {"click", "user", "page"})):
        topic = topic_name()
        run("load", topic, "--partitions", "2", "--records", "5000", "--kind", kind, "--keys", "500", "--seed", "7")
        rows = kept(broker, topic)
        events = [json.loads(value) for value in rows["value"].to_pylist()]
        assert fields < set(events[0])
        assert len({json.dumps(event) for event in events}) == 5000
        keys = Counter(rows["key"].to_pylist())
        assert keys.most_common(1)[0][1] > 10 * 5000 / 500
        places = set(zip(rows["key"].to_pylist(), rows["partition"].to_pylist(), strict=True))
        assert len(places) == len(keys), "a key has one partition"


def test_bytes_have_the_size_asked_for_at_the_rate_asked_for(run: Run, broker: Broker) -> None:
    topic = topic_name()
    options = ("--value-bytes", "50", "--keys", "0", "--duration", "0.5", "--rate", "2000", "--json")
    told = json.loads(run("load", topic, "--partitions", "2", *options).stdout)
    assert 0 < told["acknowledged"] <= 1100
    rows = kept(broker, topic)
    assert set(pc.binary_length(rows["value"]).to_pylist()) == {50}
    assert rows["key"].null_count == len(rows) == told["acknowledged"]


def test_only_a_seed_makes_the_same_bytes_again(run: Run, broker: Broker) -> None:
    topic = topic_name()
    for seed in ((), (), ("--seed", "3"), ("--seed", "3")):
        run("load", topic, "--partitions", "1", "--value-bytes", "20", "--keys", "0", "--records", "100", *seed)
    values = kept(broker, topic)["value"].to_pylist()
    assert values[200:300] == values[300:]
    assert len(set(values)) == 300


def test_a_topic_with_other_partitions_is_told(run: Run, topic: MakeTopic) -> None:
    done = run("load", topic(2), "--partitions", "3", exit_code=1)
    assert "with 2 partitions, not 3" in done.stderr


@proves("S6")
def test_produce_notes_what_was_acknowledged(run: Run, broker: Broker, topic: MakeTopic, tmp_path: Path) -> None:
    name = topic(3)
    lines = [{"key": f"k{n}", "value": "x" * n, "headers": {"a": str(n), "b": None}} for n in range(300)]
    run(
        *("produce", name, "--json-lines", "--ledger", str(tmp_path)),
        stdin="".join(json.dumps(line) + "\n" for line in [*lines, {"key": None, "value": None}]),
    )
    ledger = read_ledger(tmp_path)
    assert claimed(ledger) == claimed(kept(broker, name))
    assert sorted(ledger["sequence"].to_pylist()) == list(range(301))
    assert "acknowledgements" in run("produce", name, "--ledger", str(tmp_path), "--acks", "0", exit_code=2).stderr


@proves("S6")
def test_a_killed_producer_claims_less_never_more(broker: Broker, tmp_path: Path) -> None:
    topic, folder = topic_name(), tmp_path / "ledger"
    command = ("load", topic, "--partitions", "2", "--rate", "20000", "--duration", "60", "--ledger", str(folder))
    process = subprocess.Popen(
        [*DIES_WITH_PARENT, *COMMAND, *command], env=environment(broker.bootstrap), stdout=subprocess.DEVNULL
    )
    try:
        wait_for("two files of the ledger", lambda: len(list(folder.glob("*.parquet"))) >= 2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    ledger, rows = claimed(read_ledger(folder)), claimed(kept(broker, topic))
    assert ledger
    assert ledger <= rows


def test_rows_wait_no_longer_than_the_interval(tmp_path: Path) -> None:
    one = counting_from(0, 1)
    times = pa.array([0], pa.timestamp("us", tz="UTC"))
    with Ledger(tmp_path, "p", interval_ms=20) as ledger:
        ledger.add("t", 0, None, one, times, one)
        wait_for("the row in a file", lambda: list(tmp_path.glob("*.parquet")))
        assert read_ledger(tmp_path)["offset"].to_pylist() == [None]
        ledger.add("t", 0, 5, counting_from(1, 1), times, one)
    assert read_ledger(tmp_path)["offset"].to_pylist() == [None, 5]


def test_a_full_file_is_closed_and_a_failed_one_is_told(tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int64())])
    files = RollingFiles(tmp_path, "x", schema, file_rows=10, interval_ms=600_000)
    for _ in range(5):
        files.add(pa.record_batch([counting_from(0, 5)], schema))
    assert len(list(tmp_path.glob("*.parquet"))) == 2
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()
    with pytest.raises(OperatorError, match="cannot write"):
        files.close()


def test_without_pyarrow_the_remedy_is_told(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "pyarrow.py").write_text("raise ModuleNotFoundError('no pyarrow', name='pyarrow')\n")
    env = environment(broker.bootstrap)
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    for command in (("load", "t"), ("produce", "t", "--ledger", str(tmp_path / "ledger"))):
        done = subprocess.run(
            [sys.executable, *COMMAND[1:], *command], env=env, input="", capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "pip install 'headrace[arrow]'" in done.stderr
        assert len(done.stderr.splitlines()) == 1
