"""A broker for the tests of a program: a process of its own, in a temporary folder, on free ports of this machine.

    with TemporaryBroker() as broker:
        Producer(broker.bootstrap).send(broker.new_topic("orders"), "two shirts")

It ends with the `with` block, and at the latest with the process that started it: the broker's standard input is a pipe
from there, and when that is closed, by whatever end, the broker kills itself. Nothing of it is left behind.
The fixtures of `headrace.testing.pytest_plugin` are made of it.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from headrace.errors import OperatorError

START_S: Final = 60.0
STOP_S: Final = 30.0
SHOWN_BYTES: Final = 4000
QUICK: Final = {"group.initial.rebalance.delay.ms": 0}
"""An empty group waits 3 s for more members by default, which no test wants to."""


class TemporaryBroker:
    """A broker that starts with the `with` block, or `start`, and ends with it, or `stop`.

    settings: as in `headrace serve --set name=value`; see docs/SETTINGS.md.
    """

    def __init__(self, settings: Mapping[str, object] | None = None) -> None:
        self.settings = {**QUICK, **(settings or {})}
        self.addresses: dict[str, str] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def bootstrap(self) -> str:
        """`host:port` for Kafka clients and for ours."""
        return self.addresses["kafka"]

    @property
    def http(self) -> str:
        """The address of its HTTP interface and console, with `http://`."""
        return f"http://{self.addresses['http']}"

    @property
    def log(self) -> str:
        """The end of what the broker has logged."""
        return self._errors.read_bytes()[-SHOWN_BYTES:].decode(errors="replace")

    def new_topic(self, prefix: str = "topic") -> str:
        """A name that no other test has used. The topic is made when it is first written to."""
        return f"{prefix}-{uuid.uuid4().hex[:12]}"

    def start(self) -> Self:
        """Returns when the broker answers."""
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True)
        flags = ["--data", f"{self._folder.name}/data", "--listen", "127.0.0.1:0", "--set", "http.listen=127.0.0.1:0"]
        for name, value in self.settings.items():
            flags += ["--set", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
        # What is set in the environment is meant for the broker that the program runs against.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.testing", "serve", *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
        try:
            self._await_ready(self._process)
        except BaseException:
            self._process.kill()
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Let the broker end, and remove its folder. Again is harmless."""
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        if process is not None:
            with process:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        if folder is not None:
            folder.cleanup()

    @property
    def _errors(self) -> Path:
        assert self._folder is not None, "this broker does not run"
        return Path(self._folder.name, "log")

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the line with which a broker says where it listens."""
        assert process.stdout is not None
        deadline, seen = time.monotonic() + START_S, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while (left_s := deadline - time.monotonic()) > 0:
                if not selector.select(left_s):
                    continue
                read = os.read(process.stdout.fileno(), 65536)
                seen += read
                for line in seen[: seen.rfind(b"\n") + 1].decode().splitlines():
                    if line.startswith("ready "):
                        self.addresses = dict(part.split("=", 1) for part in line.split()[1:])
                        return
                if not read:
                    break
        raise OperatorError(f"the broker for tests did not start: {self.log.strip() or f'no word in {START_S:g} s'}")
