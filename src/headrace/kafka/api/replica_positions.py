"""ReplicaPositions, version 0, Headrace's own: how far this broker's replicas have come. Fields: `wire.own_schema`.

Beside them stands what elections outside the in-sync set have cost the partitions that this broker leads.
"""

from __future__ import annotations

from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> Message:
    replicas = []
    lost = []
    for partition in request.services.partitions:
        where = partition.topic_partition
        replicas.append(
            Message(
                topic=where.topic,
                partition_index=where.partition,
                leading=partition.leading,
                leader_epoch=partition.epoch,
                log_start_offset=partition.log.start_offset,
                high_watermark=partition.high_watermark,
                end_offset=partition.log.end_offset,
            )
        )
        state = request.services.view.image.partition(where.topic, where.partition)
        if state is not None and state.lost is not None and partition.leading:
            lost.append(
                Message(
                    topic=where.topic,
                    partition_index=where.partition,
                    leader_epoch=state.lost.epoch,
                    first_offset=state.lost.start,
                    next_offset=state.lost.end,
                )
            )
    return Message(throttle_time_ms=0, replicas=replicas, lost=lost)
