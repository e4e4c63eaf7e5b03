"""The committed offsets of groups: what a commit, a fetch and a deletion come to, and when an offset expires. No I/O.

What is in the log of the offsets topic is the truth; the cache is rebuilt from it when a partition gets its leader.

Retention counts, for a group that had members, from when it became empty; for a group that never had (it only
commits), from the commit. While a consumer group is stable, offsets of topics that it no longer subscribes to count
from their commit, and the others are in use. Offsets of an earlier topic of that name count from their commit in any
group. A client of an old version may have set the end itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping
from typing import Final

from headrace.cluster.names import OFFSETS_TOPIC
from headrace.coordinators.record_fields import Reader, Record
from headrace.coordinators.state_log import APPEND_FAULTS
from headrace.coordinators.state_partitions import StateTopic
from headrace.errors import BatchTooLarge, CorruptBatch, ErrorCode
from headrace.groups.consumer_group import ConsumerGroup
from headrace.groups.consumer_protocol import CONSUMER
from headrace.groups.group import Group, State
from headrace.groups.messages import CommitRequest, FetchedOffset, PartitionResult
from headrace.groups.records import (
    NO_EXPIRY,
    OffsetAndMetadata,
    OffsetKey,
    encode_offset,
    encode_offset_key,
)
from headrace.groups.transactional_offsets import TransactionalOffsets

TopicId = Callable[[str], bytes | None]
"""The id that the topic of this name has now; None if there is none."""
NO_TOPIC_ID: Final = bytes(16)
"""Kafka's way to say that no topic is meant."""

METADATA_BYTES_MAX: Final = (1 << 15) - 1
"""What a string in a record can hold, whatever the setting says."""

INVALID_COMMIT_OFFSET_SIZE: Final = 28

FAULTS: Final[Mapping[int, int]] = {
    **APPEND_FAULTS,
    BatchTooLarge.mapping.kafka_code: INVALID_COMMIT_OFFSET_SIZE,
}
"""What a failed append means to a client of the group."""

OFFSETS: Final = StateTopic(
    OFFSETS_TOPIC,
    "offsets.loss.accepted",
    "groups",
    "the committed offsets of its groups",
    "groups then go on with older offsets, or with none",
)

Accepted = Mapping[tuple[str, int], OffsetAndMetadata]
Refused = Mapping[tuple[str, int], int]


