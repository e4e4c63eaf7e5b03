"""Which coordination a broker uses, by the setting `coordination`: its own file, or an etcd cluster."""

from __future__ import annotations

import os
from typing import Final

from headrace.coordination.embedded import EmbeddedCoordination
from headrace.errors import OperatorError, SettingError
from headrace.ports.clock import Clock
from headrace.ports.coordination import Coordination
from headrace.settings.values import BrokerSettings

EMBEDDED: Final = "embedded"
ETCD_SCHEME: Final = "etcd://"
FILE: Final = "coordination.sqlite"


def on_etcd(settings: BrokerSettings) -> bool:
    """Whether this broker is one of a cluster; SettingError when the setting is neither one nor the other."""
    return bool(etcd_addresses(settings["coordination"]))


def etcd_addresses(coordination: str) -> tuple[str, ...]:
    """The nodes in `etcd://host:port,host:port`; empty for `embedded`."""
    if coordination == EMBEDDED:
        return ()
    addresses = tuple(part.strip() for part in coordination.removeprefix(ETCD_SCHEME).split(","))
    if not coordination.startswith(ETCD_SCHEME) or not all(map(_is_address, addresses)):
        raise SettingError(
            f"setting coordination: {coordination!r} is neither {EMBEDDED} nor {ETCD_SCHEME}host:port,host:port"
        )
    return addresses


def open_coordination(settings: BrokerSettings, folder: str, clock: Clock) -> Coordination:
    """Of a broker. Call it on the running loop, after the broker has started its helper processes. etcd is first asked
    by the first call on what this answers.
    """
    if not on_etcd(settings):
        return EmbeddedCoordination(f"{folder}/{FILE}", clock)
    return open_etcd(settings, clock, str(settings["node.id"]), settings["node.id"])


def open_etcd(settings: BrokerSettings, clock: Clock, owner: str, first: int) -> Coordination:
    """`owner` names this client's receipts, so no two at work may have the same; `first` is the node asked first."""
    addresses = etcd_addresses(settings["coordination"])
    # gRPC has a log of its own on standard error; what of it matters to an operator is in our errors.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from headrace.coordination.etcd import EtcdCoordination
        from headrace.coordination.etcd_connection import EtcdAccess
    except ImportError as error:
        raise OperatorError(
            f"setting coordination names etcd, and its client is not installed ({error.name or error}): "
            "pip install 'headrace[etcd]'"
        ) from error
    access = EtcdAccess(
        addresses,
        settings["etcd.tls.ca"],
        settings["etcd.tls.cert"],
        settings["etcd.tls.key"],
        settings["etcd.user"],
        settings["etcd.password"].reveal(),
    )
    return EtcdCoordination(access, clock, owner, first)


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isdecimal() and 0 < int(port) < 1 << 16
