"""Reading (topic, partition, offset, count): a few records by their offsets, without a consumer."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

from headrace.client.admin import fetch
from headrace.client.admin.cluster import Cluster
from headrace.records.consumer_records import ReceivedRecord, receive


def read(
    bootstrap: str | Iterable[str],
    topic: str,
    partition: int,
    offset: int,
    count: int,
    *,
    timeout_ms: int = 30_000,
    tls: ssl.SSLContext | None = None,
) -> list[ReceivedRecord]:
    """The records with offsets from `offset` up to but not `offset + count`; fewer where the log ends before.

    Offsets that compaction has removed count as read. An offset outside the log is an error that says so.
    """
    with Cluster(bootstrap, timeout_ms=timeout_ms, tls=tls) as cluster:
        found = fetch.read(cluster, topic, partition, offset, count)
    records: list[ReceivedRecord] = []
    for _, batch in found.batches:
        receive(batch, topic, partition, offset, offset + count, records)
    return records
