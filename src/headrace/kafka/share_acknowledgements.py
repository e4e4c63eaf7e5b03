"""What ShareFetch and ShareAcknowledge have in common: who asks, what it acknowledges, and where partitions are led."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from headrace.cluster.image import Image
from headrace.errors import ErrorCode, InvalidGroupName, InvalidRequest
from headrace.kafka import leader_lookup
from headrace.kafka.connection import Request
from headrace.kafka.share_sessions import MemberKey
from headrace.queues.messages import AcknowledgementBatch, AcknowledgeType, TopicIdPartition
from headrace.wire.share_fetch import NOBODY

MEMBER_ID_MAX: Final = 36
"""Kafka's bound: the length of a UUID."""
RENEW_FROM: Final = 2
MOVED: Final = frozenset({ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH})

Acknowledgements = dict[TopicIdPartition, Sequence[AcknowledgementBatch]]
Codes = dict[TopicIdPartition, int]


def member_of(request: Request) -> MemberKey:
    group, member = request.body.group_id, request.body.member_id
    if not group:
        raise InvalidGroupName("a share group has a name")
    if not member or len(member) > MEMBER_ID_MAX:
        raise InvalidRequest(f"a member id has 1 to {MEMBER_ID_MAX} characters")
    return MemberKey(group, member)


def acknowledgements_of(request: Request) -> tuple[Acknowledgements, Codes]:
    """What is acknowledged, and the partitions of which it is refused: a lock is renewed only by a request that says
    that it does so."""
    taken: Acknowledgements = {}
    refused: Codes = {}
    renews = request.version >= RENEW_FROM and request.body.is_renew_ack
    for topic in request.body.topics:
        for partition in topic.partitions:
            rows = partition.acknowledgement_batches
            if not rows:
                continue
            place = topic.topic_id, partition.partition_index
            batches = [
                AcknowledgementBatch(row.first_offset, row.last_offset, tuple(row.acknowledge_types)) for row in rows
            ]
            if place in taken or place in refused or (not renews and _renew(batches)):
                taken.pop(place, None)
                refused[place] = ErrorCode.INVALID_REQUEST
            else:
                taken[place] = batches
    return taken, refused


def _renew(batches: Iterable[AcknowledgementBatch]) -> bool:
    return any(AcknowledgeType.RENEW in batch.types for batch in batches)


class Whereabouts:
    """What an answer says of partitions that are not here: codes, leaders, and how these are reached."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._leaders: set[int] = set()

    @property
    def _image(self) -> Image:
        return self._request.services.view.image

    def code(self, place: TopicIdPartition, code: int) -> int:
        """A partition that is not here may be elsewhere; and an id that no topic has is told as such."""
        if code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            return code
        topic = self._image.topics_by_id.get(place[0])
        if topic is None:
            return ErrorCode.UNKNOWN_TOPIC_ID
        return leader_lookup.not_led_code(self._image, topic.name, place[1])

    def leader(self, place: TopicIdPartition, code: int) -> tuple[int, int]:
        """Who leads the partition, if the code is that it is not this broker."""
        topic = self._image.topics_by_id.get(place[0]) if code in MOVED else None
        leader = None
        if topic is not None:
            leader = leader_lookup.leader_elsewhere(self._request.services, topic.name, place[1])
        if leader is None:
            return NOBODY
        self._leaders.add(leader[0])
        return leader

    def endpoints(self) -> list[leader_lookup.NodeEndpoint]:
        """Of the leaders that were told."""
        if not self._leaders:
            return []
        return leader_lookup.endpoints(self._image, self._request.connection.listener, self._leaders)


def by_topic(rows: dict[TopicIdPartition, Any]) -> list[tuple[bytes, list[Any]]]:
    topics: dict[bytes, list[Any]] = {}
    for (topic_id, _), row in rows.items():
        topics.setdefault(topic_id, []).append(row)
    return list(topics.items())
