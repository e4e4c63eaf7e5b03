"""OffsetFetch, versions 1 to 10. 2: all topics; 5: leader epochs; 6: flexible; 8: many groups; 9: member epochs;
10: topics by id."""

from __future__ import annotations

from typing import Final

from headrace.errors import ErrorCode
from headrace.groups.messages import NO_GENERATION, FetchedOffset, OffsetFetchReply
from headrace.kafka.connection import Request
from headrace.wire.message import ZERO_UUID, Message

MANY_GROUPS_FROM: Final = 8
BY_ID_FROM: Final = 10
GROUP_ERROR_FROM: Final = 2
MEMBER_EPOCH_FROM: Final = 9


def handle(request: Request) -> Message:
    body = request.body
    if request.version >= MANY_GROUPS_FROM:
        groups = []
        for group in body.groups:
            reply = _fetch(request, group.group_id, group.topics, group)
            groups.append(Message(group_id=group.group_id, topics=_topics(request, reply), error_code=reply.error_code))
        return Message(throttle_time_ms=0, groups=groups)
    reply = _fetch(request, body.group_id, body.topics)
    return Message(throttle_time_ms=0, topics=_topics(request, reply), error_code=reply.error_code)


def _fetch(
    request: Request, group_id: str, asked: list[Message] | None, member: Message | None = None
) -> OffsetFetchReply:
    """`member`: where the request says who asks."""
    groups = request.services.groups
    require_stable = bool(request.body.require_stable)
    epochs = member is not None and request.version >= MEMBER_EPOCH_FROM
    member_id, member_epoch = (member.member_id, member.member_epoch) if member and epochs else (None, NO_GENERATION)

    def fetch(wanted: list[tuple[str, int]] | None) -> OffsetFetchReply:
        return groups.fetch_offsets(group_id, wanted, require_stable, member_id=member_id, member_epoch=member_epoch)

    if asked is None:
        return fetch(None)
    wanted: list[tuple[str, int]] = []
    refused: list[FetchedOffset] = []
    for topic in asked:
        if request.version >= BY_ID_FROM:
            known = request.services.view.image.topics_by_id.get(topic.topic_id)
            if known is None:
                code = ErrorCode.UNKNOWN_TOPIC_ID
                name = topic.topic_id.hex()
                refused += [FetchedOffset(name, index, error_code=code) for index in topic.partition_indexes]
                continue
            name = known.name
        else:
            name = topic.name
        wanted += [(name, index) for index in topic.partition_indexes]
    reply = fetch(wanted)
    offsets = reply.offsets
    if reply.error_code and request.version < GROUP_ERROR_FROM:
        offsets = tuple(FetchedOffset(name, index, error_code=reply.error_code) for name, index in wanted)
    return OffsetFetchReply(reply.error_code, (*offsets, *refused))


def _topics(request: Request, reply: OffsetFetchReply) -> list[Message]:
    by_id = request.version >= BY_ID_FROM
    known = request.services.view.image.topics
    topics: dict[str, list[Message]] = {}
    for offset in reply.offsets:
        topics.setdefault(offset.topic, []).append(
            Message(
                partition_index=offset.partition_index,
                committed_offset=offset.committed_offset,
                committed_leader_epoch=offset.committed_leader_epoch,
                metadata=offset.metadata,
                error_code=offset.error_code,
            )
        )
    found = []
    for name, rows in topics.items():
        topic_id = ZERO_UUID
        if by_id and name in known:
            topic_id = known[name].id
        elif by_id:
            try:
                topic_id = bytes.fromhex(name)
            except ValueError:
                continue  # an offset of a topic that is gone cannot be told by an id
        found.append(Message(name=name, topic_id=topic_id, partitions=rows))
    return found
