"""WriteShareGroupState, versions 0 to 1: the leader of a partition has kept what a share group has done there since its
last write. 1: how many offsets are done with, which is counted here anyway. Between our brokers tagged fields say which
load of the share partition writes, and who has acquired what until when.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import ErrorCode
from headrace.kafka.connection import Request
from headrace.kafka.share_partition_requests import answer_each, result
from headrace.queues.messages import SharePartitionKey, ShareState
from headrace.queues.persister import read_batch
from headrace.wire.message import Message


def handle(request: Request) -> None:
    states = request.services.share_states

    def ask(key: SharePartitionKey, asked: Message, answer: Callable[[Message], None]) -> None:
        try:
            batches = tuple([read_batch(batch) for batch in asked.state_batches])
        except ValueError:  # a state that there is not
            answer(result(key, ErrorCode.INVALID_REQUEST))
            return
        changed = ShareState(asked.state_epoch, asked.leader_epoch, asked.start_offset, batches)
        states.write(key, changed, asked.load_id, lambda code: answer(result(key, code)))

    answer_each(request, ask)
