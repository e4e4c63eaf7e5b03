"""The etcd that other tests run on keeps its data, ports and leader over kills."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from etcd_nodes import EtcdNodes, etcd_nodes


def text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()


def put(etcd: EtcdNodes, node: int, key: str, value: str) -> None:
    assert etcd.nodes[node].ask("/v3/kv/put", {"key": text(key), "value": text(value)}) is not None


def value_of(etcd: EtcdNodes, node: int, key: str) -> str:
    found: Any = etcd.nodes[node].ask("/v3/kv/range", {"key": text(key)})
    return base64.b64decode(found["kvs"][0]["value"]).decode()


@pytest.mark.long
def test_three_nodes_lose_nothing_when_the_leader_or_all_are_killed(tmp_path: Path) -> None:
    with etcd_nodes(tmp_path, 3) as etcd:
        addresses, first = etcd.addresses, etcd.leader()
        put(etcd, first, "a", "1")
        etcd.kill(first)
        second = etcd.leader()
        assert second != first
        put(etcd, second, "b", "2")
        etcd.start(first)
        assert value_of(etcd, first, "b") == "2"
        etcd.kill_all()
        etcd.start_all()
        assert etcd.addresses == addresses
        assert (value_of(etcd, 0, "a"), value_of(etcd, 0, "b")) == ("1", "2")
