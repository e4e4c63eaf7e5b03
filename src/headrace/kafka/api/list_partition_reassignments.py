"""ListPartitionReassignments, version 0: the moves under way, of the partitions asked for or of all (KIP-455)."""

from __future__ import annotations

from headrace.cluster.image import PartitionState
from headrace.errors import ErrorCode
from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> Message:
    known, asked = request.services.view.image.topics, request.body.topics
    wanted = None if asked is None else {(topic.name, index) for topic in asked for index in topic.partition_indexes}
    topics = []
    for name, topic in known.items():
        moving = [state for state in topic.partitions if state.target]
        rows = [_row(state) for state in moving if wanted is None or (name, state.index) in wanted]
        if rows:
            topics.append(Message(name=name, partitions=rows))
    return Message(throttle_time_ms=0, error_code=ErrorCode.NONE, error_message=None, topics=topics)


def _row(state: PartitionState) -> Message:
    return Message(
        partition_index=state.index,
        replicas=list(state.replicas),
        adding_replicas=list(state.adding),
        removing_replicas=[broker for broker in state.replicas if broker not in state.target],
    )
