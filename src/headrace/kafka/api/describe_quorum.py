"""DescribeQuorum, versions 0 to 2. 1: when replicas last fetched; 2: reasons, directory ids, nodes.

The metadata log of Kafka is coordination here. Its leader is told as the controller, in the epoch of its election; the
voters are the brokers that are alive, each of which can become it. Their end, and the watermark, is the revision of
this broker's image: that is what it has, and all there is to know of the others here.
"""

from __future__ import annotations

from typing import Final

from headrace.errors import ErrorCode
from headrace.kafka.connection import Request
from headrace.wire.message import ZERO_UUID, Message

METADATA_TOPIC: Final = "__cluster_metadata"
UNKNOWN_TIME: Final = -1


def handle(request: Request) -> Message:
    image = request.services.view.image
    topics = [
        Message(
            topic_name=topic.topic_name,
            partitions=[_partition(request, topic.topic_name, asked.partition_index) for asked in topic.partitions],
        )
        for topic in request.body.topics
    ]
    nodes = [
        Message(
            node_id=broker.id,
            listeners=[Message(name=name, host=at.host, port=at.port) for name, at in broker.listeners.items()],
        )
        for broker in image.brokers.values()
    ]
    return Message(error_code=ErrorCode.NONE, error_message=None, topics=topics, nodes=nodes)


def _partition(request: Request, topic: str, index: int) -> Message:
    image = request.services.view.image
    controller = image.controls.controller
    code, reason = ErrorCode.NONE, None
    if (topic, index) != (METADATA_TOPIC, 0):
        code, reason = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"only {METADATA_TOPIC}-0 has a quorum"
    elif image.controller_id() < 0 or controller is None:
        code, reason = ErrorCode.LEADER_NOT_AVAILABLE, "no broker is controller now"
    if code or controller is None:
        return Message(
            partition_index=index,
            error_code=code,
            error_message=reason,
            leader_id=-1,
            leader_epoch=-1,
            high_watermark=-1,
            current_voters=[],
            observers=[],
        )
    now_ms = request.services.clock.wall_ms()
    voters = [
        Message(
            replica_id=broker,
            replica_directory_id=ZERO_UUID,
            log_end_offset=image.revision,
            last_fetch_timestamp=now_ms if broker == controller.broker else UNKNOWN_TIME,
            last_caught_up_timestamp=now_ms if broker == controller.broker else UNKNOWN_TIME,
        )
        for broker in image.brokers
    ]
    return Message(
        partition_index=index,
        error_code=ErrorCode.NONE,
        error_message=None,
        leader_id=controller.broker,
        leader_epoch=controller.epoch,
        high_watermark=image.revision,
        current_voters=voters,
        observers=[],
    )
