"""A stopped cluster of earlier code, its folders and its keys in etcd, is started by today's (see `make.py`)."""

from __future__ import annotations

import base64
import contextlib
from pathlib import Path
from typing import Any

from clusters import BrokerCluster
from etcd_nodes import EtcdNode
from old_data.content import KEEP
from old_data.kept import check_log_bytes, check_served, check_whole, log_bytes, unpack
from proving import proves

SETTINGS = {**KEEP, "log.layout": "auto", "broker.lease.ms": 3000}
EVERYTHING = {name: base64.b64encode(b"\0").decode() for name in ("key", "range_end")}


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def put_back(node: EtcdNode, kept: dict[str, Any]) -> None:
    """Make the kept keys in a new etcd, each created and last changed in the revision in which it was: brokers refuse
    metadata that is older than what they have seen."""
    revision, filler = 1, {"key": "between", "value": ""}
    while revision < kept["revision"]:
        due = [key for key in kept["keys"] if revision + 1 in (key["created"], key["changed"])] or [filler]
        puts = [{"request_put": {"key": encoded(key["key"]), "value": encoded(key["value"])}} for key in due]
        answer = node.ask("/v3/kv/txn", {"success": puts}) or node.ask("/v3/kv/range", EVERYTHING)
        revision = int(answer["header"]["revision"]) if answer else revision
    answer = node.ask("/v3/kv/range", EVERYTHING)
    assert answer is not None
    now = {found["key"]: (int(found["create_revision"]), int(found["mod_revision"])) for found in answer["kvs"]}
    now.pop(encoded(filler["key"]), None)
    assert now == {encoded(key["key"]): (key["created"], key["changed"]) for key in kept["keys"]}


@proves("G3", "G14", "R4")
def test_a_cluster_of_earlier_code_starts_and_goes_on(tmp_path: Path) -> None:
    told = unpack("cluster", tmp_path)
    topics = {name: len(topic["partitions"]) for name, topic in told["content"]["topics"].items()}
    with contextlib.closing(BrokerCluster(tmp_path, 3, 1, SETTINGS)) as cluster:
        before = {broker.data: log_bytes(broker.data) for broker in cluster.brokers}
        for data in before:
            check_whole(data)
        cluster.etcd.start_all()
        put_back(cluster.etcd.nodes[0], told["etcd"])
        cluster.start()
        cluster.wait_in_sync(topics)
        check_served(cluster.bootstrap, told)
        cluster.wait_in_sync(topics)
        cluster.stop()
        for data, held in before.items():
            check_log_bytes(data, held)
            check_whole(data)
