"""A cluster of processes under kills, pauses and cuts: what was acknowledged is there, once, in order, on all replicas.

Three brokers and three etcd nodes; idempotent producers with acks=-1, two members of a group, and a watcher of the
watermarks. With network namespaces every process has a link of its own, which is taken down or made slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brokers import wait_for
from clusters import BrokerCluster, NamespacedCluster, namespaces_missing
from faults.chaos import Chaos, check_replicas
from faults.chaos_load import ChaosLoad
from proving import proves

TOPIC = "chaos"
PARTITIONS = 4
REPLICAS = 3
PRODUCERS = 2
LONG_SECONDS = 15 * 60
SETTINGS: dict[str, object] = {
    "broker.lease.ms": 1500,
    "replica.lag.time.max.ms": 3000,
    "group.initial.rebalance.delay.ms": 100,
    "offsets.topic.partitions": 4,
}

Script = Callable[[Chaos], None]


def run_chaos(cluster: BrokerCluster, seed: int, rate: float, script: Script) -> dict[str, Any]:
    cluster.create_topic(TOPIC, PARTITIONS, REPLICAS, segment_bytes=1 << 20)
    cluster.wait_in_sync({TOPIC: PARTITIONS})
    load = ChaosLoad(cluster.bootstrap, TOPIC, PARTITIONS, PRODUCERS, rate)
    chaos = Chaos(cluster, lambda: load.acknowledged, seed)
    try:
        wait_for("records acknowledged before the first fault", lambda: load.acknowledged > 200)
        script(chaos)
        cluster.wait_in_sync({TOPIC: PARTITIONS})
        figures = load.finish(wait_for)
    except BaseException:
        load.abandon()
        raise
    assert not load.failures.count, load.failures.told() + cluster.said()
    cluster.stop()
    ends = [len(codes) for codes in load.seen.codes]
    batches = check_replicas(cluster, TOPIC, ends)
    return {
        **figures,
        "faults": dict(chaos.counts),
        "faults_in_all": sum(chaos.counts.values()),
        "left_out": sorted(chaos.left_out),
        "batches_equal_on_all_replicas": batches,
        "lost": 0,
        "duplicated": 0,
        "reordered": 0,
    }


def a_few(chaos: Chaos) -> None:
    """Every kind that needs no network of its own, brokers in turn."""
    chaos.strike([chaos.named("broker killed", "b1"), chaos.named("etcd node killed", "e1")], 2.5)
    chaos.strike([chaos.named("broker paused", "b2")], 3.0)
    chaos.strike([chaos.named("all etcd nodes killed", "etcd")], 2.0)
    chaos.strike([chaos.named("broker stopped cleanly", "b3"), chaos.named("etcd node paused", "e2")], 1.0)


def for_long(chaos: Chaos) -> None:
    end = time.monotonic() + LONG_SECONDS
    while time.monotonic() < end:
        chaos.strike(chaos.draw(), chaos.hold_s(8.0))


@proves("G1", "G2", "G14", "G16")
def test_nothing_acknowledged_is_lost_while_brokers_and_etcd_die_and_pause(tmp_path: Path, seed: int) -> None:
    with BrokerCluster(tmp_path, settings=SETTINGS) as cluster:
        run_chaos(cluster, seed, 600, a_few)


@proves("G2", "G11")
def test_nothing_acknowledged_is_lost_while_links_are_cut(tmp_path: Path, seed: int) -> None:
    if missing := namespaces_missing():
        pytest.skip(missing)

    def cuts(chaos: Chaos) -> None:
        chaos.strike([chaos.named("broker cut off", "b1"), chaos.named("etcd node cut off", "e2")], 3.0)

    with NamespacedCluster(tmp_path, settings=SETTINGS) as cluster:
        run_chaos(cluster, seed, 400, cuts)


@pytest.mark.long
@pytest.mark.timeout(2 * LONG_SECONDS)
def test_fifteen_minutes_of_chaos(tmp_path: Path, seed: int, proof_report: Callable[..., None]) -> None:
    missing = namespaces_missing()
    kind = BrokerCluster if missing else NamespacedCluster
    with kind(tmp_path, settings=SETTINGS) as cluster:
        figures = run_chaos(cluster, seed, 1500, for_long)
    if missing:
        figures["left_out"] = [*figures["left_out"], f"cut links: {missing}"]
    proof_report(**figures)
