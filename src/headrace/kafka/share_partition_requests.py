"""Requests between brokers about share partitions: each is asked of the share coordinator here, and all are answered
together. A request with many more than our brokers put into one is refused as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from headrace.errors import ErrorCode
from headrace.kafka.connection import Request
from headrace.queues.messages import SharePartitionKey
from headrace.queues.persister import KEYS_PER_REQUEST
from headrace.wire.message import Message

KEYS_MAX: Final = 4 * KEYS_PER_REQUEST

Ask = Callable[[SharePartitionKey, Message, Callable[[Message], None]], None]
"""Ask for one share partition, with what the request says of it; the callback hears its part of the answer, once."""


def answer_each(request: Request, ask: Ask) -> None:
    """Reply when every share partition of the request is answered, in the order in which they were asked for."""
    topics = request.body.topics
    count = sum(len(topic.partitions) for topic in topics)
    left = 1 + count  # held until all are asked for
    results: list[list[Message | None]] = [[None] * len(topic.partitions) for topic in topics]

    def release() -> None:
        nonlocal left
        left -= 1
        if not left:
            request.reply(response(topics, results))

    def answered(topic: int, place: int, result: Message) -> None:
        results[topic][place] = result
        release()

    for number, topic in enumerate(topics):
        for place, asked in enumerate(topic.partitions):
            key = SharePartitionKey(request.body.group_id, topic.topic_id, asked.partition)
            if count > KEYS_MAX:
                answered(number, place, result(key, ErrorCode.INVALID_REQUEST))
            else:
                ask(key, asked, partial(answered, number, place))
    release()


def response(topics: list[Message], results: list[list[Message | None]]) -> Message:
    found = [
        Message(topic_id=topic.topic_id, partitions=answers)
        for topic, answers in zip(topics, results, strict=True)
    ]  # fmt: skip
    return Message(results=found)


def result(key: SharePartitionKey, code: int) -> Message:
    """The answer where there is nothing but the code to tell."""
    return Message(partition=key.partition, error_code=code, error_message=None)
