"""The ports that the settings name: free, or held by whom; and how the cluster of the broker that runs here is."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from headrace.cli import health
from headrace.cli.checkup.finding import Finding, fail, ok, warn
from headrace.client.admin.cluster import Cluster, Retry
from headrace.coordination.choice import on_etcd
from headrace.errors import HeadraceError
from headrace.kafka import listeners
from headrace.kafka.listeners import EVERYWHERE
from headrace.ports.network import Address
from headrace.settings.values import BrokerSettings

ANSWER_MS: Final = 3000
LISTENING: Final = "0A"
SHOWN_MAX: Final = 3


def look(settings: BrokerSettings, broker: int | None) -> Iterator[Finding]:
    """`broker` is the process of the broker that runs on the data folder."""
    for spec in listeners.parse(settings["listen"], settings["advertise"]):
        yield _port(f"port {spec.name}", spec.address, "--listen", broker, speaks_kafka=not spec.tls)
    if settings["http.listen"] != "off":
        yield _port("port http", listeners.parse_address(settings["http.listen"], "http.listen"), "--http", broker)
    listen, _ = listeners.replication(settings, clustered=on_etcd(settings))
    if listen is not None:
        yield _port("port replication", listen, "--set replication.listen=HOST:PORT", broker)


def _port(what: str, address: Address, option: str, broker: int | None, *, speaks_kafka: bool = False) -> Finding:
    if not address.port:
        return ok(what, f"{address}: any that is free")
    error = _cannot_bind(address)
    if error is None:
        return ok(what, f"{address} is free")
    if error.errno != errno.EADDRINUSE:
        advice = f"choose an address of this machine, and a port that {_whose()} may have, with {option}"
        return fail(what, f"{address} cannot be had: {error.strerror or error}", advice)
    holder = _holder(address.port)
    if broker is not None and holder in (broker, None):
        return ok(what, f"{address} is held by the broker of this data folder, process {broker}")
    name = "somebody whom this user may not see" if holder is None else f"process {holder} ({_name(holder)})"
    answers = _kafka_answer(address) if speaks_kafka else ""
    return fail(what, f"{address} is held by {name}{answers}", f"stop it, or choose another with {option}")


def _cannot_bind(address: Address) -> OSError | None:
    """As the broker would, but nobody is listened to."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            return error
    return None


def _whose() -> str:
    return f"user {os.geteuid()}"


def _holder(port: int) -> int | None:
    """The process that listens on the port, as far as this user may see it."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and _holds(process, inodes):
            return int(process.name)
    return None


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        return any(os.readlink(file) in inodes for file in (process / "fd").iterdir())
    except OSError:  # another user's, or gone by now
        return False


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone by now"


def _client(address: Address) -> Cluster:
    host = "127.0.0.1" if address.host in EVERYWHERE else address.host
    return Cluster(str(Address(host, address.port)), timeout_ms=ANSWER_MS, retry=Retry(within_ms=ANSWER_MS))


def _kafka_answer(address: Address) -> str:
    try:
        with _client(address) as client:
            found = client.topology()
    except HeadraceError:
        return ", which does not speak Kafka's protocol"
    return f", which answers for cluster {found.cluster_id} with brokers {', '.join(map(str, sorted(found.brokers)))}"


def look_at_cluster(settings: BrokerSettings) -> Iterator[Finding]:
    """What the broker that runs here, and its cluster, say of themselves; its TLS listeners are not asked."""
    specs = listeners.parse(settings["listen"], settings["advertise"])
    plain = next((spec.address for spec in specs if not spec.tls and spec.address.port), None)
    if plain is None:
        return
    try:
        with _client(plain) as client:
            found = health.ask(client)
    except HeadraceError as error:
        yield fail("cluster", f"the broker that runs here does not answer: {error}", "look into its log")
        return
    what, more = "cluster", "`headrace cluster status` lists all"
    if found.controller is None:
        yield fail(what, f"cluster {found.cluster_id} has no controller", "look at coordination and the brokers' logs")
    if found.leaderless:
        yield fail(what, f"without a leader: {_some(found.leaderless)}", f"start the brokers that are away; {more}")
    if found.in_doubt:
        yield fail(what, f"the metadata is in doubt: {_some(found.in_doubt)}", "decide which copy of it is right")
    if found.behind:
        yield warn(what, f"under-replicated: {_some(found.behind)}", f"start the brokers that are away; {more}")
    if found.is_whole:
        brokers = f"{len(found.brokers)} broker{'s' * (len(found.brokers) != 1)}"
        yield ok(what, f"cluster {found.cluster_id}: {brokers}, {found.partition_count} partitions, all in sync")


def _some(places: list[str]) -> str:
    return "; ".join(places[:SHOWN_MAX]) + (f" and {len(places) - SHOWN_MAX} more" if places[SHOWN_MAX:] else "")
