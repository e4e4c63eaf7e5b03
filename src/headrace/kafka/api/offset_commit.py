"""OffsetCommit, versions 2 to 10. 2 to 4: retention time; 6: epochs; 7: static members; 8: flexible; 9: member
epochs; 10: topics by id.

Answered when the offsets are committed to __consumer_offsets. A partition that is not there is refused, the others
count.
"""

from __future__ import annotations

from typing import Final

from headrace.errors import ErrorCode
from headrace.groups.messages import CommitRequest, OffsetToCommit, PartitionResult
from headrace.kafka.connection import Request
from headrace.wire.message import ZERO_UUID, Message

BY_ID_FROM: Final = 10
MEMBER_EPOCH_FROM: Final = 9
RETENTION_UNTIL: Final = 4


def handle(request: Request) -> None:
    body = request.body
    offsets, refused, ids = wanted_offsets(request, by_id=request.version >= BY_ID_FROM)
    request.services.groups.commit(
        body.group_id,
        CommitRequest(
            offsets,
            body.member_id,
            body.generation_id_or_member_epoch,
            body.group_instance_id,
            body.retention_time_ms if request.version <= RETENTION_UNTIL else -1,
            has_member_epoch=request.version >= MEMBER_EPOCH_FROM,
        ),
        lambda results: request.reply(response([*results, *refused], ids)),
    )


def wanted_offsets(
    request: Request, *, by_id: bool = False
) -> tuple[tuple[OffsetToCommit, ...], list[PartitionResult], dict[str, bytes]]:
    """What is to be committed, what is refused because it is not there, and the ids by which topics were named."""
    image = request.services.view.image
    offsets: list[OffsetToCommit] = []
    refused: list[PartitionResult] = []
    ids: dict[str, bytes] = {}
    for topic in request.body.topics:
        if by_id:
            known, unknown = image.topics_by_id.get(topic.topic_id), ErrorCode.UNKNOWN_TOPIC_ID
            name = known.name if known is not None else topic.topic_id.hex()
            ids[name] = topic.topic_id
        else:
            known, unknown, name = image.topics.get(topic.name), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, topic.name
        for part in topic.partitions:
            index = part.partition_index
            if known is None or not 0 <= index < len(known.partitions):
                code = unknown if known is None else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                refused.append(PartitionResult(name, index, code))
            else:
                epoch, metadata = part.committed_leader_epoch, part.committed_metadata or ""
                offsets.append(OffsetToCommit(name, index, part.committed_offset, epoch, metadata, known.id))
    return tuple(offsets), refused, ids


def response(results: list[PartitionResult], ids: dict[str, bytes]) -> Message:
    topics: dict[str, list[Message]] = {}
    for result in results:
        row = Message(partition_index=result.partition_index, error_code=result.error_code)
        topics.setdefault(result.topic, []).append(row)
    return Message(
        throttle_time_ms=0,
        topics=[
            Message(name=name, topic_id=ids.get(name, ZERO_UUID), partitions=rows) for name, rows in topics.items()
        ],
    )
