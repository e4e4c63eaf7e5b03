"""CreatePartitions, versions 0 to 3. 2: flexible."""

from __future__ import annotations

from headrace.cluster.topics import EnlargeTopic
from headrace.errors import ErrorCode, HeadraceError
from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> None:
    request.reply_later(_enlarge(request))


async def _enlarge(request: Request) -> Message:
    return Message(throttle_time_ms=0, results=[await _one(request, topic) for topic in request.body.topics])


async def _one(request: Request, asked: Message) -> Message:
    assignments = None if asked.assignments is None else [added.broker_ids for added in asked.assignments]
    try:
        await request.services.topics.enlarge(
            EnlargeTopic(asked.name, asked.count, assignments), validate_only=request.body.validate_only
        )
    except HeadraceError as error:
        return Message(name=asked.name, error_code=error.kafka_code, error_message=str(error))
    return Message(name=asked.name, error_code=ErrorCode.NONE, error_message=None)
