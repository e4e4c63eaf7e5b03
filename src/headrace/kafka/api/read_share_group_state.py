"""ReadShareGroupState, version 0: the leader of a partition asks how far a share group has come there, and fences
whoever led it before. Between our brokers tagged fields say which load of the share partition this is, in which
leader epoch the state was last written, and who has acquired what until when.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import ErrorCode
from headrace.kafka.connection import Request
from headrace.kafka.share_partition_requests import answer_each, result
from headrace.queues.messages import SharePartitionKey, ShareState
from headrace.queues.persister import batch_row
from headrace.wire.message import Message


def handle(request: Request) -> None:
    states = request.services.share_states

    def ask(key: SharePartitionKey, asked: Message, answer: Callable[[Message], None]) -> None:
        def read(code: int, state: ShareState | None) -> None:
            answer(result(key, code) if state is None else _found(key, state))

        states.read(key, asked.leader_epoch, asked.load_id, read)

    answer_each(request, ask)


def _found(key: SharePartitionKey, state: ShareState) -> Message:
    return Message(
        partition=key.partition,
        error_code=ErrorCode.NONE,
        error_message=None,
        state_epoch=state.state_epoch,
        start_offset=state.start_offset,
        written_epoch=state.leader_epoch,
        state_batches=[batch_row(batch) for batch in state.batches],
    )
