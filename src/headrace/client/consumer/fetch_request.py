"""A Fetch over many partitions, without a session: each question names all that it asks for.

Versions 4 to 18. With the epochs of KIP-320 the broker tells when it is not the leader that is meant, and when the log
was cut below what was read; with the rack of KIP-392 the leader names a follower to read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.client.admin.fetch import FetchLimits
from headrace.client.connection.metadata import Routes
from headrace.client.consumer.cursor import Feed
from headrace.wire.message import Message

_CONSUMER: Final = -1
_NO_SESSION_EPOCH: Final = -1
_NO_EPOCH: Final = -1


def fetch_request(feeds: Iterable[Feed], routes: Routes, limits: FetchLimits, rack: str) -> Message:
    topics: dict[str, Message] = {}
    most_bytes = limits.max_bytes
    for feed in feeds:
        known = routes.topic(feed.topic)
        is_known = known is not None and feed.partition < len(known.partitions)
        wanted = Message(
            partition=feed.partition,
            fetch_offset=feed.offset,
            current_leader_epoch=known.partitions[feed.partition].leader_epoch if known and is_known else _NO_EPOCH,
            last_fetched_epoch=feed.epoch,
            partition_max_bytes=feed.most_bytes,
        )
        topic = topics.get(feed.topic)
        if topic is None:
            topic = topics[feed.topic] = Message(topic=feed.topic, topic_id=feed.topic_id, partitions=[])
        topic.partitions.append(wanted)
        most_bytes = max(most_bytes, feed.most_bytes)
    return Message(
        replica_id=_CONSUMER,
        max_wait_ms=limits.max_wait_ms,
        min_bytes=limits.min_bytes,
        max_bytes=most_bytes,
        session_epoch=_NO_SESSION_EPOCH,
        rack_id=rack,
        topics=list(topics.values()),
    )
