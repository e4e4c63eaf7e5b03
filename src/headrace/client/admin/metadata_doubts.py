"""Cluster metadata that was restored from an older copy: what brokers say of it, and accepting it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.client.admin.cluster import Cluster
from headrace.client.errors import check
from headrace.wire import api as apis
from headrace.wire.message import Message


@dataclass(frozen=True, slots=True)
class MetadataDifference:
    kind: str
    """vanished: no key has the partition any more; elsewhere: its key has it on other brokers; epoch: its key is older
    than the log."""
    topic: str
    partition: int
    topic_id: bytes
    detail: str


@dataclass(frozen=True, slots=True)
class MetadataDoubt:
    """What one broker knows that the metadata does not."""

    broker_id: int
    seen_revision: int
    found_revision: int
    at_ms: int
    difference_count: int
    differences: tuple[MetadataDifference, ...]
    """The first of them."""


def metadata_doubts(cluster: Cluster, *, accept: bool = False) -> list[MetadataDoubt]:
    """By broker; empty if nobody doubts the metadata. With `accept` it holds from now on as it is."""

    def ask() -> list[MetadataDoubt]:
        answer = cluster.ask(apis.ACCEPT_METADATA, Message(dry_run=not accept))
        check(answer.error_code, "accept the metadata", answer.error_message)
        return [
            MetadataDoubt(
                row.broker_id,
                row.seen_revision,
                row.found_revision,
                row.at_ms,
                row.difference_count,
                tuple(
                    MetadataDifference(each.kind, each.topic, each.partition_index, each.topic_id, each.detail)
                    for each in row.differences
                ),
            )
            for row in sorted(answer.doubts, key=lambda row: int(row.broker_id))
        ]

    return cluster.retry(ask)
