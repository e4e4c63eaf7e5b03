"""DeleteShareGroupState, version 0: nothing is kept of these share partitions any more."""

from __future__ import annotations

from collections.abc import Callable

from headrace.kafka.connection import Request
from headrace.kafka.share_partition_requests import answer_each, result
from headrace.queues.messages import SharePartitionKey
from headrace.wire.message import Message


def handle(request: Request) -> None:
    states = request.services.share_states

    def ask(key: SharePartitionKey, _asked: Message, answer: Callable[[Message], None]) -> None:
        states.delete(key, lambda code: answer(result(key, code)))

    answer_each(request, ask)
