"""DescribeProducers, version 0: what a partition knows of its producers, and where their open transactions begin.

Who looks for transactions that nobody ends compares this with what their coordinators know (KIP-664). Any replica
answers for its own log. A partition is told once, however often it is named: it may have very many.
"""

from __future__ import annotations

from headrace.errors import ErrorCode, HeadraceError
from headrace.kafka import leader_lookup
from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> Message:
    asked: dict[str, dict[int, None]] = {}
    for topic in request.body.topics:
        asked.setdefault(topic.name, {}).update(dict.fromkeys(topic.partition_indexes))
    topics = [
        Message(name=name, partitions=[_partition(request, name, index) for index in indexes])
        for name, indexes in asked.items()
    ]
    return Message(throttle_time_ms=0, topics=topics)


def _partition(request: Request, topic: str, index: int) -> Message:
    code, message, active = ErrorCode.NONE, None, list[Message]()
    try:
        partition = request.services.partitions.find_replica(topic, index)
        if partition is None:
            raise leader_lookup.not_led(request.services.view.image, topic, index)
        active = [
            Message(
                producer_id=producer_id,
                producer_epoch=state.epoch,
                last_sequence=state.batches[-1].last if state.batches else -1,
                last_timestamp=state.used_ms,
                coordinator_epoch=state.coordinator_epoch,
                current_txn_start_offset=state.txn_start,
            )
            for producer_id, state in partition.producers().items()
        ]
    except HeadraceError as error:
        code, message = error.kafka_code, str(error)
    return Message(partition_index=index, error_code=code, error_message=message, active_producers=active)
