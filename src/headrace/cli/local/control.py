"""Starting, signalling and stopping the processes of a local cluster, and waiting until that has come about."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from headrace.cli.local import cluster_file, plan
from headrace.cli.local.cluster_file import HOST, LocalCluster, LocalNode
from headrace.cli.local.processes import State, spawn
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster, Retry
from headrace.errors import HeadraceError, OperatorError

READY_WITHIN_S: Final = 60.0
STOP_WITHIN_S: Final = 60.0
ASK_TIMEOUT_S: Final = 2.0
PAUSE_S: Final = 0.05
LOG_LINES_SHOWN: Final = 5
LOG_SHOWN_BYTES: Final = 4000

Progress = Callable[[str], None]


def make(
    folder: Path, base_port: int, brokers: int, etcd: int, settings: dict[str, str], registries: int = 0
) -> LocalCluster:
    """The cluster of the folder: a new one, or the one that is there, with more brokers and registries if so many are
    asked for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with cluster_file.locked(folder):
        found = cluster_file.find(folder)
        if found is None:
            cluster = plan.plan(folder, base_port, brokers, etcd, settings, registries)
            plan.check_ports(cluster)
        else:
            cluster = _as_asked(found, folder, base_port, brokers, etcd, settings, registries)
        plan.write_configs(cluster)
        cluster_file.save(folder, cluster)
    return cluster


def _as_asked(
    found: LocalCluster,
    folder: Path,
    base_port: int,
    brokers: int,
    etcd: int,
    settings: dict[str, str],
    registries: int,
) -> LocalCluster:
    if base_port not in (0, found.base_port):
        raise OperatorError(f"the cluster in {folder} has base port {found.base_port}; leave --base-port out")
    if etcd != len(found.etcd):
        raise OperatorError(f"the cluster in {folder} has {len(found.etcd)} etcd nodes, and that cannot be changed")
    if brokers < len(found.brokers):
        raise OperatorError(
            f"the cluster in {folder} has {len(found.brokers)} brokers; `headrace broker drain` empties one of them"
        )
    if registries and not etcd:
        raise OperatorError(f"the cluster in {folder} has no etcd, and registries need it")
    return plan.enlarge(replace(found, settings={**found.settings, **settings}), folder, brokers, registries)


def start(folder: Path, names: Iterable[str] | None = None) -> list[LocalNode]:
    """Start those that are down, all or the ones named; answers what was started, at once."""
    started = []
    with cluster_file.locked(folder):
        cluster = cluster_file.load(folder)
        chosen = cluster.nodes if names is None else [cluster.node(name) for name in names]
        for node in chosen:
            if node.state() is not State.DOWN:
                continue
            running = replace(node, process=spawn(node.command, Path(node.log), _environment(node)))
            cluster = cluster.with_node(running)
            cluster_file.save(folder, cluster)
            started.append(running)
    return started


def _environment(node: LocalNode) -> dict[str, str]:
    """Variables by which etcd and brokers would be told other settings are not handed on."""
    taken = ("ETCD_",) if node.kind == "etcd" else ("HEADRACE_",)
    return {name: value for name, value in os.environ.items() if not name.startswith(taken)}


def send(folder: Path, name: str, number: signal.Signals) -> LocalNode:
    """Signal one process; after SIGKILL it is gone when this returns."""
    node = cluster_file.load(folder).node(name)
    if node.process is None or not node.process.send(number):
        raise OperatorError(f"{node.name} is down; `headrace cluster start --dir {folder} {node.name}` starts it")
    if number == signal.SIGKILL:
        _wait(f"{node.name} to end", lambda: node.state() is State.DOWN, STOP_WITHIN_S)
    return node


def wait_until_ready(cluster: LocalCluster, progress: Progress) -> None:
    """Every etcd node answers with a leader, then every broker and registry knows all the brokers that run."""
    for node in _running(cluster.etcd):
        progress(f"waiting for {node.name}")
        _wait_running(node, lambda node=node: etcd_is_healthy(node))  # type: ignore[misc]
    brokers = _running(cluster.brokers)
    numbers = {node.number for node in brokers}
    for node in (*brokers, *_running(cluster.registries)):
        progress(f"waiting for {node.name}")
        _wait_running(node, lambda node=node: numbers <= _brokers_known_to(node))  # type: ignore[misc]
    progress("")


def _running(nodes: Iterable[LocalNode]) -> list[LocalNode]:
    return [node for node in nodes if node.state() is State.UP]


def etcd_is_healthy(node: LocalNode) -> bool:
    connection = http.client.HTTPConnection(HOST, node.ports["client"], timeout=ASK_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return bool(json.loads(connection.getresponse().read()).get("health") == "true")
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def _brokers_known_to(node: LocalNode) -> set[int]:
    try:
        with connect(node.address) as cluster:
            return {broker.broker_id for broker in operations.describe_cluster(cluster).brokers}
    except HeadraceError:
        return set()


def connect(bootstrap: str) -> Cluster:
    """A client that gives up soon: whoever asks here asks again."""
    timeout_ms = int(ASK_TIMEOUT_S * 1000)
    return Cluster(bootstrap, timeout_ms=timeout_ms, retry=Retry(within_ms=0))


def stop(folder: Path, progress: Progress) -> list[LocalNode]:
    """SIGTERM to registries and brokers, then, when they have gone, to etcd; answers what was running."""
    cluster = cluster_file.load(folder)
    stopped = []
    for nodes in ((*cluster.registries, *cluster.brokers), cluster.etcd):
        ours = [node for node in nodes if _ask_to_stop(node)]
        for node in ours:
            progress(f"waiting for {node.name} to stop")
            if not _came(lambda node=node: node.state() is State.DOWN, STOP_WITHIN_S):  # type: ignore[misc]
                raise OperatorError(
                    f"{node.name} has not stopped within {STOP_WITHIN_S:g} s; its log is {node.log}, "
                    f"and `headrace cluster kill --dir {folder} {node.name}` ends it"
                )
        stopped += ours
    progress("")
    return stopped


def _ask_to_stop(node: LocalNode) -> bool:
    if node.process is None or not node.process.send(signal.SIGTERM):
        return False
    node.process.send(signal.SIGCONT)  # One that is paused takes the signal when it goes on.
    return True


def _wait_running(node: LocalNode, attempt: Callable[[], bool]) -> None:
    def ready() -> bool:
        if node.state() is State.DOWN:
            raise OperatorError(f"{node.name} has ended while it started:\n{log_end(node)}")
        return attempt()

    _wait(f"{node.name} at {node.address} (log: {node.log})", ready, READY_WITHIN_S)


def _wait(what: str, attempt: Callable[[], bool], within_s: float) -> None:
    if not _came(attempt, within_s):
        raise OperatorError(f"waited {within_s:g} s for {what}")


def _came(attempt: Callable[[], bool], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not attempt():
        if time.monotonic() > end:
            return False
        time.sleep(PAUSE_S)
    return True


def log_end(node: LocalNode) -> str:
    """The last lines that a node has said."""
    try:
        said = Path(node.log).read_bytes()[-LOG_SHOWN_BYTES:].decode(errors="replace")
    except FileNotFoundError:
        return "(it has said nothing)"
    return "\n".join(said.splitlines()[-LOG_LINES_SHOWN:])
