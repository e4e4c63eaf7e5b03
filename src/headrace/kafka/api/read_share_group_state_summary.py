"""ReadShareGroupStateSummary, versions 0 to 1: how far a share group has come in a partition, without its batches. 1:
how many offsets from the start on are done with.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import ErrorCode
from headrace.kafka.connection import Request
from headrace.kafka.share_partition_requests import answer_each, result
from headrace.queues.messages import SharePartitionKey, ShareSummary
from headrace.wire.message import Message


def handle(request: Request) -> None:
    states = request.services.share_states

    def ask(key: SharePartitionKey, asked: Message, answer: Callable[[Message], None]) -> None:
        def read(code: int, summary: ShareSummary | None) -> None:
            answer(result(key, code) if summary is None else _found(key, summary))

        states.summary(key, asked.leader_epoch, read)

    answer_each(request, ask)


def _found(key: SharePartitionKey, summary: ShareSummary) -> Message:
    return Message(
        partition=key.partition,
        error_code=ErrorCode.NONE,
        error_message=None,
        state_epoch=summary.state_epoch,
        leader_epoch=summary.leader_epoch,
        start_offset=summary.start_offset,
        delivery_complete_count=summary.delivery_complete_count,
    )
