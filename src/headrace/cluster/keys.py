"""The keys of a cluster in coordination, below `/headrace/<cluster>/`. All values are JSON.

brokers/<id>              {"listeners": {name: [host, port]}, "http": [host, port] | null, "replication": same, "rack",
                              "incarnation", "previous": {"incarnation", "boot", "clean", "lost"} | null, "boot",
                              "state": "live" | "leaving", "started_ms"}; gone with its lease
election/<lease>          {"broker"}: who wants to be controller, in order of create_revision; gone with its lease
controller                {"broker", "epoch"}: the last one elected; each election raises the epoch
topics/<name>             {"id": hex, "partitions": count, "overrides": {name: text}, "internal": bool, "state": "live"}
partitions/<topic>/<n>    {"id": hex of the topic, "leader", "leader_epoch", "isr": [ids], "replicas": [ids],
                              "incarnations": {id: incarnation} of isr, "controller": epoch of its last writer,
                              "lost": [epoch, from, to] | null}; while replicas move also "target": [ids] and
                              "adding": [ids]; if one was elected that had not heard of a deletion "least_start"
ends/<topic>/<n>/<id>     {"id": hex of the topic, "incarnation", "last_epoch", "start", "end", "watermark"}: what a
                              replica holds while its partition has no leader; gone with its broker's lease
orders/<topic>/<n>        {"kind": "preferred" | "unclean"}: an election that an operator asks for; or {"kind":
                              "resign", "broker"}, by a leader whose log is offline
deleted/<topic id>        {"topic", "brokers": [ids], "at_ms"}: a topic that was deleted, written with the deletion of
                              its keys; logs are deleted because of it alone. Each of the brokers that had a replica
                              takes itself off when its logs are gone; the last one deletes the key
lineage                   {"number", "id"}: which history of these keys this is; rises when an operator accepts restored
                              ones
doubts/<broker>           {"lineage", "seen", "found", "at_ms", "count", "differences"}: this broker has seen a later
                              history; nothing is changed until an operator has accepted the one that is there
draining/<broker>         {}: the broker takes no new replicas, and those that it has are moved away
config/cluster            {name: text}
config/brokers/<id>       {name: text}
config/groups/<group>     {name: text}; the group's name percent-encoded
values/<name>             {"value": text}: a cluster-wide setting that users keep here; brokers do not heed it
producer_ids              {"next": first id not given out}
"""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import quote

from headrace.errors import CoordinationError

ROOT: Final = "/headrace/"
CLUSTER_ID: Final = ROOT + "cluster_id"


def cluster_prefix(cluster_id: str) -> str:
    return f"{ROOT}{cluster_id}/"


def broker_key(prefix: str, broker: int) -> str:
    return f"{prefix}brokers/{broker}"


def controller_key(prefix: str) -> str:
    return f"{prefix}controller"


def election_key(prefix: str, lease: int) -> str:
    return f"{prefix}election/{lease}"


def ends_prefix(prefix: str, topic: str, partition: int) -> str:
    return f"{prefix}ends/{topic}/{partition}/"


def ends_key(prefix: str, topic: str, partition: int, broker: int) -> str:
    return f"{prefix}ends/{topic}/{partition}/{broker}"


def order_key(prefix: str, topic: str, partition: int) -> str:
    return f"{prefix}orders/{topic}/{partition}"


def draining_key(prefix: str, broker: int) -> str:
    return f"{prefix}draining/{broker}"


def topic_key(prefix: str, topic: str) -> str:
    return f"{prefix}topics/{topic}"


def prefixes_of(prefix: str, topic: str) -> list[str]:
    """Where the keys of a topic's partitions are."""
    return [f"{prefix}{kind}/{topic}/" for kind in ("partitions", "ends", "orders")]


def deleted_key(prefix: str, topic_id: bytes) -> str:
    return f"{prefix}deleted/{topic_id.hex()}"


def lineage_key(prefix: str) -> str:
    return f"{prefix}lineage"


def doubts_prefix(prefix: str) -> str:
    return f"{prefix}doubts/"


def doubt_key(prefix: str, broker: int) -> str:
    return f"{prefix}doubts/{broker}"


def partition_key(prefix: str, topic: str, partition: int) -> str:
    return f"{prefix}partitions/{topic}/{partition}"


def cluster_config_key(prefix: str) -> str:
    return f"{prefix}config/cluster"


def broker_config_key(prefix: str, broker: int) -> str:
    return f"{prefix}config/brokers/{broker}"


def group_config_key(prefix: str, group: str) -> str:
    return f"{prefix}config/groups/{quote(group, safe='')}"


def value_key(prefix: str, name: str) -> str:
    return f"{prefix}values/{name}"


def producer_ids_key(prefix: str) -> str:
    return f"{prefix}producer_ids"


_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))


def encode(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


def decode(key: str, value: bytes) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        raise CoordinationError(f"key {key} does not hold JSON: restore it, or delete it and what it names") from None
