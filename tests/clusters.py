"""Clusters of brokers and etcd nodes as processes, to kill, pause and cut off part by part.

    with BrokerCluster(tmp_path, settings={"broker.lease.ms": 2000}) as cluster:
        cluster.bootstrap                             # all brokers, for clients
        cluster.brokers[0].kill(), cluster.brokers[0].start()
        cluster.etcd.kill(1), cluster.etcd.start(1)

`NamespacedCluster` puts every process into a network namespace of its own, all joined by a bridge, so that links can be
taken down and made slow; it needs root, `ip` and a kernel with namespaces (`namespaces_missing` says what lacks).
Ports are kept by sockets that are bound and do not listen: a client that looks for a dead broker must not be given the
broker's own port, and so connect to itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Self

from brokers import Broker, wait_for
from etcd_nodes import EtcdNode, EtcdNodes, KeptPort
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster, Retry
from headrace.errors import HeadraceError

ISOLATED_HOST_BITS: Final = 198 << 24 | 18 << 16  # 198.18.0.0/15 is set apart for tests of networks.
KAFKA_PORT: Final = 9092
REPLICATION_PORT: Final = 9192
SYNC_DEADLINE_S: Final = 90.0


def in_sync(addresses: Iterable[str], topics: Mapping[str, int]) -> bool:
    """Whether all brokers say the same: every partition of the topics has a leader and all its replicas in sync. One
    that was cut off may for a while know no better than that nothing has changed.
    """
    views = [_view(address, topics) for address in addresses]
    return views[0] is not None and all(view == views[0] for view in views)


def _view(address: str, topics: Mapping[str, int]) -> dict[tuple[str, int], tuple[int, int]] | None:
    """Leader and epoch of every partition, as one broker knows them; None if it knows of one that is not in sync."""
    with Cluster(address, timeout_ms=2000, retry=Retry(within_ms=0)) as client:
        try:
            found = client.topology(list(topics)).topics
        except HeadraceError:
            return None
    parts = {(name, part.index): part for name in topics if name in found for part in found[name].partitions}
    if len(parts) != sum(topics.values()):
        return None
    if any(part.leader_id < 0 or len(part.in_sync) < len(part.replicas) for part in parts.values()):
        return None
    return {place: (part.leader_id, part.leader_epoch) for place, part in parts.items()}


class BrokerCluster:
    """Three brokers and three etcd nodes, or as many as asked for, on loopback."""

    def __init__(
        self, folder: Path, brokers: int = 3, etcd: int = 3, settings: Mapping[str, object] | None = None
    ) -> None:
        self.folder = folder
        self.settings = dict(settings or {})
        self._ports: list[KeptPort] = []
        self.etcd = self._make_etcd(etcd)
        self.brokers = [self._make_broker(number) for number in range(1, brokers + 1)]

    def _make_etcd(self, count: int) -> EtcdNodes:
        return EtcdNodes(self.folder / "etcd", count)

    def _make_broker(self, number: int) -> Broker:
        kafka, replication = KeptPort(), KeptPort()
        self._ports += [kafka, replication]
        settings = self.broker_settings(number, f"127.0.0.1:{replication.number}")
        return Broker(self.folder / f"broker-{number}", settings, listen=[f"127.0.0.1:{kafka.number}"])

    def broker_settings(self, number: int, replication: str) -> dict[str, object]:
        return {
            "node.id": number,
            "coordination": self.etcd.uri,
            "replication.listen": replication,
            **self.settings,
        }

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.listen[0] for broker in self.brokers)

    def start(self) -> Self:
        self.etcd.start_all()
        for broker in self.brokers:
            broker.start()
        return self

    def pause(self, number: int) -> None:
        """SIGSTOP to a broker, by its place in `brokers`."""
        os.kill(self.brokers[number].pid, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        os.kill(self.brokers[number].pid, signal.SIGCONT)

    def create_topic(
        self, name: str, partitions: int, replicas: int, timeout_s: float = 60.0, **config: object
    ) -> None:
        """Settings are named with underscores for dots."""
        timeout_ms = int(timeout_s * 1000)
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        with Cluster(self.bootstrap, timeout_ms=timeout_ms, retry=Retry(within_ms=timeout_ms)) as client:
            operations.create_topic(
                client, name, partitions=partitions, replicas=replicas, configs=settings, timeout_ms=timeout_ms
            )

    def wait_in_sync(self, topics: Mapping[str, int]) -> None:
        wait_for(
            f"all replicas of {', '.join(topics)} in sync",
            lambda: in_sync(self.bootstrap.split(","), topics),
            SYNC_DEADLINE_S,
            0.2,
        )

    def stop(self) -> None:
        """SIGTERM to the brokers; a clean stop."""
        for broker in self.brokers:
            if broker.process is not None:
                broker.process.terminate()
        for broker in self.brokers:
            if broker.process is not None:
                broker.stop()

    def close(self) -> None:
        for broker in self.brokers:
            broker.kill()
        self.etcd.close()
        for port in self._ports:
            port.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def said(self) -> str:
        """The end of what every broker has said, for a failed test."""
        return "\n".join(f"== {broker.data.name}\n{broker.stderr()}" for broker in self.brokers)


def run(*command: str) -> bool:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0


def namespaces_missing() -> str:
    """What keeps this machine from making network namespaces joined by a bridge; empty if nothing does."""
    if shutil.which("ip") is None:
        return "no program ip (Debian package iproute2)"
    name = f"hr{secrets.token_hex(3)}"
    try:
        if not run("ip", "netns", "add", name):
            return "network namespaces cannot be made here"
        if not run("ip", "link", "add", name, "type", "bridge"):
            return "a bridge cannot be made here"
        if not run("ip", "link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name):
            return "a link into a network namespace cannot be made here"
        return ""
    finally:
        run("ip", "link", "del", f"{name}v")
        run("ip", "link", "del", name)
        run("ip", "netns", "del", name)


class Network:
    """A bridge with a port into a namespace for each member; this process is at the bridge's own address."""

    def __init__(self) -> None:
        self.name = f"hr{secrets.token_hex(3)}"
        self._first = ISOLATED_HOST_BITS | (secrets.randbelow(1 << 9) << 8)
        self._members: dict[str, str] = {}
        self._do("link", "add", self.name, "type", "bridge")
        self._do("addr", "add", f"{self.host(1)}/24", "dev", self.name)
        self._do("link", "set", self.name, "up")

    def host(self, last: int) -> str:
        value = self._first | last
        return ".".join(str(value >> shift & 255) for shift in (24, 16, 8, 0))

    def join(self, member: str, last: int) -> tuple[str, ...]:
        """Make the member's namespace; answers what a program is started by to be in it."""
        namespace, link = f"{self.name}-{member}", f"{self.name}{len(self._members)}"
        self._do("netns", "add", namespace)
        self._members[member] = link
        self._do("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        self._do("link", "set", link, "master", self.name, "up")
        self._do("-n", namespace, "addr", "add", f"{self.host(last)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._do("-n", namespace, "link", "set", device, "up")
        return ("ip", "netns", "exec", namespace)

    def cut(self, member: str) -> None:
        """Take the member's link down: packets vanish, connections stay as they are."""
        self._do("link", "set", self._members[member], "down")

    def mend(self, member: str) -> None:
        self._do("link", "set", self._members[member], "up")

    def can_slow(self) -> bool:
        """Whether this kernel has netem."""
        member = next(iter(self._members))
        can = run("tc", "qdisc", "replace", "dev", self._members[member], "root", "netem", "delay", "1ms")
        self.unslow(member)
        return can

    def slow(self, member: str, *how: str) -> None:
        """As `slow("b1", "delay", "20ms")`, in the words of netem."""
        assert run("tc", "qdisc", "replace", "dev", self._members[member], "root", "netem", *how)

    def unslow(self, member: str) -> None:
        run("tc", "qdisc", "del", "dev", self._members[member], "root")

    def close(self) -> None:
        for member, link in self._members.items():
            run("ip", "link", "del", link)
            run("ip", "netns", "del", f"{self.name}-{member}")
        run("ip", "link", "del", self.name)

    def _do(self, *command: str) -> None:
        done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"ip {' '.join(command)}: {done.stderr}"


class NamespacedNode(EtcdNode):
    def __init__(self, folder: Path, name: str, host: str, prefix: tuple[str, ...]) -> None:
        super().__init__(folder, name, None, ())
        self._host = host
        self.prefix = prefix
        self.peer_url = f"http://{host}:2380"

    @property
    def address(self) -> str:
        return f"{self._host}:2379"


class NamespacedCluster(BrokerCluster):
    """Brokers are the network's members b1, b2, ...; etcd nodes e1, e2, ..."""

    def __init__(
        self, folder: Path, brokers: int = 3, etcd: int = 3, settings: Mapping[str, object] | None = None
    ) -> None:
        self.network = Network()
        try:
            super().__init__(folder, brokers, etcd, settings)
        except BaseException:
            self.network.close()
            raise

    def _make_etcd(self, count: int) -> EtcdNodes:
        nodes = EtcdNodes(self.folder / "etcd", 0)
        for number in range(1, count + 1):
            prefix = self.network.join(f"e{number}", 20 + number)
            host = self.network.host(20 + number)
            nodes.nodes.append(NamespacedNode(self.folder / "etcd", f"etcd-{number}", host, prefix))
        return nodes

    def _make_broker(self, number: int) -> Broker:
        prefix, host = self.network.join(f"b{number}", 10 + number), self.network.host(10 + number)
        settings = self.broker_settings(number, f"{host}:{REPLICATION_PORT}")
        folder = self.folder / f"broker-{number}"
        return Broker(folder, settings, listen=[f"{host}:{KAFKA_PORT}"], prefix=prefix)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.network.close)
            super().close()
