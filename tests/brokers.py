"""Brokers as processes of their own: start, kill, stop, start again on the same ports and folder.

`Broker` runs `headrace serve` and waits for its ready line on standard output:
`ready kafka=HOST:PORT http=HOST:PORT pid=N`, where a named listener is `kafka.NAME=HOST:PORT`.
Every process dies with the test process (PR_SET_PDEATHSIG), however that ends.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

START_DEADLINE_S: Final = 120.0
STOP_DEADLINE_S: Final = 120.0
STDERR_SHOWN_BYTES: Final = 8000
# The kernel kills such a child when the test process goes away.
DIES_WITH_PARENT: Final = ("setpriv", "--pdeathsig", "KILL")
PROGRAM: Final = Path(sys.executable).parent / "headrace"
LAYOUT_VARIABLE: Final = "HEADRACE_LOG_LAYOUT"
QUICK: Final = {"group.initial.rebalance.delay.ms": 100}
"""What is set where a test does not say otherwise: an empty group waits 3 s for more members by default."""
PATIENCE_S: Final = 120.0
"""How long a test waits for what has to come; on a machine that does much else everything takes its time."""
Found = TypeVar("Found")


def wait_for(
    what: str, attempt: Callable[[], Found | None], deadline_s: float = PATIENCE_S, pause_s: float = 0.02
) -> Found:
    """Ask until the answer is true, or fail saying what did not come."""
    end, pause = time.monotonic() + deadline_s, threading.Event()
    while True:
        found = attempt()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:g} s for {what}")
        pause.wait(pause_s)


def free_port() -> int:
    """A port that nobody listens on now; for a listener that has to be known before the broker starts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class BrokerFailed(AssertionError):
    """A broker did not start, died or did not stop; carries the end of its standard error."""


class Broker:
    """One broker process on a data folder of its own."""

    def __init__(
        self,
        data: Path,
        settings: Mapping[str, object],
        listen: Iterable[str] = ("127.0.0.1:0",),
        advertise: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        prefix: Iterable[str] = (),
        program: Path = PROGRAM,
    ) -> None:
        self.data = data
        self.settings = {**QUICK, **settings}
        self.listen = list(listen)
        self.advertise = list(advertise)
        self.environment = dict(environment or {})
        self.prefix = list(prefix)
        self.program = program
        self.http_listen = "127.0.0.1:0"
        self.addresses: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.errors = data.parent / f"{data.name}.stderr"
        self.start_s = 0.0

    @property
    def bootstrap(self) -> str:
        """The address of the first Kafka listener, for clients."""
        return next(address for name, address in self.addresses.items() if name.startswith("kafka"))

    @property
    def host_port(self) -> tuple[str, int]:
        host, _, port = self.bootstrap.rpartition(":")
        return host, int(port)

    @property
    def http(self) -> str:
        return "http://" + self.addresses["http"]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return int(self.addresses.get("pid", self.process.pid))

    def command(self) -> list[str]:
        command = [
            *DIES_WITH_PARENT,
            *self.prefix,
            str(self.program),
            "serve",
            "--data",
            str(self.data),
        ]
        for address in self.listen:
            command += ["--listen", address]
        for address in self.advertise:
            command += ["--advertise", address]
        command += ["--set", f"http.listen={self.http_listen}"]
        for name, value in self.settings.items():
            command += ["--set", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
        return command

    def start(self) -> Broker:
        """Start the process and wait until it says that it is ready."""
        assert self.process is None, "this broker runs already"
        began = time.monotonic()
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **self.environment},
            )
        self._keep_ports(self._ready_line())
        self.start_s = time.monotonic() - began
        return self

    def _ready_line(self) -> dict[str, str]:
        assert self.process is not None
        assert self.process.stdout is not None
        end = time.monotonic() + START_DEADLINE_S
        seen = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while (left_s := end - time.monotonic()) > 0:
                if not selector.select(left_s):
                    continue
                read = os.read(self.process.stdout.fileno(), 65536)
                seen += read
                for line in seen.decode(errors="replace").splitlines():
                    if line.startswith("ready ") and seen.endswith(b"\n"):
                        return dict(part.split("=", 1) for part in line.split()[1:])
                if not read:
                    break
        self.kill()
        raise BrokerFailed(f"no ready line from {' '.join(self.command())}\n{seen.decode()}\n{self.stderr()}")

    def _keep_ports(self, addresses: dict[str, str]) -> None:
        """A restart listens where this start did, so that clients find it again."""
        self.addresses = addresses
        kafka = {name.partition(".")[2]: addresses[name] for name in addresses if name.split(".")[0] == "kafka"}
        fixed = []
        for index, given in enumerate(self.listen):
            name, equals, _ = given.rpartition("=")
            fixed.append(name + equals + (kafka.get(name) or list(kafka.values())[index]))
        self.listen = fixed
        if "http" in addresses:
            self.http_listen = addresses["http"]

    def stderr(self) -> str:
        """The end of what the broker said on standard error, over all its starts."""
        try:
            return self.errors.read_bytes()[-STDERR_SHOWN_BYTES:].decode(errors="replace")
        except FileNotFoundError:
            return ""

    def check_alive(self) -> None:
        if self.process is None or self.process.poll() is not None:
            status = self.process.returncode if self.process else "never started"
            raise BrokerFailed(f"the broker is gone ({status})\n{self.stderr()}")

    def kill(self) -> None:
        """SIGKILL, as a crash; returns when the process is gone."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self._reap()

    def stop(self) -> int:
        """SIGTERM, a clean stop; the exit status, which has to come in time."""
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise BrokerFailed(f"the broker did not stop within {STOP_DEADLINE_S} s\n{self.stderr()}") from None
        return self._reap()

    def _reap(self) -> int:
        assert self.process is not None
        status = self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None
        return status

    def restart(self, clean: bool = True) -> Broker:
        if self.process is not None:
            if clean:
                self.stop()
            else:
                self.kill()
        return self.start()

    def discard(self) -> None:
        """End the process and remove its folder."""
        self.kill()
        shutil.rmtree(self.data, ignore_errors=True)

    def memory_bytes(self) -> int:
        """Resident memory of the broker, without the pages of mapped files that the kernel may drop at any time."""
        fields = Path(f"/proc/{self.pid}/status").read_text().split()
        return int(fields[fields.index("RssAnon:") + 1]) * 1024

    def processes(self) -> list[int]:
        """The broker and the processes that it started."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [self.pid, *map(int, children)]

    def resident_bytes(self) -> int:
        """Resident memory of the broker and its children, shared and file pages counted in each."""
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page_bytes for pid in self.processes())

    def cpu_s(self) -> float:
        """Processor time used so far by the broker and its children, in user and kernel."""
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.processes()]
        return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


class Brokers:
    """Starts brokers below one folder and ends them all."""

    def __init__(self, folder: Path, apache_kafka: Path | None = None) -> None:
        self.folder = folder
        self.apache_kafka = apache_kafka
        self.started: list[Broker] = []

    def start(self, settings: Mapping[str, object] | None = None, data: Path | None = None, **how: object) -> Broker:
        kind: type[Broker] = Broker
        if self.apache_kafka:
            from apache_kafka import ApacheKafka

            kind, how = ApacheKafka, {**how, "jars": self.apache_kafka}
        folder = data or self.folder / f"broker-{len(self.started)}"
        broker = kind(folder, settings or {}, **how)  # type: ignore[arg-type]
        self.started.append(broker)
        return broker.start()

    def close(self) -> None:
        for broker in self.started:
            broker.discard()
