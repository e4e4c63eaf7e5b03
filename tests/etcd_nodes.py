"""etcd as processes of its own: one node or three on loopback, to kill, pause, stop and start again.

    with etcd_nodes(tmp_path, 3) as etcd:
        settings = {"coordination": etcd.uri}     # etcd://127.0.0.1:P1,127.0.0.1:P2,127.0.0.1:P3
        etcd.kill(etcd.leader())                  # SIGKILL; nodes are named by 0, 1, 2
        etcd.start(0)                             # same ports, same data; waits until it answers
        etcd.kill_all(), etcd.start_all()

Timeouts are small: an election takes about half a second and the shortest lease is one second. A port is kept by a
socket that is bound and does not listen, so nobody else is given it while its node is down. Every process dies with
the test process (PR_SET_PDEATHSIG), however that ends; nodes may be killed and started from any thread.
Where etcd is not installed, these tests fail; `make test` installs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from brokers import DIES_WITH_PARENT, wait_for

HEARTBEAT_MS: Final = 50
ELECTION_MS: Final = 500
START_DEADLINE_S: Final = 120.0
STOP_DEADLINE_S: Final = 120.0
ASK_TIMEOUT_S: Final = 2.0
LOG_SHOWN_BYTES: Final = 6000
# A child dies with the thread that started it: this one lives as long as the process.
STARTER: Final = ThreadPoolExecutor(1)


class EtcdFailed(AssertionError):
    """A node did not start or did not stop; carries the end of its log."""


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """What the nodes show to clients; with `client_ca` they let in only clients with a certificate of that CA."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def flags(self) -> list[str]:
        flags = [f"--cert-file={self.certificate}", f"--key-file={self.key}"]
        if self.client_ca is not None:
            flags += ["--client-cert-auth", f"--trusted-ca-file={self.client_ca}"]
        return flags

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.client_ca or self.certificate))
        context.load_cert_chain(self.certificate, self.key)
        return context


class KeptPort:
    """A loopback port that only a listener with SO_REUSEADDR can take, as etcd's, for as long as this is open."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


class EtcdNode:
    """One node. `start` returns at once, `wait_until_healthy` when it answers."""

    def __init__(self, folder: Path, name: str, tls: EtcdTls | None, flags: Sequence[str]) -> None:
        self.name = name
        self.data = folder / name
        self.log = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._client, self._peer = KeptPort(), KeptPort()
        self._tls = tls
        self._flags = list(flags)
        self.prefix: tuple[str, ...] = ()
        """What the program is started by, as `ip netns exec NAME`."""
        self.peer_url = f"http://127.0.0.1:{self._peer.number}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._client.number}"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, peers: str) -> None:
        assert self.process is None, f"{self.name} runs already"
        client_url = f"{'https' if self._tls else 'http'}://{self.address}"
        command = [
            *DIES_WITH_PARENT,
            *self.prefix,
            "etcd",
            f"--name={self.name}",
            f"--data-dir={self.data}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={peers}",
            f"--heartbeat-interval={HEARTBEAT_MS}",
            f"--election-timeout={ELECTION_MS}",
            "--logger=zap",
            "--log-outputs=stderr",
            "--log-level=warn",
            *(self._tls.flags() if self._tls else ()),
            *self._flags,
        ]
        # etcd reads ETCD_... variables; those of whoever runs the tests are not meant for it.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        with self.log.open("ab") as log:
            started = STARTER.submit(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.data.parent,
            )
            self.process = started.result()

    def wait_until_healthy(self) -> None:
        """It answers and its cluster has a leader."""

        def healthy() -> bool:
            if not self.running:
                raise EtcdFailed(f"etcd {self.name} ended while it started\n{self.log_end()}")
            answer = self.ask("/health")
            return answer is not None and answer.get("health") == "true"

        try:
            wait_for(f"etcd {self.name} at {self.address}", healthy, START_DEADLINE_S)
        except AssertionError as error:
            raise EtcdFailed(f"{error}\n{self.log_end()}") from None

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The JSON answer of its HTTP gateway; None when there is none."""
        context = self._tls.context() if self._tls else None
        url = f"{'https' if self._tls else 'http'}://{self.address}{path}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(url, data, ASK_TIMEOUT_S, context=context) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, urllib.error.URLError, json.JSONDecodeError):
            return None

    def leads(self) -> bool:
        status = self.ask("/v3/maintenance/status", {}) if self.running else None
        return status is not None and status.get("leader", "0") == status["header"]["member_id"]

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None, f"{self.name} does not run"
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise EtcdFailed(f"etcd {self.name} did not stop\n{self.log_end()}") from None
        self.process = None

    def log_end(self) -> str:
        return self.log.read_bytes()[-LOG_SHOWN_BYTES:].decode(errors="replace") if self.log.exists() else ""

    def close(self) -> None:
        self.kill()
        self._client.close()
        self._peer.close()


class EtcdNodes:
    """A cluster of etcd nodes below one folder."""

    def __init__(self, folder: Path, count: int = 1, tls: EtcdTls | None = None, flags: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.nodes = [EtcdNode(folder, f"etcd-{n}", tls, flags) for n in range(count)]

    @property
    def _peers(self) -> str:
        return ",".join(f"{node.name}={node.peer_url}" for node in self.nodes)

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self.nodes]

    @property
    def uri(self) -> str:
        """What the setting `coordination` takes."""
        return "etcd://" + ",".join(self.addresses)

    def start_all(self, wait: bool = True) -> EtcdNodes:
        """Start what does not run; a first start needs a majority before any node is ready."""
        for node in self.nodes:
            if not node.running:
                node.start(self._peers)
        if wait:
            self.wait_until_healthy()
        return self

    def start(self, number: int, wait: bool = True) -> None:
        self.nodes[number].start(self._peers)
        if wait:
            self.nodes[number].wait_until_healthy()

    def wait_until_healthy(self) -> None:
        for node in self.nodes:
            if node.running:
                node.wait_until_healthy()

    def leader(self) -> int:
        """The number of the node that leads; waits for an election that is under way."""

        def found() -> list[int]:
            return [number for number, node in enumerate(self.nodes) if node.leads()]

        return wait_for("a leader of etcd", found)[0]

    def kill(self, number: int) -> None:
        """SIGKILL; the node is gone when this returns."""
        self.nodes[number].kill()

    def kill_all(self) -> None:
        for node in self.nodes:
            if node.running:
                node.signal(signal.SIGKILL)
        for node in self.nodes:
            node.kill()

    def stop(self, number: int) -> None:
        """SIGTERM, a clean stop."""
        self.nodes[number].stop()

    def pause(self, number: int) -> None:
        """SIGSTOP: the node keeps its connections and says nothing."""
        self.nodes[number].signal(signal.SIGSTOP)

    def resume(self, number: int) -> None:
        self.nodes[number].signal(signal.SIGCONT)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@contextlib.contextmanager
def etcd_nodes(
    folder: Path, count: int = 1, tls: EtcdTls | None = None, flags: Sequence[str] = ()
) -> Iterator[EtcdNodes]:
    """Healthy nodes, ended with the block."""
    nodes = EtcdNodes(folder, count, tls, flags)
    try:
        yield nodes.start_all()
    finally:
        nodes.close()
