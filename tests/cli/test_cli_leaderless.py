"""Reading a topic of which a partition has no leader: what can be read is printed, and what cannot is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from brokers import wait_for
from cli.conftest import COMMAND, Finished, environment, run_command
from clusters import BrokerCluster
from headrace.client.admin.cluster import Cluster
from headrace.client.connection.metadata import NO_LEADER
from proving import proves

TOPIC = "solo"
VALUES = [str(n) for n in range(8)]


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    """Two brokers, and a topic with four partitions of one replica each that has two records in each."""
    settings = {"broker.lease.ms": 2000}
    with BrokerCluster(tmp_path_factory.mktemp("halved"), brokers=2, etcd=1, settings=settings) as cluster:
        cluster.create_topic(TOPIC, 4, 1)
        lines = "".join(f"{value}\n" for value in VALUES)
        run_command("produce", TOPIC, "--partitions", "round-robin", bootstrap=cluster.bootstrap, stdin=lines)
        yield cluster


def leaderless(cluster: BrokerCluster) -> set[int]:
    with Cluster(cluster.brokers[0].listen[0]) as client:
        parts = client.topology([TOPIC]).topics[TOPIC].partitions
        return {part.index for part in parts if part.leader_id == NO_LEADER}


@proves("U1")
def test_what_has_a_leader_is_read_and_the_rest_is_named(cluster: BrokerCluster) -> None:
    cluster.brokers[1].kill()
    wait_for("partitions without a leader", lambda: len(leaderless(cluster)) == 2)
    missing = leaderless(cluster)
    named = ", ".join(f"{TOPIC}-{n} (on broker 2)" for n in sorted(missing))
    readable = sorted(value for value in VALUES if int(value) % 4 not in missing)
    at = cluster.brokers[0].listen[0]

    def consume(*options: str, exit_code: int = 1) -> Finished:
        return run_command("consume", TOPIC, "--timeout", "1", *options, bootstrap=at, exit_code=exit_code)

    for options in ((), ("--tail", "9"), ("--grep", ".")):
        done = consume(*options)
        assert sorted(done.stdout.split()) == readable, options
        assert done.stderr.count("\n") == 1
        assert f"not read, as no broker leads them: {named};" in done.stderr
    assert len(consume("--count", "2", exit_code=0).stdout.split()) == 2
    follow = [*COMMAND, "consume", TOPIC, "--follow", "--json"]
    with subprocess.Popen(follow, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(at)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert f"no broker leads {named}: going on" in process.stderr.readline().decode()
            assert sorted(json.loads(process.stdout.readline())["value"] for _ in readable) == readable
            cluster.brokers[1].start()
            late = sorted(json.loads(process.stdout.readline())["value"] for _ in range(len(VALUES) - len(readable)))
            assert late == sorted(set(VALUES) - set(readable))
        finally:
            os.kill(process.pid, signal.SIGINT)
