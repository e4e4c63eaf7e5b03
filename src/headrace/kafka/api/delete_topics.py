"""DeleteTopics, versions 1 to 6. 4: flexible; 5: error messages; 6: topics by name or by id."""

from __future__ import annotations

from headrace.errors import ErrorCode, HeadraceError, UnknownTopicId
from headrace.kafka.connection import Request
from headrace.wire.message import ZERO_UUID, Message

BY_ID_FROM = 6


def handle(request: Request) -> None:
    request.reply_later(_delete(request))


async def _delete(request: Request) -> Message:
    if request.version >= BY_ID_FROM:
        asked = [(topic.name, topic.topic_id) for topic in request.body.topics]
    else:
        asked = [(name, ZERO_UUID) for name in request.body.topic_names]
    return Message(throttle_time_ms=0, responses=[await _one(request, name, topic_id) for name, topic_id in asked])


async def _one(request: Request, name: str | None, topic_id: bytes) -> Message:
    try:
        image = request.services.view.image
        if name is None:
            by_id = image.topics_by_id.get(topic_id)
            if by_id is None:
                raise UnknownTopicId(f"there is no topic with the id {topic_id.hex()}")
            name = by_id.name
        known = image.topics.get(name)
        topic_id = known.id if known is not None else topic_id
        await request.services.topics.delete(name)
    except HeadraceError as error:
        return Message(name=name, topic_id=topic_id, error_code=error.kafka_code, error_message=str(error))
    return Message(name=name, topic_id=topic_id, error_code=ErrorCode.NONE, error_message=None)
