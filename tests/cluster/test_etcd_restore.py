"""A real etcd put back to an older copy of its data, below brokers that run and one that starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from brokers import wait_for
from cli.conftest import run_command
from clusters import BrokerCluster
from headrace import Producer
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.admin.operations import metadata_doubts
from headrace.cluster.lineage import EPOCHS_ABOVE
from proving import proves

SETTINGS = {"broker.lease.ms": 2000, "replica.lag.time.max.ms": 1000}


def without_etcd(cluster: BrokerCluster, act: Callable[[Path], object]) -> None:
    node = cluster.etcd.nodes[0]
    node.stop()
    act(node.data)
    cluster.etcd.start_all()


def produce(cluster: BrokerCluster, topic: str, *values: bytes) -> None:
    with Producer(cluster.bootstrap) as producer:
        for value in values:
            producer.send(topic, value)


@proves("G14", "J6")
def test_brokers_on_a_restored_etcd_wait_for_an_operator_and_keep_everything(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with BrokerCluster(tmp_path, 2, 1, SETTINGS) as cluster:
        cluster.create_topic("t", 1, 2)
        produce(cluster, "t", b"old")
        without_etcd(cluster, lambda data: shutil.copytree(data, copy))
        cluster.create_topic("newer", 1, 2)
        produce(cluster, "newer", b"of newer")
        cluster.wait_in_sync({"t": 1, "newer": 1})
        cluster.brokers[0].stop()
        cluster.brokers[0].start()
        cluster.wait_in_sync({"t": 1, "newer": 1})
        produce(cluster, "t", b"new")
        cluster.brokers[1].stop()

        def put_back(data: Path) -> None:
            shutil.rmtree(data)
            shutil.copytree(copy, data)

        without_etcd(cluster, put_back)
        cluster.brokers[1].start()
        with Cluster(cluster.bootstrap, retry=Retry(within_ms=60_000)) as client:
            wait_for("both doubt", lambda: [each.broker_id for each in metadata_doubts(client)] == [1, 2])
        at = cluster.bootstrap
        shown = run_command("cluster", "accept-metadata", "--dry-run", "--json", bootstrap=at, exit_code=1).stdout
        rows = [row for doubt in json.loads(shown)["doubts"] for row in doubt["differences"]]
        assert ("vanished", "newer") in {(row["kind"], row["topic"]) for row in rows}
        refused = run_command("topic", "create", "another", "--timeout", "2", bootstrap=at, exit_code=1)
        assert "accept-metadata --dry-run" in refused.stderr
        assert "accepted" in run_command("cluster", "accept-metadata", bootstrap=at).stdout
        cluster.wait_in_sync({"t": 1})
        with Cluster(cluster.bootstrap, retry=Retry(within_ms=60_000)) as client:
            assert metadata_doubts(client) == []
            (partition,) = client.topic("t").partitions
            assert partition.leader_epoch > EPOCHS_ABOVE
        assert run_command("consume", "t", bootstrap=at).stdout.splitlines() == ["old", "new"]
        for broker in cluster.brokers:
            assert (broker.data / "newer" / "newer-0").is_dir()
