"""InitializeShareGroupState, version 0: the coordinator of a share group says where a share partition begins, under a
state epoch that fences whatever was decided before. Offset -1: where the group's configuration says.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.kafka.connection import Request
from headrace.kafka.share_partition_requests import answer_each, result
from headrace.queues.messages import SharePartitionKey
from headrace.wire.message import Message


def handle(request: Request) -> None:
    states = request.services.share_states

    def ask(key: SharePartitionKey, asked: Message, answer: Callable[[Message], None]) -> None:
        states.initialize(key, asked.state_epoch, asked.start_offset, lambda code: answer(result(key, code)))

    answer_each(request, ask)
