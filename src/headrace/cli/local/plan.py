"""What a local cluster is made of: names, ports, folders, config files, commands. Nothing is started here.

    D/etcd1/etcd.json, etcd.log, data/          D/broker1/headrace.toml, broker.log, data/
    D/registry1/headrace.toml, registry.log

Ports lie in blocks from the base port on, 20 apart: Kafka, replication, HTTP, etcd's clients, etcd's peers, and of
registries Kafka and HTTP. A base port
of 0 takes a free block below the ports that the kernel gives to outgoing connections: while a broker is down, nobody is
given its port.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import sys
from pathlib import Path
from typing import Final

from headrace.cli.local.cluster_file import HOST, Kind, LocalCluster, LocalNode
from headrace.errors import OperatorError

BLOCK: Final = 20
BROKERS_MAX: Final = BLOCK
USES_OF: Final[dict[Kind, tuple[str, ...]]] = {
    "broker": ("kafka", "replication", "http"),
    "etcd": ("client", "peer"),
    "registry": ("routes", "routes_http"),
}
"""The first port of each is its address."""
USES: Final = tuple(use for uses in USES_OF.values() for use in uses)
FREE_PORTS: Final = (20_000, 32_000)
FREE_TRIES: Final = 100

ETCD_HEARTBEAT_MS: Final = 100
ETCD_ELECTION_MS: Final = 1000
LEASE_MS: Final = 3000
"""Of a broker, unless set: somebody who tries a kill does not want to wait ten seconds for the new leader."""


def plan(
    folder: Path, base_port: int, brokers: int, etcd: int, settings: dict[str, str], registries: int = 0
) -> LocalCluster:
    """A new cluster; its folders and config files are written when it is."""
    if etcd == 0 and (brokers > 1 or registries):
        raise OperatorError("several brokers, and registries, need etcd: give --etcd 1 or --etcd 3")
    base = base_port or free_block()
    nodes = tuple(_node(folder, base, "etcd", number) for number in range(1, etcd + 1))
    return enlarge(LocalCluster(base, settings, nodes), folder, brokers, registries)


def enlarge(cluster: LocalCluster, folder: Path, brokers: int, registries: int = 0) -> LocalCluster:
    """The same cluster with so many brokers and registries."""
    base = cluster.base_port
    new = [_node(folder, base, "broker", number) for number in range(len(cluster.brokers) + 1, brokers + 1)]
    new += [_node(folder, base, "registry", number) for number in range(len(cluster.registries) + 1, registries + 1)]
    return LocalCluster(base, cluster.settings, (*cluster.nodes, *new))


def write_configs(cluster: LocalCluster) -> None:
    """Folders and config files of all nodes; those that are there are written again with the same content."""
    for node in cluster.nodes:
        folder = Path(node.folder)
        folder.mkdir(parents=True, exist_ok=True)
        if node.kind != "registry":
            (folder / "data").mkdir(exist_ok=True, mode=0o700)
        if node.kind == "etcd":
            (folder / "etcd.json").write_text(json.dumps(_etcd_config(node, cluster), indent=1) + "\n")
        else:
            lines = [f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in _settings(node, cluster).items()]
            (folder / "headrace.toml").write_text("".join(lines))


def check_ports(cluster: LocalCluster) -> None:
    """OperatorError names the first port that somebody else listens on."""
    for node in cluster.nodes:
        for use, port in node.ports.items():
            if not _is_free(port):
                raise OperatorError(
                    f"port {port} ({use} of {node.name}) is in use: end what listens there, or give another --base-port"
                )


def _find_etcd() -> str:
    found = shutil.which("etcd")
    if found is None:
        raise OperatorError("the program etcd is not installed: `apt install etcd-server` on Debian")
    return found


def _node(folder: Path, base_port: int, kind: Kind, number: int) -> LocalNode:
    own = folder / f"{kind}{number}"
    if kind == "etcd":
        command: tuple[str, ...] = (_find_etcd(), "--config-file", str(own / "etcd.json"))
    else:
        run = "serve" if kind == "broker" else "registry"
        command = (sys.executable, "-m", "headrace.cli.main", run, "--config", str(own / "headrace.toml"))
    ports = {use: base_port + BLOCK * USES.index(use) + number - 1 for use in USES_OF[kind]}
    address = f"{HOST}:{ports[USES_OF[kind][0]]}"
    return LocalNode(own.name, kind, number, address, ports, str(own), str(own / f"{kind}.log"), command)


def _etcd_config(node: LocalNode, cluster: LocalCluster) -> dict[str, object]:
    """etcd reads YAML, of which JSON is a part."""
    client, peer = (f"http://{HOST}:{node.ports[use]}" for use in ("client", "peer"))
    return {
        "name": node.name,
        "data-dir": str(Path(node.folder) / "data"),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": ",".join(f"{each.name}=http://{HOST}:{each.ports['peer']}" for each in cluster.etcd),
        "heartbeat-interval": ETCD_HEARTBEAT_MS,
        "election-timeout": ETCD_ELECTION_MS,
        "logger": "zap",
        "log-outputs": ["stderr"],
        "log-level": "warn",
    }


def _settings(node: LocalNode, cluster: LocalCluster) -> dict[str, object]:
    coordination = "etcd://" + ",".join(each.address for each in cluster.etcd)
    replicas = min(3, len(cluster.brokers))
    if node.kind == "registry":
        own = {"registry.listen": [node.address], "registry.http.listen": f"{HOST}:{node.ports['routes_http']}"}
        return {"coordination": coordination, "default.replication.factor": replicas, **own} | cluster.settings
    settings: dict[str, object] = {
        "node.id": node.number,
        "data": str(Path(node.folder) / "data"),
        "listen": [node.address],
        "http.listen": f"{HOST}:{node.ports['http']}",
    }
    if cluster.etcd:
        settings["coordination"] = coordination
        settings["replication.listen"] = f"{HOST}:{node.ports['replication']}"
        settings["broker.lease.ms"] = LEASE_MS
        settings["default.replication.factor"] = replicas
    return settings | cluster.settings


def free_block() -> int:
    for _ in range(FREE_TRIES):
        base = random.randrange(*FREE_PORTS, BLOCK * len(USES))
        if all(_is_free(port) for port in range(base, base + BLOCK * len(USES))):
            return base
    raise OperatorError(f"no free block of ports between {FREE_PORTS[0]} and {FREE_PORTS[1]}; give a --base-port")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