class OffsetCache:
    """Committed offsets of the groups in one partition of the offsets topic."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[tuple[str, int], OffsetAndMetadata]] = {}
        self.pending: defaultdict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
        """By group, what is committed to in appends that are not answered yet, and how often."""
        self.transactional = TransactionalOffsets()

    def groups(self) -> Collection[str]:
        return self._groups.keys()

    def of(self, group: str) -> Mapping[tuple[str, int], OffsetAndMetadata]:
        return self._groups.get(group, {})

    def put(self, group: str, topic: str, partition: int, committed: OffsetAndMetadata) -> None:
        """Outside of a transaction."""
        self._groups.setdefault(group, {})[topic, partition] = committed
        if group in self.transactional.places:
            self.transactional.drop(OffsetKey(group, topic, partition))

    def end_transaction(self, producer_id: int, *, committed: bool) -> Collection[OffsetKey]:
        """The marker of a producer: what it committed in its transaction counts now, or is dropped. Answers which
        offsets count."""
        counting = self.transactional.end(producer_id, committed=committed)
        for key, offset in counting.items():
            self._groups.setdefault(key.group, {})[key.topic, key.partition] = offset
        return counting.keys()

    def drop(self, key: OffsetKey) -> None:
        self.transactional.drop(key)
        offsets = self._groups.get(key.group)
        if offsets is None:
            return
        offsets.pop((key.topic, key.partition), None)
        if not offsets:
            del self._groups[key.group]

    def answered(self, group: str, places: KeysView[tuple[str, int]]) -> None:
        """An append of these offsets was answered, whatever the answer."""
        left = self.pending[group]
        left.subtract(places)
        left += Counter()
        if not left:
            del self.pending[group]

    def places(self, group: str) -> Collection[tuple[str, int]]:
        """What the group has committed to, or is about to."""
        return self.of(group).keys() | self.unsettled(group)

    def unsettled(self, group: str) -> Collection[tuple[str, int]]:
        """What the group is about to commit to: appends under way, and transactions that are not decided."""
        return self.pending.get(group, {}).keys() | self.transactional.of(group)

    def of_topics(self, ids: Collection[bytes]) -> list[OffsetKey]:
        return [
            OffsetKey(group, topic, partition)
            for group, offsets in self._groups.items()
            for (topic, partition), committed in offsets.items()
            if committed.topic_id in ids
        ] + [key for key, committed in self.transactional if committed.topic_id in ids]

    def without_id(self) -> list[tuple[OffsetKey, OffsetAndMetadata]]:
        """Those whose records do not say which topic of the name they belong to."""
        return [
            (OffsetKey(group, topic, partition), committed)
            for group, offsets in self._groups.items()
            for (topic, partition), committed in offsets.items()
            if committed.topic_id is None
        ]


# Requests.


def accept(request: CommitRequest, metadata_max_bytes: int, now_ms: int) -> tuple[Refused, Accepted]:
    """The offsets of a commit that are refused, with their codes, and those to store."""
    expiry_ms = NO_EXPIRY if request.retention_time_ms < 0 else now_ms + request.retention_time_ms
    refused: dict[tuple[str, int], int] = {}
    accepted: dict[tuple[str, int], OffsetAndMetadata] = {}
    for one in request.offsets:
        place = one.topic, one.partition_index
        if len(one.committed_metadata.encode()) > min(metadata_max_bytes, METADATA_BYTES_MAX):
            refused[place] = ErrorCode.OFFSET_METADATA_TOO_LARGE
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


def fetched(
    known: Accepted,
    wanted: Iterable[tuple[str, int]] | None,
    topic_id: TopicId,
    unstable: Collection[tuple[str, int]] = (),
) -> tuple[FetchedOffset, ...]:
    """A partition without a commit has offset -1, and so has one that was committed to an earlier topic of its name.
    With None, all that have one, of the topics that there are. Of those that are unstable it is not known yet."""
    if wanted is None:
        wanted = [place for place in known if topic_id(place[0]) is not None and known[place].is_of(topic_id(place[0]))]
        wanted += [place for place in unstable if place not in known]
    found = []
    for topic, partition in wanted:
        committed = known.get((topic, partition))
        if (topic, partition) in unstable:
            found.append(FetchedOffset(topic, partition, error_code=ErrorCode.UNSTABLE_OFFSET_COMMIT))
        elif committed is None or not committed.is_of(topic_id(topic)):
            found.append(FetchedOffset(topic, partition))
        else:
            found.append(FetchedOffset(topic, partition, committed.offset, committed.leader_epoch, committed.metadata))
    return tuple(found)


def deletion_faults(group: Group | ConsumerGroup) -> tuple[int, frozenset[str]]:
    """Why no offset of the group may be deleted, and the topics whose offsets may not."""
    if group.is_empty:
        return ErrorCode.NONE, frozenset()
    topics = subscribed_topics(group)
    return (ErrorCode.NON_EMPTY_GROUP, frozenset()) if topics is None else (ErrorCode.NONE, topics)


# Expiry.


def expired(
    group: Group | ConsumerGroup,
    offsets: Mapping[tuple[str, int], OffsetAndMetadata],
    now_ms: int,
    retention_ms: int,
    topic_id: TopicId,
) -> list[OffsetKey]:
    topics = subscribed_topics(group) if isinstance(group, ConsumerGroup) or group.state is State.STABLE else None
    keys = []
    for (topic, partition), committed in offsets.items():
        if committed.expiry_ms != NO_EXPIRY:
            over = committed.expiry_ms <= now_ms
        elif not committed.is_of(topic_id(topic)):
            over = now_ms - committed.commit_ms >= retention_ms
        elif group.is_empty:
            base_ms = committed.commit_ms if group.protocol_type is None else group.state_since_ms
            over = now_ms - base_ms >= retention_ms
        else:
            unused = topics is not None and topic not in topics
            over = unused and now_ms - committed.commit_ms >= retention_ms
        if over:
            keys.append(OffsetKey(group.group_id, topic, partition))
    return keys


def subscribed_topics(group: Group | ConsumerGroup) -> frozenset[str] | None:
    """None when any topic may be in use."""
    if isinstance(group, ConsumerGroup):
        return group.topics
    if group.protocol_type != CONSUMER or group.protocol_name is None:
        return None
    return subscribed(member.metadata(group.protocol_name) for member in group.roster.members.values())


def topics_of(metadata: bytes) -> frozenset[str] | None:
    """In a consumer's protocol metadata: version int16, then an array of strings; what follows is not read. It belongs
    to the clients, and is looked into only to keep the offsets of topics in use. None when it has another form."""
    reader = Reader(metadata)
    try:
        reader.int16()
        return frozenset(reader.string() for _ in range(min(reader.int32(), len(metadata))))
    except CorruptBatch:
        return None


def subscribed(metadata: Iterable[bytes]) -> frozenset[str] | None:
    """All topics of all members; None when one of them cannot be read, and so any topic may be in use."""
    topics: set[str] = set()
    for one in metadata:
        found = topics_of(one)
        if found is None:
            return None
        topics |= found
    return frozenset(topics)
