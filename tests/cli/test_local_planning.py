"""What a local cluster is made of, and what its folder says of it."""

from __future__ import annotations

import json
import socket
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.local import cluster_file, control, plan
from headrace.cli.local.cluster_file import LocalCluster
from headrace.cli.local.processes import Process, State
from headrace.errors import OperatorError

BASE_PORT = 21_000


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    return plan.plan(tmp_path, BASE_PORT, brokers=3, etcd=3, settings={"num.partitions": "4"})


def test_no_two_processes_share_a_port(cluster: LocalCluster) -> None:
    ports = [port for node in cluster.nodes for port in node.ports.values()]
    assert len(ports) == len(set(ports)) == 3 * 2 + 3 * 3
    assert cluster.bootstrap == "127.0.0.1:21000,127.0.0.1:21001,127.0.0.1:21002"


def test_every_process_has_its_config_file(cluster: LocalCluster, tmp_path: Path) -> None:
    plan.write_configs(cluster)
    settings = [tomllib.loads((tmp_path / f"broker{n}" / "headrace.toml").read_text()) for n in (1, 2, 3)]
    assert [each["node.id"] for each in settings] == [1, 2, 3]
    assert {each["coordination"] for each in settings} == {
        "etcd://127.0.0.1:21060,127.0.0.1:21061,127.0.0.1:21062"
    }  # fmt: skip
    assert len({each["replication.listen"] for each in settings}) == 3
    assert all(each["num.partitions"] == "4" for each in settings)
    etcd = [json.loads((tmp_path / f"etcd{n}" / "etcd.json").read_text()) for n in (1, 2, 3)]
    assert len({each["initial-cluster"] for each in etcd}) == 1
    assert all("127.0.0.1" in each["listen-client-urls"] for each in etcd)


def test_the_folder_tells_the_same_cluster_again(cluster: LocalCluster, tmp_path: Path) -> None:
    running = cluster.with_node(replace(cluster.nodes[0], process=Process(1, 2, "an earlier boot")))
    cluster_file.save(tmp_path, running)
    assert cluster_file.load(tmp_path) == running
    assert running.node("etcd1").state() is State.DOWN
    assert running.node("2") is running.node("broker2")
    with pytest.raises(OperatorError, match="broker3"):
        running.node("4")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / cluster_file.FILE).write_text('{"format": 1, "nodes": [')
    with pytest.raises(OperatorError, match=r"cluster\.json is damaged"):
        cluster_file.load(tmp_path)
    (tmp_path / cluster_file.FILE).write_text('{"format": 99}')
    with pytest.raises(OperatorError, match="format 99"):
        cluster_file.load(tmp_path)


def test_a_cluster_gets_more_brokers_and_never_fewer(tmp_path: Path) -> None:
    control.make(tmp_path, 0, brokers=2, etcd=1, settings={})
    larger = control.make(tmp_path, 0, brokers=4, etcd=1, settings={"num.partitions": "2"})
    assert [node.name for node in larger.nodes] == ["etcd1", "broker1", "broker2", "broker3", "broker4"]
    assert cluster_file.load(tmp_path) == larger
    for how, told in (
        ({"base_port": 0, "brokers": 3, "etcd": 1}, "headrace broker drain"),
        ({"base_port": 0, "brokers": 4, "etcd": 3}, "cannot be changed"),
        ({"base_port": 1, "brokers": 4, "etcd": 1}, "leave --base-port out"),
    ):
        with pytest.raises(OperatorError, match=told):
            control.make(tmp_path, settings={}, **how)
    assert cluster_file.load(tmp_path) == larger


def test_registries_are_added_and_need_etcd(tmp_path: Path) -> None:
    control.make(tmp_path, 0, brokers=1, etcd=1, settings={}, registries=1)
    larger = control.make(tmp_path, 0, brokers=1, etcd=1, settings={}, registries=2)
    assert [node.name for node in larger.registries] == ["registry1", "registry2"]
    told = tomllib.loads((tmp_path / "registry2" / "headrace.toml").read_text())
    assert told["registry.listen"] == [larger.node("registry2").address]
    assert told["coordination"] == f"etcd://{larger.node('etcd1').address}"
    assert control.make(tmp_path, 0, brokers=1, etcd=1, settings={}) == larger, "none is taken away"
    with pytest.raises(OperatorError, match="need etcd"):
        control.make(tmp_path / "alone", 0, brokers=1, etcd=0, settings={}, registries=1)


def test_a_port_in_use_is_named_with_what_wants_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OperatorError, match=rf"port {port} \(kafka of broker1\) is in use"):
            control.make(tmp_path, port, brokers=1, etcd=0, settings={})
