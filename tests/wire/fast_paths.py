"""What the hand-written paths must answer for a message that the compiled codec has decoded."""

from __future__ import annotations

from headrace.wire import fetch, produce
from headrace.wire.message import Message


def produce_of(message: Message, version: int) -> produce.ProduceRequest:
    """The request that a decoded message stands for."""
    return produce.ProduceRequest(
        message.transactional_id,
        message.acks,
        message.timeout_ms,
        [
            (
                None if version >= 13 else topic.name,
                topic.topic_id if version >= 13 else None,
                [(p.index, p.records) for p in topic.partition_data],
            )
            for topic in message.topic_data
        ],
    )


def fetch_of(message: Message, version: int) -> fetch.FetchRequest:
    """The request that a decoded message stands for."""

    def key(topic: Message) -> tuple[str | None, bytes | None]:
        return (None, topic.topic_id) if version >= 13 else (topic.topic, None)

    def row(p: Message) -> fetch.RequestPartition:
        start = p.log_start_offset
        return (
            p.partition, p.current_leader_epoch, p.fetch_offset, p.last_fetched_epoch, start, p.partition_max_bytes
        )  # fmt: skip

    return fetch.FetchRequest(
        message.replica_state.replica_id if version >= 15 else message.replica_id,
        message.max_wait_ms,
        message.min_bytes,
        message.max_bytes,
        message.isolation_level,
        message.session_id,
        message.session_epoch,
        [(*key(topic), [row(p) for p in topic.partitions]) for topic in message.topics],
        [(*key(topic), topic.partitions) for topic in message.forgotten_topics_data],
        message.rack_id,
    )
