"""`headrace transaction` against a broker."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from brokers import Broker, wait_for
from cli.conftest import Run, on_terminal, run_command
from headrace import Producer
from headrace.cli.times import format_duration_ms
from headrace.records.batch import batches
from proving import proves

MakeTopic = Callable[..., str]
DEADLINE_S = 60.0


@pytest.fixture
def transactional(broker: Broker) -> Iterator[Producer]:
    with Producer(broker.bootstrap, client_id="the-till", transactional_id=f"till-{uuid.uuid4().hex[:8]}") as producer:
        yield producer


def name_of(producer: Producer) -> str:
    core = producer._sender.transactions
    assert core is not None
    return core.transactional_id


def listed(run: Run, *flags: str) -> dict[str, dict[str, Any]]:
    rows = json.loads(run("transaction", "list", "--json", *flags).stdout)
    return {row["transactional_id"]: row for row in rows}


@proves("T5")
def test_an_open_transaction_is_listed_described_and_aborted(
    run: Run, topic: MakeTopic, transactional: Producer
) -> None:
    name, transactional_id = topic(2), name_of(transactional)
    t = transactional.transaction()
    t.begin()
    t.send(name, b"x", partition=1)
    transactional.flush()
    row = listed(run, "--open")[transactional_id]
    assert (row["state"], row["partitions"], row["two_phase"]) == ("Ongoing", 1, False)
    assert row["open_ms"] >= 0
    assert transactional_id not in listed(run, "--longer-than", "1h")
    assert transactional_id not in listed(run, "--state", "Empty")
    assert transactional_id in listed(run, "--match", transactional_id[:-1] + ".")
    assert transactional_id in listed(run, "--producer-id", str(row["producer_id"]))
    shown = json.loads(run("transaction", "describe", transactional_id, "--json").stdout)
    assert (shown["state"], shown["timeout_ms"]) == ("Ongoing", 60_000)
    assert shown["partitions"] == [{"topic": name, "partition": 1}]
    lines = run("transaction", "describe", transactional_id).stdout.splitlines()
    assert lines[0].startswith(f"transactional id {transactional_id}, Ongoing, producer {row['producer_id']} epoch")
    assert lines[0].endswith("aborted after 1m")
    assert [name, "1"] in [line.split() for line in lines]
    dry = run("transaction", "abort", transactional_id, "--dry-run").stdout
    assert dry.startswith(f"would be aborted: the transaction of {transactional_id}")
    assert listed(run)[transactional_id]["state"] == "Ongoing"
    assert run("transaction", "abort", transactional_id).stdout.endswith("in 1 partition\n")
    wait_for("the abort", lambda: listed(run)[transactional_id]["state"] == "CompleteAbort", DEADLINE_S)
    again = run("transaction", "abort", transactional_id, exit_code=1)
    assert "has no open transaction: it is CompleteAbort" in again.stderr
    assert run("consume", name).stdout == ""


@proves("T5", "T4")
def test_a_prepared_transaction_is_committed_by_its_name(
    run: Run, topic: MakeTopic, transactional: Producer, broker: Broker
) -> None:
    name, transactional_id = topic(), name_of(transactional)
    with transactional.transaction(two_phase=True) as t:
        t.send(name, b"prepared")
        t.prepare()
    row = listed(run, "--two-phase")[transactional_id]
    assert (row["two_phase"], row["owner"]) == (True, "the-till at 127.0.0.1")
    text = run("transaction", "describe", transactional_id).stdout
    assert "no timeout ends it" in text
    assert ", by the-till at 127.0.0.1" in text
    cards = on_terminal(
        ["-m", "headrace.cli.main", "transaction", "list", "--two-phase", "--match", transactional_id],
        broker.bootstrap,
        60,
    )
    assert f"transactional id: {transactional_id}" in cards
    run("transaction", "commit", transactional_id, "--dry-run")
    assert listed(run)[transactional_id]["state"] == "Ongoing"
    assert run("transaction", "commit", transactional_id).stdout.startswith("committed: ")
    wait_for("the commit", lambda: run("consume", name).stdout == "prepared\n", DEADLINE_S)


@proves("T5")
def test_what_cannot_be_is_told_in_one_line(run: Run, topic: MakeTopic, transactional: Producer) -> None:
    name, transactional_id = topic(), name_of(transactional)
    unknown = run("transaction", "describe", "nobody-has-this", exit_code=1).stderr
    assert "nothing is known of that transactional id" in unknown
    t = transactional.transaction()
    t.begin()
    t.send(name, b"x")
    transactional.flush()
    assert "not a two-phase one" in run("transaction", "commit", transactional_id, exit_code=1).stderr
    assert "begins at offset 7" in run(
        "transaction", "abort", "--topic", name, "--partition", "0", "--start-offset", "7", exit_code=1
    ).stderr  # fmt: skip
    run("transaction", "abort", exit_code=2)
    run("transaction", "abort", transactional_id, "--topic", name, exit_code=2)
    t.abort()


@proves("T5")
def test_a_hanging_transaction_is_found_and_aborted(run: Run, topic: MakeTopic, transactional: Producer) -> None:
    name = topic()
    t = transactional.transaction()
    t.begin()
    t.send(name, b"x", timestamp_ms=int((time.time() - 3600) * 1000))
    transactional.flush()
    # Its coordinator knows of it: it may be old, and does not hang.
    assert run("transaction", "find-hanging", "--topic", name, "--silent-for", "1ms").stdout == "no transaction hangs\n"
    assert json.loads(run("transaction", "find-hanging", "--topic", name, "--json").stdout) == []
    place = ("--topic", name, "--partition", "0", "--start-offset", "0")
    assert run("transaction", "abort", *place, "--dry-run").stdout.startswith("would be aborted: ")
    assert run("transaction", "abort", *place).stdout.startswith("aborted: the transaction of producer ")
    assert run("consume", name).stdout == ""


@proves("T5")
def test_a_transaction_that_lost_its_marker_hangs_until_it_is_aborted(fresh_broker: Callable[..., Broker]) -> None:
    """Its coordinator has ended it, and the log was cut below the marker: as after an unclean election."""
    broker = fresh_broker(settings={"log.layout": "partitioned"})

    def told(*words: str) -> str:
        return run_command(*words, bootstrap=broker.bootstrap).stdout

    told("topic", "create", "t")
    with Producer(broker.bootstrap, transactional_id="till") as producer, producer.transaction() as t:
        t.send("t", b"x")
    wait_for("the commit", lambda: told("consume", "t") == "x\n", DEADLINE_S)
    broker.kill()
    (segment,) = (broker.data / "t" / "t-0").glob("*.log")
    with segment.open("r+b") as file:
        *_, (_, marker) = batches(memoryview(segment.read_bytes()))
        file.truncate(segment.stat().st_size - len(marker))
    broker.start()
    assert told("consume", "t") == ""
    find = ("transaction", "find-hanging", "--silent-for", "1ms")
    (row,) = json.loads(told(*find, "--json"))
    assert (row["topic"], row["partition"], row["start_offset"]) == ("t", 0, 0)
    assert told(*find).splitlines()[-1].split()[:3] == ["t", "0", "0"]
    assert told("transaction", "find-hanging") == "no transaction hangs\n", "it may be a matter of a moment"
    place = ("--topic", "t", "--partition", "0", "--start-offset", "0")
    assert told("transaction", "abort", *place).startswith("aborted: ")
    assert told(*find) == "no transaction hangs\n"
    with Producer(broker.bootstrap, transactional_id="till") as producer, producer.transaction() as t:
        t.send("t", b"next")
    wait_for("the next", lambda: told("consume", "t") == "next\n", DEADLINE_S)


def test_durations_are_shown_by_their_two_largest_units() -> None:
    shown = {7: "7ms", 3_250: "3.2s", 60_000: "1m", 250_000: "4m10s", 7_500_000: "2h5m", 270_000_000: "3d3h"}
    assert {ms: format_duration_ms(ms) for ms in shown} == shown
