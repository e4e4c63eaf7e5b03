"""Registries as processes of their own, beside the brokers of a cluster.

    registry = Registry(tmp_path / "r1", cluster.etcd.uri).start()
    registry.bootstrap, registry.http                 # as of a broker; kept over kill() and start()

A registry has no data folder; the one named here only gives the name of the file that its standard error goes to.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from brokers import DIES_WITH_PARENT, Broker

ASK_TIMEOUT_S = 20.0


class Registry(Broker):
    """`Broker` starts, kills and restarts it; only the command differs."""

    def __init__(self, name: Path, etcd: str, listen: str = "127.0.0.1:0", **settings: object) -> None:
        named = {key.replace("_", "."): value for key, value in settings.items()}
        super().__init__(name, {"coordination": etcd, **named}, listen=[listen])

    def command(self) -> list[str]:
        command = [*DIES_WITH_PARENT, str(Path(sys.executable).parent / "headrace"), "registry"]
        for address in self.listen:
            command += ["--listen", address]
        command += ["--http", self.http_listen]
        for setting, value in self.settings.items():
            command += ["--set", f"{setting}={value}"]
        return command

    def ask(self, path: str, method: str = "GET", body: str | None = None) -> Any:
        """The JSON answer; of an error, too."""
        data = None if body is None else body.encode()
        request = urllib.request.Request(self.http + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return {"status": error.code, **json.load(error)}


def begin(registry: Registry) -> subprocess.Popen[str]:
    """One that is not expected to become ready; what it says is to be read."""
    return subprocess.Popen(registry.command(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
