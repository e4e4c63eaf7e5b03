"""A broker under systemd, as the first process of a container, and at a terminal: what it says and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brokers import DIES_WITH_PARENT, PROGRAM, Broker, wait_for
from headrace.cli.main import main
from headrace.server.supervisor import Supervisor
from proving import proves

DEADLINE_S = 120
END = "END"
QUEUED_MAX = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 2
CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")


class Notices:
    """The service manager's side of NOTIFY_SOCKET."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name[1:] if name.startswith("@") else name)
        self.heard: list[str] = []
        self._reader = threading.Thread(target=self._read)

    def read(self) -> Notices:
        self._reader.start()
        return self

    def _read(self) -> None:
        while (notice := self._socket.recv(65536).decode()) != END:
            self.heard.append(notice)

    def wait(self, notice: str) -> None:
        wait_for(notice, lambda: any(notice in each.split("\n") for each in self.heard))

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(END.encode(), self._socket.getsockname())
        self._reader.join(DEADLINE_S)
        self._socket.close()


@pytest.fixture(autouse=True)
def hangups_arrive() -> Iterator[None]:
    """Also where these tests are run by `nohup`, which programs inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def notices() -> Iterator[Notices]:
    with tempfile.TemporaryDirectory() as folder:  # its name has to be short
        made = Notices(f"{folder}/notify").read()
        yield made
        made.close()


@proves("U6")
def test_systemd_hears_of_a_broker_from_its_start_to_its_end(
    fresh_broker: Callable[..., Broker], notices: Notices, tmp_path: Path
) -> None:
    errors = tmp_path / "data.stderr"
    errors.touch()
    found = errors.stat()
    broker = fresh_broker(
        data=tmp_path / "data",
        environment={
            "NOTIFY_SOCKET": notices.name,
            "WATCHDOG_USEC": "200000",
            "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}",
        },
    )
    notices.wait("READY=1")
    assert f"READY=1\nSTATUS=kafka={broker.bootstrap} http={broker.addresses['http']}" in notices.heard
    notices.wait("WATCHDOG=1")
    notices.heard.clear()
    notices.wait("WATCHDOG=1")
    assert main(["topic", "create", "t", "--partitions", "3", "--bootstrap", broker.bootstrap]) == 0
    assert broker.stop() == 0
    notices.wait("STOPPING=1")
    notices.wait("STATUS=stopped cleanly")
    lines = errors.read_text().splitlines()
    assert "<6>server.process: stopping: SIGTERM" in lines
    assert lines[-1].startswith("<6>server.process: stopped cleanly: 3 partitions closed in ")


def test_a_service_manager_in_the_abstract_space_that_is_slow_to_read_hears_what_matters() -> None:
    notices = Notices(f"@headrace-{os.getpid()}")

    async def tell() -> None:
        supervisor = Supervisor(asyncio.get_running_loop(), {"NOTIFY_SOCKET": notices.name})
        for _ in range(QUEUED_MAX):
            supervisor.starting()
        supervisor.ready("up")
        notices.read()
        await asyncio.to_thread(notices.wait, "READY=1")

    asyncio.run(tell())
    notices.close()


def test_without_a_service_manager_nothing_is_sent_and_an_absent_one_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def tell(environment: dict[str, str]) -> None:
        Supervisor(asyncio.get_running_loop(), environment).ready("up")

    asyncio.run(tell({}))
    assert caplog.text == ""
    asyncio.run(tell({"NOTIFY_SOCKET": "/does/not/exist"}))
    assert "cannot tell the service manager READY=1: No such file or directory" in caplog.text


STUBBORN = """
import select, sys
from headrace.server import process
from headrace.settings.values import load

class Server:
    async def start(self):
        pass

    async def stop(self):
        select.poll().poll(60_000)  # as a disk that does not answer

    def listening(self):
        return ["kafka=nowhere"]

    described = listening

sys.exit(process.run(load(None, {}), lambda loop, failed: Server()))
"""


class Said:
    """A process whose standard error is waited for."""

    def __init__(self, errors: Path, *command: str, stdin: int = subprocess.DEVNULL) -> None:
        self.errors = errors
        with errors.open("wb") as target:
            self.process = subprocess.Popen(
                [*DIES_WITH_PARENT, *command], stdin=stdin, stdout=subprocess.DEVNULL, stderr=target
            )

    def wait(self, text: str) -> None:
        wait_for(f"{text!r} on standard error", lambda: text in self.errors.read_text() or self.process.poll())
        assert text in self.errors.read_text()

    def end(self) -> int:
        return self.process.wait(DEADLINE_S)


@proves("U6")
def test_a_second_interrupt_ends_a_stop_that_hangs_and_a_hangup_is_passed_over(tmp_path: Path) -> None:
    server = Said(tmp_path / "stderr", "setsid", sys.executable, "-c", STUBBORN)
    server.wait("headrace")
    os.kill(server.process.pid, signal.SIGHUP)
    server.wait("SIGHUP is passed over: settings are read at the start")
    os.kill(server.process.pid, signal.SIGTERM)
    server.wait("stopping: SIGTERM")
    os.kill(server.process.pid, signal.SIGINT)
    server.wait("not stopped cleanly: interrupted again; the next start looks through what was open")
    assert server.end() == 130


@proves("U6")
def test_a_broker_whose_terminal_is_gone_stops_in_order(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = ("setsid", "--ctty", str(PROGRAM), "serve", "--data", str(tmp_path / "data"))
    ports = ("--listen", "127.0.0.1:0", "--http", "off")
    broker = Said(tmp_path / "stderr", *command, *ports, stdin=theirs)
    os.close(theirs)
    broker.wait("server.process: headrace")
    os.close(ours)
    broker.wait("stopping: SIGHUP")
    broker.wait("stopped cleanly: 0 partitions closed")
    assert broker.end() == 0


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def container() -> tuple[str, ...]:
    """What runs a command as process 1 of a namespace of its own."""
    tried = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no namespace of processes to be had here: {tried.stderr.strip()}")
    return CONTAINER


@proves("U6")
def test_the_first_process_of_a_container_reaps_orphans_and_stops_in_order(
    fresh_broker: Callable[..., Broker], container: tuple[str, ...]
) -> None:
    broker = fresh_broker(prefix=container, settings={"http.listen": "off"})
    assert broker.pid == 1
    assert broker.process is not None
    (first,) = children(broker.process.pid)
    own = children(first)
    enter = ("nsenter", "--target", str(first), "--user", "--pid", "--preserve-credentials")
    subprocess.run([*enter, "sh", "-c", "(sleep 0.2 & sleep 0.3 &)"], check=True, timeout=DEADLINE_S)
    wait_for("the orphans to be gone, and the process that syncs alone to be left", lambda: children(first) == own)
    os.kill(first, signal.SIGTERM)
    assert broker.process.wait(DEADLINE_S) == 0
    assert "stopped cleanly" in broker.stderr()


@proves("U6")
def test_a_signal_before_the_loop_runs_ends_the_first_process_of_a_container(
    tmp_path: Path, container: tuple[str, ...]
) -> None:
    script = (
        "import select, sys; from headrace.server import first_process; first_process.take_signals();"
        "print('begun', file=sys.stderr, flush=True); select.poll().poll(60_000)"
    )
    begun = Said(tmp_path / "stderr", *container, sys.executable, "-c", script)
    begun.wait("begun")
    os.kill(children(begun.process.pid)[0], signal.SIGTERM)
    assert begun.end() == 128 + signal.SIGTERM
