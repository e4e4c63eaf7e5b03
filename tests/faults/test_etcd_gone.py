"""Without etcd the brokers that live go on: records are acknowledged and read, changes of metadata wait, nobody is
elected. A leader cut off alone acknowledges nothing once others follow another epoch.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from brokers import wait_for
from clusters import BrokerCluster, NamespacedCluster, namespaces_missing
from faults.chaos_load import CLIENT, ChaosLoad, code_of, connect, read_all
from headrace.errors import HeadraceError
from proving import proves

TOPIC = "steady"
PARTITIONS = 3
REPLICAS = 3
LEASE_MS = 3000
HEADRACE = str(Path(sys.executable).parent / "headrace")
SETTINGS: dict[str, object] = {"broker.lease.ms": LEASE_MS, "offsets.topic.partitions": 2}


def leaders(cluster: BrokerCluster) -> dict[int, tuple[int, int]]:
    """Leader and epoch of each partition."""
    with connect(cluster.bootstrap) as client:
        parts = client.topic(TOPIC).partitions
        return {part.index: (part.leader_id, part.leader_epoch) for part in parts}


def run_without_etcd(cluster: BrokerCluster, seconds: float) -> dict[str, Any]:
    cluster.create_topic(TOPIC, PARTITIONS, REPLICAS)
    cluster.wait_in_sync({TOPIC: PARTITIONS})
    load = ChaosLoad(cluster.bootstrap, TOPIC, PARTITIONS, 1, 400)
    try:
        wait_for("records acknowledged before", lambda: load.acknowledged > 200)
        wait_for("records read before", lambda: sum(map(len, load.seen.codes)) > 200)
        before = leaders(cluster)
        cluster.etcd.kill_all()
        began, acknowledged = time.monotonic(), load.acknowledged
        for producer in load.producers:
            producer.longest_gap_s = 0.0
        # As many as the rate brings in that time, less what a slow machine costs.
        wait_for(
            f"records acknowledged for {seconds:g} s without etcd",
            lambda: time.monotonic() - began > seconds and load.acknowledged - acknowledged > seconds * 100,
            seconds + 60,
        )
        gap_s = max(producer.longest_gap_s for producer in load.producers)
        without = load.acknowledged - acknowledged
        wait_for("records read without etcd", lambda: sum(map(len, load.seen.codes)) > acknowledged + without / 2)
        with pytest.raises(HeadraceError):
            cluster.create_topic("later", 1, REPLICAS, timeout_s=2)
        cluster.etcd.start_all()
        wait_for("topics can be made again", lambda: attempt(lambda: cluster.create_topic("after", 1, REPLICAS)))
        after = leaders(cluster)
        figures = load.finish(wait_for)
    except BaseException:
        load.abandon()
        raise
    assert not load.failures.count, load.failures.told() + cluster.said()
    assert after == before, "nobody was elected while all brokers lived"
    return {
        "seconds_without_etcd": seconds,
        "acknowledged_without_etcd": without,
        "longest_gap_without_etcd_s": round(gap_s, 2),
        **figures,
    }


def attempt(call: Callable[[], None]) -> bool:
    try:
        call()
    except HeadraceError:
        return False
    return True


@proves("G3", "G14")
@pytest.mark.long
@pytest.mark.timeout(600)
def test_brokers_go_on_for_a_minute_without_etcd(tmp_path: Path, proof_report: Callable[..., None]) -> None:
    with BrokerCluster(tmp_path, settings={"offsets.topic.partitions": 2}) as cluster:
        proof_report(**run_without_etcd(cluster, 60))


@pytest.mark.long
@proves("G2", "F9")
def test_a_leader_cut_off_alone_acknowledges_nothing(tmp_path: Path) -> None:
    """KIP-320: the old leader still believes that it leads; whoever reaches it gets no acknowledgement from it."""
    if missing := namespaces_missing():
        pytest.skip(missing)
    with NamespacedCluster(tmp_path, settings=SETTINGS) as cluster:
        cluster.create_topic(TOPIC, PARTITIONS, REPLICAS)
        cluster.wait_in_sync({TOPIC: PARTITIONS})
        old, epoch = leaders(cluster)[0]
        cut_off = cluster.brokers[old - 1]
        others = ",".join(broker.listen[0] for broker in cluster.brokers if broker is not cut_off)
        cluster.network.cut(f"b{old}")

        def elected() -> int | None:
            with connect(others) as client:
                part = client.topology([TOPIC]).topics[TOPIC].partitions[0]
                return part.leader_epoch if part.leader_id not in (old, -1) else None

        new_epoch = wait_for("another leader", elected)
        assert new_epoch > epoch
        command = ["produce", TOPIC, "--partition", "0", "--timeout", "5", "--bootstrap", cut_off.listen[0]]
        done = subprocess.run(
            [*cut_off.prefix, HEADRACE, *command], input=b"1-0\n", capture_output=True, timeout=120, check=False
        )
        assert done.returncode == 1, done
        producer = Producer({**CLIENT, "bootstrap.servers": others, "enable.idempotence": True})
        producer.produce(TOPIC, b"2-0", partition=0)
        assert producer.flush(60) == 0
        cluster.network.mend(f"b{old}")

        def has_heard() -> bool:
            with connect(cut_off.listen[0]) as client:
                return client.topology([TOPIC]).topics[TOPIC].partitions[0].leader_epoch >= new_epoch

        wait_for("the old leader to hear of the new one", has_heard)
        cluster.wait_in_sync({TOPIC: PARTITIONS})
        assert read_all(cluster.bootstrap, TOPIC, 0).tolist() == [code_of(b"2-0")]
