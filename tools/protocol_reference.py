"""docs/PROTOCOL.md: the APIs of Kafka that are served, and why others are not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kio.schema.index import api_key_map

from headrace.wire.api import HEADRACE_APIS, KAFKA_APIS, NEVER_FLEXIBLE, Api

HEAD = """# Kafka's protocol

Generated from `src/headrace/wire/api.py` by `make reference`; do not edit.

A broker serves these APIs of Kafka in these versions, and tells clients so in ApiVersions; so does a registry, which
leads no partition and sends its callers to the broker that does. Flexible versions have short lengths and tagged fields
(KIP-482). Of a request in any other version, or of any other API, the connection is closed; only ApiVersions answers
every version (KIP-511).
"""
PRODUCE_NOTE = """
Produce is served from version 3 on and told as from 0: with a higher minimum kcat sends its batches uncompressed,
whatever it was asked for.
"""
OWN_HEAD = """
## Headrace's own

Named in ApiVersions to our own client only. Their fields are in `src/headrace/wire/own_schema.py`.
"""
OTHERS_HEAD = """
## Not served

*Planned* is what is missing yet. *Not meant* is what another part does here: etcd and the controller
instead of KRaft's voters, one folder a broker, metrics on the HTTP port; or what nobody has asked for.
"""

PLANNED: Final = {
    "sasl_handshake": "authentication",
    "sasl_authenticate": "authentication",
    "describe_user_scram_credentials": "authentication",
    "alter_user_scram_credentials": "authentication",
    "describe_acls": "ACLs",
    "create_acls": "ACLs",
    "delete_acls": "ACLs",
    "describe_client_quotas": "quotas",
    "alter_client_quotas": "quotas",
}
NOT_MEANT: Final = {
    "create_delegation_token": "delegation tokens",
    "renew_delegation_token": "delegation tokens",
    "expire_delegation_token": "delegation tokens",
    "describe_delegation_token": "delegation tokens",
    "vote": "KRaft",
    "begin_quorum_epoch": "KRaft",
    "end_quorum_epoch": "KRaft",
    "alter_partition": "KRaft",
    "update_features": "KRaft",
    "envelope": "KRaft",
    "fetch_snapshot": "KRaft",
    "broker_registration": "KRaft",
    "broker_heartbeat": "KRaft",
    "unregister_broker": "KRaft",
    "allocate_producer_ids": "KRaft",
    "controller_registration": "KRaft",
    "add_raft_voter": "KRaft",
    "remove_raft_voter": "KRaft",
    "update_raft_voter": "KRaft",
    "assign_replicas_to_dirs": "many folders",
    "get_telemetry_subscriptions": "telemetry",
    "push_telemetry": "telemetry",
    "streams_group_heartbeat": "streams groups",
    "streams_group_describe": "streams groups",
}


def served(apis: Iterable[Api]) -> str:
    rows = ["| API | key | versions | flexible from |", "|---|---|---|---|"]
    for api in apis:
        versions = f"{api.min_version} to {api.max_version}" if api.max_version > api.min_version else api.min_version
        flexible = "" if api.flexible_from == NEVER_FLEXIBLE else api.flexible_from
        rows.append(f"| {api.name} | {api.key} | {versions} | {flexible} |")
    return "\n".join(rows) + "\n"


def others() -> str:
    """Every API that the schemas know and nobody serves; one that stands in neither table is a KeyError."""
    rows = ["| API | key | why | of |", "|---|---|---|---|"]
    for key, name in sorted(api_key_map.items()):
        if key not in KAFKA_APIS:
            why = "planned" if name in PLANNED else "not meant"
            rows.append(f"| {name.title().replace('_', '')} | {key} | {why} | {(PLANNED | NOT_MEANT)[name]} |")
    return "\n".join(rows) + "\n"


def reference() -> str:
    return (
        f"{HEAD}\n{served(KAFKA_APIS.values())}{PRODUCE_NOTE}{OWN_HEAD}\n{served(HEADRACE_APIS.values())}"
        f"{OTHERS_HEAD}\n{others()}"
    )
