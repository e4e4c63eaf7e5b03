"""What a commit, an offset fetch and an offset deletion come to, apart from storing it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from headrace.errors import BatchTooLarge, Code
from headrace.groups.expiry import subscribed_topics
from headrace.groups.group import Group, State
from headrace.groups.messages import CommitRequest, FetchedOffset, PartitionResult
from headrace.groups.offsets import (
    NO_EXPIRY,
    OffsetAndMetadata,
    OffsetKey,
    Record,
    TopicId,
    encode_offset,
    encode_offset_key,
)
from headrace.groups.subscription import CONSUMER

METADATA_BYTES_MAX: Final = (1 << 15) - 1
"""What a string in a record can hold, whatever the setting says."""

INVALID_COMMIT_OFFSET_SIZE: Final = 28

FAULTS: Final[Mapping[int, int]] = {
    Code.UNKNOWN_TOPIC_OR_PARTITION: Code.COORDINATOR_NOT_AVAILABLE,
    Code.REQUEST_TIMED_OUT: Code.COORDINATOR_NOT_AVAILABLE,
    Code.NOT_ENOUGH_REPLICAS: Code.COORDINATOR_NOT_AVAILABLE,
    Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND: Code.COORDINATOR_NOT_AVAILABLE,
    Code.NOT_LEADER_OR_FOLLOWER: Code.NOT_COORDINATOR,
    Code.STORAGE_ERROR: Code.NOT_COORDINATOR,
    BatchTooLarge.mapping.kafka_code: INVALID_COMMIT_OFFSET_SIZE,
}
"""What a failed append means to a client of the group: most is over when it finds the coordinator again."""

Accepted = Mapping[tuple[str, int], OffsetAndMetadata]
Refused = Mapping[tuple[str, int], int]


def sorted_out(request: CommitRequest, metadata_max_bytes: int, now_ms: int) -> tuple[Refused, Accepted]:
    """Offsets that are refused, with their codes, and those to store."""
    expiry_ms = NO_EXPIRY if request.retention_time_ms < 0 else now_ms + request.retention_time_ms
    refused: dict[tuple[str, int], int] = {}
    accepted: dict[tuple[str, int], OffsetAndMetadata] = {}
    for one in request.offsets:
        place = one.topic, one.partition_index
        if len(one.committed_metadata.encode()) > min(metadata_max_bytes, METADATA_BYTES_MAX):
            refused[place] = Code.OFFSET_METADATA_TOO_LARGE
        else:
            accepted[place] = OffsetAndMetadata(
                one.committed_offset,
                one.committed_leader_epoch,
                one.committed_metadata,
                now_ms,
                expiry_ms,
                one.topic_id,
            )
    return refused, accepted


def records_of(group_id: str, accepted: Accepted) -> list[Record]:
    return [
        (encode_offset_key(OffsetKey(group_id, topic, partition)), encode_offset(committed))
        for (topic, partition), committed in accepted.items()
    ]


def results(request: CommitRequest, refused: Refused, code: int) -> tuple[PartitionResult, ...]:
    return tuple(
        PartitionResult(one.topic, one.partition_index, refused.get((one.topic, one.partition_index), code))
        for one in request.offsets
    )


def all_failed(request: CommitRequest, code: int) -> tuple[PartitionResult, ...]:
    return results(request, {}, code)


def fetched(known: Accepted, wanted: Iterable[tuple[str, int]] | None, topic_id: TopicId) -> tuple[FetchedOffset, ...]:
    """A partition without a commit has offset -1, and so has one that was committed to an earlier topic of its name.
    With None, all that have one, of the topics that there are."""
    if wanted is None:
        wanted = [place for place in known if topic_id(place[0]) is not None and known[place].is_of(topic_id(place[0]))]
    found = []
    for topic, partition in wanted:
        committed = known.get((topic, partition))
        if committed is None or not committed.is_of(topic_id(topic)):
            found.append(FetchedOffset(topic, partition))
        else:
            found.append(FetchedOffset(topic, partition, committed.offset, committed.leader_epoch, committed.metadata))
    return tuple(found)


def deletion_faults(group: Group) -> tuple[int, frozenset[str]]:
    """Why no offset of the group may be deleted, and the topics whose offsets may not."""
    if group.state is State.EMPTY:
        return Code.NONE, frozenset()
    topics = subscribed_topics(group) if group.protocol_type == CONSUMER else None
    return (Code.NON_EMPTY_GROUP, frozenset()) if topics is None else (Code.NONE, topics)
