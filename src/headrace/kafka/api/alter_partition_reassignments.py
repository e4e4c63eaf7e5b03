"""AlterPartitionReassignments, versions 0 to 1. 1: a change of the number of replicas can be declined (KIP-455).

Answered when the order stands in the partitions' keys; the data follows. A partition without brokers: its move ends.
"""

from __future__ import annotations

from typing import Final

from headrace.cluster.orders import Refusals, Targets, plan_moves
from headrace.coordination.waits import at_once
from headrace.errors import ErrorCode, HeadraceError, InvalidRequest
from headrace.kafka.connection import Request
from headrace.placement.plans import Where
from headrace.wire.message import Message

COUNT_DECLINED_FROM: Final = 1
ON_LOOP_MAX: Final = 100
"""Orders that are planned where they arrive; more of them in a thread."""


def handle(request: Request) -> None:
    request.reply_later(_alter(request))


async def _alter(request: Request) -> Message:
    body = request.body
    targets: Targets = {
        (topic.name, asked.partition_index): asked.replicas for topic in body.topics for asked in topic.partitions
    }
    keep_count = request.version >= COUNT_DECLINED_FROM and not body.allow_replication_factor_change
    refusals: Refusals = {}
    code, reason = ErrorCode.NONE, None
    try:
        if len(targets) != sum(len(topic.partitions) for topic in body.topics):
            raise InvalidRequest("a partition is named twice in one request")
        await request.services.changes.run(
            lambda image: plan_moves(image, targets, keep_count=keep_count, refusals=refusals),
            request.services.compute if len(targets) > ON_LOOP_MAX else at_once,
        )
    except HeadraceError as error:
        code, reason = error.kafka_code, str(error)
        refusals = dict.fromkeys(targets, error)
    topics = [
        Message(
            name=topic.name,
            partitions=[_row(refusals, (topic.name, asked.partition_index)) for asked in topic.partitions],
        )
        for topic in body.topics
    ]
    return Message(
        throttle_time_ms=0,
        allow_replication_factor_change=not keep_count,
        error_code=code,
        error_message=reason,
        responses=topics,
    )


def _row(refusals: Refusals, where: Where) -> Message:
    error = refusals.get(where)
    code, reason = (ErrorCode.NONE, None) if error is None else (error.kafka_code, str(error))
    return Message(partition_index=where[1], error_code=code, error_message=reason)
