"""Commands that ask every broker, while one is dead and one is stopped and both still have their leases."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from brokers import wait_for
from cli.conftest import run_command
from clusters import BrokerCluster
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

LEASE_MS = 60_000
QUICK = ("--timeout", "1")


@pytest.fixture(scope="module")
def wounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    """Broker 1, the controller, is dead; broker 2 does not answer; broker 3 is well, and all count as alive."""
    settings = {"broker.lease.ms": LEASE_MS}
    with BrokerCluster(tmp_path_factory.mktemp("wounded"), etcd=1, settings=settings) as cluster:
        cluster.create_topic("t", 3, 2)
        cluster.wait_in_sync({"t": 3})
        with Cluster(cluster.bootstrap) as client:
            assert operations.describe_cluster(client).controller_id == 1
        cluster.brokers[0].kill()
        cluster.pause(1)
        try:
            yield cluster
        finally:
            os.kill(cluster.brokers[1].pid, signal.SIGCONT)


@proves("G15")
def test_a_cluster_is_described_by_those_that_answer(wounded: BrokerCluster) -> None:
    done = run_command("cluster", "describe", "--json", *QUICK, bootstrap=wounded.bootstrap, exit_code=1)
    assert "broker 1 does not answer" in done.stderr
    assert "broker 2 does not answer" in done.stderr
    rows = {row["broker"]: row for row in json.loads(done.stdout)["brokers"]}
    assert {number: row["answers"] for number, row in rows.items()} == {1: False, 2: False, 3: True}
    assert [rows[number]["stored_bytes"] is None for number in (1, 2, 3)] == [True, True, False]
    assert sum(row["replicas"] for row in rows.values()) == 6, "this is known of the silent ones too"


@proves("G15")
def test_status_and_description_tell_the_same_of_partitions(wounded: BrokerCluster) -> None:
    def told(command: str) -> dict[str, Any]:
        done = run_command("cluster", command, "--json", *QUICK, bootstrap=wounded.bootstrap, exit_code=1)
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    said = ("cluster_id", "controller", "partition_count", "leaderless", "behind", "below_factor", "in_doubt")

    def is_same() -> bool:  # sets may shrink meanwhile
        described, status = told("describe"), told("status")
        assert (status["processes"], status["healthy"]) == (None, False)
        assert described["partition_count"] == 3
        return all(described[each] == status["cluster"][each] for each in said)

    wait_for("both to say the same", is_same)
    text = run_command("cluster", "describe", *QUICK, bootstrap=wounded.bootstrap, exit_code=1).stdout
    assert "without a leader: " in text
    assert "below their factor, growing as brokers come: 0 of 3 partitions" in text


@proves("G15", "L3")
def test_plans_and_orders_do_not_wait_for_a_silent_broker(wounded: BrokerCluster) -> None:
    drained = run_command("broker", "drain", "1", "--dry-run", "--json", *QUICK, bootstrap=wounded.bootstrap)
    assert "broker 2 does not answer" in drained.stderr
    moves = json.loads(drained.stdout)["moves"]
    assert moves
    assert all(1 not in move["to"] for move in moves)
    run_command("partition", "move", "t", "0", "--to", "3,1,2", *QUICK, bootstrap=wounded.bootstrap)
    with Cluster(wounded.brokers[2].bootstrap) as client:
        (moving,) = client.ask(apis.LIST_PARTITION_REASSIGNMENTS, Message(timeout_ms=0, topics=None)).topics
    assert set(moving.partitions[0].replicas) == {1, 2, 3}
