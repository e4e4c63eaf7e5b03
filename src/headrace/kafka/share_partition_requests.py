"""Requests between brokers about share partitions: each is asked of the share coordinator here, and all are answered
together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headrace.kafka.connection import Request
from headrace.queues.messages import SharePartitionKey
from headrace.wire.message import Message

Ask = Callable[[SharePartitionKey, Message, Callable[[Message], None]], None]
"""Ask for one share partition, with what the request says of it; the callback hears its part of the answer, once."""


def answer_each(request: Request, ask: Ask) -> None:
    """Reply when every share partition of the request is answered, in the order in which they were asked for."""
    topics = request.body.topics
    left = 1 + sum(len(topic.partitions) for topic in topics)  # held until all are asked for
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
