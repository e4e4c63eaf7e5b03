"""What the settings allow to be lost, or let strangers do."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Final

from headrace.cli.checkup.finding import Finding, ok, warn
from headrace.coordination.choice import etcd_addresses, on_etcd
from headrace.kafka import listeners
from headrace.kafka.listeners import EVERYWHERE
from headrace.ports.network import Address
from headrace.settings.values import BrokerSettings, log_settings

WHAT: Final = "setting"


def look(settings: BrokerSettings) -> Iterator[Finding]:
    found = [*_losses(settings), *_strangers(settings)]
    if on_etcd(settings):
        found += _cluster(settings)
    yield from found or [ok(WHAT, "nothing in the settings is known to be unsafe")]


def _losses(settings: BrokerSettings) -> Iterator[Finding]:
    topics, factor = log_settings(settings.topic_defaults()), settings["default.replication.factor"]
    if topics.durability == "memory":
        yield warn(
            WHAT,
            "log.durability is memory: a crash of the machine loses what the kernel has not written by itself",
            "set log.durability=disk, or durability=disk for the topics that matter",
        )
    elif topics.durability == "os" and factor == 1:
        yield warn(
            WHAT,
            f"log.durability is os with one replica: a crash of the machine loses up to {topics.flush_ms} ms of "
            "acknowledged records",
            "set durability=disk for the topics that matter, or have them replicated; nothing, if that may be lost",
        )
    least = topics.min_insync_replicas
    if factor >= 3 and least == 1:
        yield warn(
            WHAT,
            f"log.min.insync.replicas is 1 with {factor} replicas: one broker alone acknowledges, and its loss loses "
            "what the others had not copied",
            "set log.min.insync.replicas=0, a majority",
        )
    if 1 < factor <= least:
        yield warn(
            WHAT,
            f"log.min.insync.replicas is {least} with {factor} replicas: while one broker is away nothing is taken",
            "set log.min.insync.replicas=0, a majority, and have three replicas",
        )
    if settings.topic_defaults()["unclean.leader.election.enable"]:
        yield warn(
            WHAT,
            "log.unclean.leader.election.enable is on: a replica that lacks acknowledged records may lead",
            "set it to false, and for topics whose partitions are lost to true one by one",
        )
    if topics.delete and topics.retention_ms == topics.retention_bytes == -1:
        yield warn(
            WHAT,
            "log.retention.ms and log.retention.bytes are both -1: nothing is ever deleted, until the disk is full",
            "set one of them, or watch the disk",
        )


def _strangers(settings: BrokerSettings) -> Iterator[Finding]:
    """Who else can reach the ports: there are no passwords and no ACLs."""
    for spec in listeners.parse_unadvertised(settings["listen"], "listen"):
        if not spec.tls and not is_local(spec.address.host):
            yield warn(
                WHAT,
                f"listen: {spec.address} takes anyone who can reach it, and nothing is encrypted",
                f"keep it inside a network that you trust, or listen on tls://{spec.address} with tls.certificate",
            )
    http = settings["http.listen"]
    if http != "off" and not is_local((address := listeners.parse_address(http, "http.listen")).host):
        yield warn(
            WHAT,
            f"http.listen: whoever reaches {address} may write, read and delete topics",
            f"set http.listen=127.0.0.1:{address.port}, or keep it inside a network that you trust",
        )


def _cluster(settings: BrokerSettings) -> Iterator[Finding]:
    if settings["default.replication.factor"] == 1:
        yield warn(
            WHAT,
            "default.replication.factor is 1 in a cluster: a topic made without a number is gone with its broker",
            "set default.replication.factor=3",
        )
    if settings["offsets.topic.replication.factor"] == 1:
        yield warn(
            WHAT,
            "offsets.topic.replication.factor is 1: groups stop, and lose their offsets, with one broker",
            "set it to 0 or 3",
        )
    if all(is_local(address.rpartition(":")[0]) for address in etcd_addresses(settings["coordination"])):
        return  # a cluster on one machine: the rest is of many
    yield from _unreachable(settings)
    if not settings["etcd.tls.ca"]:
        yield warn(
            WHAT,
            "etcd is spoken to without TLS: who can read or change what passes has the cluster",
            "set etcd.tls.ca, etcd.tls.cert and etcd.tls.key, or keep it inside a network that you trust",
        )


def _unreachable(settings: BrokerSettings) -> Iterator[Finding]:
    """What clients and brokers on other machines are told, and cannot connect to."""
    for spec in listeners.parse(settings["listen"], settings["advertise"]):
        told = spec.advertised or spec.address
        if is_local(told.host):
            yield warn(
                WHAT,
                f"clients of listener {spec.name} are told {told}: on another machine that is not this broker",
                f"give --advertise {spec.name}=HOST:{told.port or 'PORT'} with a name of this machine",
            )
    listen, advertise = listeners.replication(settings, clustered=True)
    told_brokers: Address | None = advertise or listen
    if told_brokers is not None and is_local(told_brokers.host):
        yield warn(
            WHAT,
            f"other brokers are told {told_brokers} for replication: from another machine no replica follows",
            "set replication.listen=0.0.0.0:PORT and replication.advertise=HOST:PORT",
        )
    elif told_brokers is not None and not settings["replication.tls.ca"]:
        yield warn(
            WHAT,
            "the links between brokers are not encrypted, and take anyone who knows the cluster's name",
            "set replication.tls.ca, tls.certificate and tls.key, or keep them inside a network that you trust",
        )


def is_local(host: str) -> bool:
    """Whether only this machine is meant. A name that is not an address is taken for another's."""
    if host in EVERYWHERE:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
