"""Every way to read a topic with committed, aborted and open transactions: what is shown, and what is when asked."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

import headrace
from brokers import Broker
from clients.topics import create_topic
from headrace import arrow
from headrace.arrow.read import Bound
from kafka_protocol.raw import Raw
from kafka_protocol.session_client import SessionClient
from proving import proves
from transactional_producer import Transactions

COMMITTED = [b"plain", b"committed 0", b"committed 1", b"after"]
_KEPT: list[Producer] = []
"""A producer that is gone would have its transaction aborted."""
ALL = [b"plain", b"aborted 0", b"aborted 1", b"committed 0", b"committed 1", b"after", b"open", b"behind"]


def transactional(broker: Broker, name: str) -> Producer:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": name, "linger.ms": 0})
    producer.init_transactions(30)
    return producer


@pytest.fixture(scope="module")
def written(shared_broker: Broker) -> str:
    """A topic with one partition and a key index."""
    broker = shared_broker
    name = "isolation-of-readers"
    raw = Raw(broker.host_port)
    raw.create(name, key_index="true")
    raw.close()
    plain, first, second = (
        Producer({"bootstrap.servers": broker.bootstrap}),
        *(transactional(broker, f"isolation-{nth}") for nth in range(2)),
    )

    def send(producer: Producer, value: bytes) -> None:
        producer.produce(name, value, b"k", partition=0)
        assert producer.flush(30) == 0

    send(plain, b"plain")
    first.begin_transaction()
    send(first, b"aborted 0")
    send(first, b"aborted 1")
    first.abort_transaction(30)
    first.begin_transaction()
    send(first, b"committed 0")
    send(first, b"committed 1")
    first.commit_transaction(30)
    send(plain, b"after")
    second.begin_transaction()
    send(second, b"open")
    send(plain, b"behind")
    _KEPT.extend((first, second))
    return name


def get(broker: Broker, path: str) -> Any:
    with urllib.request.urlopen(broker.http + path, timeout=30) as answer:
        return json.load(answer)


def command(broker: Broker, *words: str) -> list[bytes]:
    told = subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", *words, "--bootstrap", broker.bootstrap],
        capture_output=True,
        check=True,
        timeout=60,
    )
    return told.stdout.splitlines()


@proves("T2")
def test_http_reads_what_is_committed_unless_asked(broker: Broker, written: str) -> None:
    for path in (f"/topics/{written}/partitions/0/records", f"/topics/{written}/records"):
        shown = get(broker, path)["records"]
        assert [each["value"].encode() for each in shown] == COMMITTED
        shown = get(broker, f"{path}?isolation=uncommitted")["records"]
        assert [each["value"].encode() for each in shown] == ALL


@proves("T2")
def test_http_tells_how_far_committed_records_go(broker: Broker, written: str) -> None:
    found = get(broker, f"/topics/{written}/partitions/0/records?isolation=uncommitted")
    (described,) = get(broker, f"/topics/{written}")["partition_list"]
    for told in (found, described):
        assert (told["high_watermark"] - told["last_stable_offset"]) == 2, "the open one, and what is behind it"
    path = f"{broker.http}/topics/{written}/partitions/0/records?format=binary"
    with urllib.request.urlopen(path, timeout=30) as answer:
        assert int(answer.headers["X-Last-Stable-Offset"]) == found["last_stable_offset"]


@proves("T2")
def test_queries_by_key_find_what_is_committed_unless_asked(broker: Broker, written: str) -> None:
    for isolation, expected in (("", COMMITTED), ("&isolation=uncommitted", ALL)):
        shown = get(broker, f"/topics/{written}/query?key=k&order=offset{isolation}")["records"]
        assert [each["value"].encode() for each in shown] == expected
    by_key = ("query", "--topic", written, "--key", "k", "--order", "offset", "--format", "%v\n")
    assert [line for line in command(broker, *by_key) if line] == COMMITTED
    assert [line for line in command(broker, *by_key, "--isolation", "uncommitted") if line] == ALL


@proves("T2")
def test_commands_show_what_is_committed_unless_asked(broker: Broker, written: str, tmp_path: Path) -> None:
    assert command(broker, "consume", written) == COMMITTED
    assert command(broker, "consume", written, "--tail", "3") == COMMITTED[-3:]
    assert command(broker, "consume", written, "--isolation", "uncommitted") == ALL
    for isolation, expected in (("committed", COMMITTED), ("uncommitted", ALL)):
        for kind in ("jsonl", "parquet"):
            path = tmp_path / f"{isolation}.{kind}"
            command(broker, "export", written, str(path), "--isolation", isolation)
        lines = (tmp_path / f"{isolation}.jsonl").read_text().splitlines()
        assert [json.loads(line)["value"].encode() for line in lines] == expected
        import pyarrow.parquet as pq

        assert pq.read_table(tmp_path / f"{isolation}.parquet")["value"].to_pylist() == expected


@proves("T2")
def test_python_reads_what_is_committed_unless_asked(broker: Broker, written: str) -> None:
    for isolation, expected in (("committed", COMMITTED), ("uncommitted", ALL)):
        table = arrow.read(written, bootstrap=broker.bootstrap, isolation=isolation).read_all()
        assert table["value"].to_pylist() == expected
        found = headrace.read(broker.bootstrap, written, 0, 0, 100, isolation=isolation)
        assert [record.value for record in found] == expected
    assert arrow.read(written, bootstrap=broker.bootstrap).read_all()["value"].to_pylist() == COMMITTED


@proves("N2", "T2")
def test_a_session_reads_what_is_committed(broker: Broker, written: str) -> None:
    raw = Raw(broker.host_port)
    session = SessionClient(raw)
    row = session.fetch({(written, 0): 0}, isolation_level=1)[written, 0]
    assert row.last_stable_offset < row.high_watermark
    assert [each.first_offset for each in row.aborted_transactions] == [1]
    assert session.fetch({(written, 0): row.last_stable_offset}, isolation_level=1) == {}
    raw.close()


@proves("T2")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_arrow_has_what_is_committed_wherever_it_begins(
    fresh_broker: Callable[..., Broker], layout: str, seed: int
) -> None:
    broker = fresh_broker(settings={"log.layout": layout})
    transactions = Transactions(broker, create_topic(broker, "drawn", 2))
    transactions.draw(random.Random(seed), 60, 2)

    def read(isolation: str, start: Bound = "earliest", end: Bound = "latest") -> list[dict[str, Any]]:
        given = {"start": start, "end": end, "columns": ("partition", "offset", "value")}
        reader = arrow.read(transactions.topic, bootstrap=broker.bootstrap, isolation=isolation, **given)  # type: ignore[arg-type]
        return list(reader.read_all().to_pylist())

    for isolation, expected in (("committed", transactions.committed), ("uncommitted", transactions.all)):
        table = read(isolation)
        assert [(row["partition"], row["value"]) for row in table] == expected
        of_first = [row for row in table if row["partition"] == 0]
        last = of_first[-1]["offset"]
        for first in range(last):
            until = min(first + 4, last)
            part = [row for row in of_first if first <= row["offset"] < until]
            assert read(isolation, {0: first}, {0: until}) == part
