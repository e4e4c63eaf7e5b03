"""A cluster of processes under kills and pauses, with transactions: each is read whole or not at all.

Three brokers and three etcd nodes; transactional producers that commit and abort, a copier with its offsets in its
transactions, and readers of what is committed.
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
from faults.chaos_transactions import Name, TransactionalChaosLoad, faults_of
from proving import proves

TOPIC, COPY = "chaos", "copied"
PARTITIONS = 4
REPLICAS = 3
PRODUCERS = 2
LONG_SECONDS = 15 * 60
SETTINGS: dict[str, object] = {
    "broker.lease.ms": 1500,
    "replica.lag.time.max.ms": 3000,
    "group.initial.rebalance.delay.ms": 100,
    "offsets.topic.partitions": 4,
    "transaction.state.log.num.partitions": 4,
}


def run_chaos(cluster: BrokerCluster, seed: int, script: Callable[[Chaos], None]) -> dict[str, Any]:
    topics = {TOPIC: PARTITIONS, COPY: PARTITIONS}
    for topic in topics:
        cluster.create_topic(topic, PARTITIONS, REPLICAS, segment_bytes=1 << 20)
    cluster.wait_in_sync(topics)
    load = TransactionalChaosLoad(cluster.bootstrap, TOPIC, COPY, PARTITIONS, PRODUCERS)
    chaos = Chaos(cluster, lambda: load.committed, seed)
    try:
        wait_for("records committed before the first fault", lambda: load.committed > 100)
        script(chaos)
        cluster.wait_in_sync(topics)
        figures = load.finish(wait_for)
    except BaseException:
        load.abandon()
        raise
    assert not load.failures.count, load.failures.told() + cluster.said()
    cluster.stop()
    batches = check_replicas(cluster, TOPIC, list(load.readers[0].positions))
    return {
        **figures,
        "faults": dict(chaos.counts),
        "faults_in_all": sum(chaos.counts.values()),
        "left_out": sorted(chaos.left_out),
        "batches_equal_on_all_replicas": batches,
    }


def a_few(chaos: Chaos) -> None:
    chaos.strike([chaos.named("broker killed", "b1")], 2.5)
    chaos.strike([chaos.named("broker paused", "b2")], 3.0)
    chaos.strike([chaos.named("broker killed", "b3"), chaos.named("broker paused", "b1")], 1.0)


def for_long(chaos: Chaos) -> None:
    end = time.monotonic() + LONG_SECONDS
    while time.monotonic() < end:
        chaos.strike(chaos.draw(), chaos.hold_s(8.0))


@proves("T1", "T2")
def test_transactions_are_whole_while_brokers_die_and_pause(tmp_path: Path, seed: int) -> None:
    with BrokerCluster(tmp_path, settings=SETTINGS) as cluster:
        run_chaos(cluster, seed, a_few)


@pytest.mark.long
@pytest.mark.timeout(2 * LONG_SECONDS)
def test_fifteen_minutes_of_chaos_with_transactions(
    tmp_path: Path, seed: int, proof_report: Callable[..., None]
) -> None:
    missing = namespaces_missing()
    kind = BrokerCluster if missing else NamespacedCluster
    with kind(tmp_path, settings=SETTINGS) as cluster:
        figures = run_chaos(cluster, seed, for_long)
    if missing:
        figures["left_out"] = [*figures["left_out"], f"cut links: {missing}"]
    proof_report(**figures)


# The account itself


A, B, C = (0, 1), (0, 2), (1, 1)


def test_what_was_told_and_seen_agrees() -> None:
    seen = [[A, C], [A, C]]
    assert list(faults_of(2, seen, seen, {A}, {B})) == []


@pytest.mark.parametrize(
    ("seen", "copies", "words"),
    [
        ([[A], []], [[A], []], "in 1 of 2 partitions"),
        ([[A, B], [A, B]], [[A, B], [A, B]], "was aborted, and is read"),
        ([[C], [C]], [[C], [C]], "was committed, and is nowhere"),
        ([[A, A], [A]], [[A, A], [A]], "2 times in partition 0"),
        ([[A], [A]], [[A], []], "is not copied as it is"),
        ([[A], [A]], [[A], [A, A]], "is not copied as it is"),
    ],
)
def test_every_fault_is_told(seen: list[list[Name]], copies: list[list[Name]], words: str) -> None:
    assert any(words in fault for fault in faults_of(2, seen, copies, {A}, {B}))
