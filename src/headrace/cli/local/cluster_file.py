"""The file cluster.json of a local cluster's folder: what belongs to it, how each part is started, which process it is.

    {"format": 1, "bootstrap": "127.0.0.1:9092,...", "base_port": 9092, "settings": {name: text},
     "nodes": [{"name": "etcd1", "kind": "etcd" | "broker" | "registry", "number", "address", "ports": {use: port},
                "folder", "log", "command": [...], "process": {"pid", "started_ticks", "boot"} | null}]}

It is written beside the old one and renamed, under a lock on the folder, so commands at the same time do not undo each
other's work. A process that has ended stays in it until it is started again: whether one runs is asked of the kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from headrace.cli.local.processes import Process, State
from headrace.errors import OperatorError

FILE: Final = "cluster.json"
LOCK: Final = "cluster.lock"
FORMAT: Final = 1
HOST: Final = "127.0.0.1"
"""The only host that a local cluster listens on."""

Kind = Literal["etcd", "broker", "registry"]


@dataclass(frozen=True, slots=True)
class LocalNode:
    """An etcd node, a broker or a registry; `ports` by use: client and peer; kafka, http and replication; routes and
    routes_http."""

    name: str
    kind: Kind
    number: int
    address: str
    ports: dict[str, int]
    folder: str
    log: str
    command: tuple[str, ...]
    process: Process | None = None

    def state(self) -> State:
        return State.DOWN if self.process is None else self.process.state()


@dataclass(frozen=True, slots=True)
class LocalCluster:
    base_port: int
    settings: dict[str, str]
    nodes: tuple[LocalNode, ...]

    @property
    def brokers(self) -> tuple[LocalNode, ...]:
        return tuple(node for node in self.nodes if node.kind == "broker")

    @property
    def registries(self) -> tuple[LocalNode, ...]:
        return tuple(node for node in self.nodes if node.kind == "registry")

    @property
    def etcd(self) -> tuple[LocalNode, ...]:
        return tuple(node for node in self.nodes if node.kind == "etcd")

    @property
    def bootstrap(self) -> str:
        return ",".join(node.address for node in self.brokers)

    def node(self, name: str) -> LocalNode:
        """By name, or a broker by its number."""
        for node in self.nodes:
            if name == node.name or (node.kind == "broker" and name == str(node.number)):
                return node
        names = ", ".join(node.name for node in self.nodes)
        raise OperatorError(f"there is no {name!r} in this cluster; there are {names}")

    def with_node(self, changed: LocalNode) -> LocalCluster:
        return replace(self, nodes=tuple(changed if node.name == changed.name else node for node in self.nodes))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One command at a time changes the file."""
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def load(folder: Path) -> LocalCluster:
    """OperatorError if there is no cluster in the folder."""
    found = find(folder)
    if found is None:
        raise OperatorError(f"{folder} holds no local cluster; `headrace cluster up --dir {folder}` makes one")
    return found


def find(folder: Path) -> LocalCluster | None:
    path = folder / FILE
    try:
        told = json.loads(path.read_bytes())
        if told["format"] != FORMAT:
            raise OperatorError(f"{path} has format {told['format']}, this program knows {FORMAT}")
        return LocalCluster(told["base_port"], told["settings"], tuple(map(_node, told["nodes"])))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise OperatorError(f"{path} is damaged ({error!r}): end its processes by hand and remove it") from None


def save(folder: Path, cluster: LocalCluster) -> None:
    told = {
        "format": FORMAT,
        "bootstrap": cluster.bootstrap,
        "base_port": cluster.base_port,
        "settings": cluster.settings,
        "nodes": [asdict(node) for node in cluster.nodes],
    }
    beside = folder / (FILE + ".new")
    beside.write_text(json.dumps(told, indent=1) + "\n")
    os.replace(beside, folder / FILE)


def _node(told: dict[str, Any]) -> LocalNode:
    process = told["process"]
    return LocalNode(
        **{**told, "command": tuple(told["command"]), "process": None if process is None else Process(**process)}
    )
