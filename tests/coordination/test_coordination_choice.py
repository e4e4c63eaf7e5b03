from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.coordination.choice import etcd_addresses, on_etcd, open_coordination
from headrace.coordination.embedded import EmbeddedCoordination
from headrace.coordination.etcd import EtcdCoordination
from headrace.errors import OperatorError, SettingError
from headrace.ports.coordination import Coordination
from headrace.settings.values import load
from headrace.virtual.clock import VirtualClock


def opened(folder: Path, **flags: object) -> Coordination:
    async def body() -> Coordination:
        settings = load(environment={}, flags={name.replace("_", "."): value for name, value in flags.items()})
        coordination = open_coordination(settings, str(folder), VirtualClock())
        await coordination.close()
        return coordination

    return asyncio.run(body())


def test_a_broker_is_alone_unless_etcd_is_named(tmp_path: Path) -> None:
    assert isinstance(opened(tmp_path), EmbeddedCoordination)
    assert (tmp_path / "coordination.sqlite").exists()
    assert isinstance(opened(tmp_path, coordination="etcd://127.0.0.1:1,[::1]:2"), EtcdCoordination)
    assert not on_etcd(load(environment={}))
    assert etcd_addresses("etcd://a:1, b:2") == ("a:1", "b:2")


@pytest.mark.parametrize("given", ["etcd", "etcd://", "etcd://host", "etcd://host:0", "etcd://a:1,,b:2", "http://a:1"])
def test_an_address_that_is_none_is_refused_by_name(given: str) -> None:
    with pytest.raises(SettingError, match=r"setting coordination: .* etcd://host:port"):
        etcd_addresses(given)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"etcd_tls_ca": "/none.pem"}, r"setting etcd\.tls\.ca: /none\.pem cannot be read: No such file"),
        ({"etcd_tls_cert": "/none.pem"}, r"without etcd\.tls\.ca"),
        ({"etcd_tls_ca": "/dev/null", "etcd_tls_key": "/dev/null"}, "go together"),
    ],
)
def test_tls_that_is_not_whole_is_refused_by_name(tmp_path: Path, flags: dict[str, str], says: str) -> None:
    with pytest.raises(OperatorError, match=says):
        opened(tmp_path, coordination="etcd://127.0.0.1:1", **flags)


def test_without_the_extra_an_operator_hears_what_to_install() -> None:
    """And nothing of gRPC is loaded before etcd is asked for."""
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from headrace.coordination.choice import open_coordination
from headrace.errors import OperatorError
from headrace.settings.values import load
from headrace.virtual.clock import VirtualClock
assert not any(name.partition(".")[0] in ("grpc", "aetcd", "google") for name in sys.modules)
sys.modules["aetcd"] = None
try:
    open_coordination(load(environment={{}}, flags={{"coordination": "etcd://127.0.0.1:1"}}), "/tmp", VirtualClock())
except OperatorError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "pip install 'headrace[etcd]'" in said.stdout
