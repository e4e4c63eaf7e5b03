"""DeleteRecords, versions 0 to 2. 2: compact encoding. Offset -1 means everything that consumers can see."""

from __future__ import annotations

from headrace.errors import Code, HeadraceError, InvalidRequest, OffsetOutOfRange
from headrace.kafka.request import Request
from headrace.wire.message import Message

HIGH_WATERMARK = -1


def handle(request: Request) -> Message:
    topics = [
        Message(name=topic.name, partitions=[_partition(request, topic.name, asked) for asked in topic.partitions])
        for topic in request.body.topics
    ]
    return Message(throttle_time_ms=0, topics=topics)


def _partition(request: Request, topic: str, asked: Message) -> Message:
    low, code = -1, Code.NONE
    try:
        known = request.services.view.image.topics.get(topic)
        if known is not None and known.internal:
            raise InvalidRequest(f"records of {topic} cannot be deleted")
        partition = request.services.partitions.get(topic, asked.partition_index)
        offset = partition.high_watermark if asked.offset == HIGH_WATERMARK else asked.offset
        if not 0 <= offset <= partition.high_watermark:
            raise OffsetOutOfRange(f"{partition.topic_partition}: {offset} is above {partition.high_watermark}")
        partition.log.delete_before(offset)
        low = partition.log.start_offset
    except HeadraceError as error:
        code = error.kafka_code
    return Message(partition_index=asked.partition_index, low_watermark=low, error_code=code)
