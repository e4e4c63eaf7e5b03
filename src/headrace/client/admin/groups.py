"""Consumer groups seen from outside: which there are, who is in them, how far they have read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.client.admin.cluster import Cluster, Request
from headrace.client.admin.fetch import offsets_at
from headrace.client.consumer.coordinator import Identity, offset_commit_request, offset_fetch_request
from headrace.client.consumer.group_protocol import (
    PROTOCOL_TYPE,
    Assignment,
    TopicPartition,
    by_topic,
    decode_assignment,
    places_of,
)
from headrace.client.errors import GroupNotEmpty, GroupNotFound, check
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.errors import ErrorCode, InvalidRequest, Unsupported
from headrace.wire import api as apis
from headrace.wire.message import Message

Committed = dict[TopicPartition, int]
"""(topic, partition) to the offset of the next record to read."""

SHARE: Final = "share"
SPARK_QUERY: Final = "spark query "
"""How the metadata of commits begins that tell how far a streaming query of Spark is; its id and name follow."""
ARCHIVE: Final = "headrace archive "
"""Likewise of an archive, with its id."""


@dataclass(frozen=True, slots=True)
class Commit:
    """An offset, and what the one who committed it has written beside it."""

    offset: int
    metadata: str


@dataclass(frozen=True, slots=True)
class GroupListing:
    """A group, as the list of all has it."""

    group_id: str
    protocol_type: str
    state: str
    type: str = ""
    """`classic`, `consumer` or `share`, by the protocol of its members; empty if the broker is too old to say."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """Who is in a group, from where, and which partitions it has: topic to partitions."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    assignment: Assignment
    target: Assignment | None = None
    """In a group of the consumer protocol, what it is to have; in a share group it has it at once."""
    epoch: int | None = None
    """Likewise, the epoch that it has reached."""


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group with its members."""

    group_id: str
    state: str
    protocol_type: str
    assignor: str
    members: tuple[GroupMember, ...]
    type: str = "classic"
    """Or `consumer` (KIP-848), or `share` (KIP-932)."""
    epoch: int | None = None
    """Of a group of the consumer protocol, or a share group."""
    assignment_epoch: int | None = None
    """Likewise, the epoch for which its assignment was made."""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """How far a group has read one partition that it has committed, or that a member has."""

    topic: str
    partition: int
    committed: int | None
    """The next record to read; None if nothing was committed. Of a share group, where it begins: what lies below is
    acknowledged, or given up."""
    end: int | None
    """The end of the log; None if the topic is gone."""
    lag: int | None
    member_id: str | None
    """Who has the partition now; in a share group there may be several, with commas between them."""
    metadata: str = ""
    """What was written beside the commit, by who made it."""

    @property
    def author(self) -> str | None:
        """Who it is that commits from outside, where that is known: a query of Spark, an archive."""
        return self.metadata if self.metadata.startswith((SPARK_QUERY, ARCHIVE)) else None


@dataclass(frozen=True, slots=True)
class OffsetReset:
    """Where a group goes on in one partition, and what was committed before."""

    topic: str
    partition: int
    committed: int | None
    offset: int


def list_groups(cluster: Cluster, brokers: Iterable[int] | None = None) -> list[GroupListing]:
    """The groups of all brokers, or of those named, by name."""
    wanted = None if brokers is None else set(brokers)

    def ask() -> list[GroupListing]:
        asked_of = cluster.topology([]).brokers if wanted is None else wanted
        asked = [(cluster.broker(broker_id), Request(apis.LIST_GROUPS, Message())) for broker_id in asked_of]
        groups: list[GroupListing] = []
        for answer in cluster.call_all(asked):
            check(answer.error_code, "list groups")
            groups += [
                GroupListing(group.group_id, group.protocol_type, group.group_state, group.group_type or "")
                for group in answer.groups
            ]
        return sorted(groups, key=lambda group: group.group_id)

    return cluster.retry(ask)


def describe_group(cluster: Cluster, group_id: str) -> GroupDescription:
    """GroupNotFound if it is not there, whatever version the broker speaks."""

    def modern_group(api: int) -> GroupDescription:
        request = Message(group_ids=[group_id], include_authorized_operations=False)
        try:
            answer = cluster.call(cluster.coordinator(group_id), api, request)
        except Unsupported:
            raise GroupNotFound(ErrorCode.GROUP_ID_NOT_FOUND, f"group {group_id!r}") from None
        (group,) = answer.groups
        check(group.error_code, f"group {group_id!r}")
        return _consumer_group(group) if api == apis.CONSUMER_GROUP_DESCRIBE else _share_group(group)

    def consumer_group() -> GroupDescription:
        try:
            return modern_group(apis.CONSUMER_GROUP_DESCRIBE)
        except GroupNotFound:
            return modern_group(apis.SHARE_GROUP_DESCRIBE)

    def ask() -> GroupDescription:
        (group,) = cluster.call(cluster.coordinator(group_id), apis.DESCRIBE_GROUPS, Message(groups=[group_id])).groups
        if group.error_code == ErrorCode.GROUP_ID_NOT_FOUND:
            return consumer_group()
        check(group.error_code, f"group {group_id!r}", group.error_message)
        if group.group_state == "Dead":
            return consumer_group()
        members = tuple(_member(member, group.protocol_type) for member in group.members)
        return GroupDescription(group_id, group.group_state, group.protocol_type, group.protocol_data, members)

    return cluster.retry(ask)


def _member(member: Message, protocol_type: str) -> GroupMember:
    assignment = decode_assignment(member.member_assignment) if protocol_type == PROTOCOL_TYPE else {}
    return GroupMember(member.member_id, member.group_instance_id, member.client_id, member.client_host, assignment)


def _consumer_group(group: Message) -> GroupDescription:
    members = tuple(
        GroupMember(
            member.member_id,
            member.instance_id,
            member.client_id,
            member.client_host,
            _partitions(member.assignment),
            _partitions(member.target_assignment),
            member.member_epoch,
        )
        for member in group.members
    )
    epochs = group.group_epoch, group.assignment_epoch
    kind, assignor = PROTOCOL_TYPE, group.assignor_name
    return GroupDescription(group.group_id, group.group_state, kind, assignor, members, "consumer", *epochs)


def _share_group(group: Message) -> GroupDescription:
    members = []
    for member in group.members:
        assigned = _partitions(member.assignment)
        named = member.member_id, None, member.client_id, member.client_host
        members.append(GroupMember(*named, assigned, assigned, member.member_epoch))
    epochs = group.group_epoch, group.assignment_epoch
    return GroupDescription(
        group.group_id, group.group_state, SHARE, group.assignor_name, tuple(members), SHARE, *epochs
    )


def _partitions(assignment: Message) -> Assignment:
    return {topic.topic_name: tuple(topic.partitions) for topic in assignment.topic_partitions}


def group_lag(cluster: Cluster, group: GroupDescription) -> list[PartitionLag]:
    """Of all partitions that the group has committed or that members have."""
    if group.type == SHARE:
        return _share_group_lag(cluster, group)
    commits = fetch_commits(cluster, group.group_id)
    committed = {place: commit.offset for place, commit in commits.items()}
    owners = {place: member.member_id for member in group.members for place in places_of(member.assignment)}
    places = {*committed, *owners}
    ends = _ends(cluster, places)
    return [
        PartitionLag(
            *place,
            committed.get(place),
            ends.get(place),
            max(0, ends[place] - committed.get(place, 0)) if place in ends else None,
            owners.get(place),
            commits[place].metadata if place in commits else "",
        )
        for place in sorted(places)
    ]


def _share_group_lag(cluster: Cluster, group: GroupDescription) -> list[PartitionLag]:
    """Where the broker does not say the lag, what is acknowledged behind the start counts as if it were not."""
    members: dict[TopicPartition, list[str]] = {}
    for member in group.members:
        for place in places_of(member.assignment):
            members.setdefault(place, []).append(member.member_id)
    starts = fetch_share_starts(cluster, group.group_id)
    ends = _ends(cluster, {*starts, *members})
    rows = []
    for place in sorted({*starts, *members}):
        start, lag = starts.get(place, (None, None))
        end = ends.get(place)
        if lag is None and end is not None and start is not None:
            lag = max(0, end - start)
        rows.append(PartitionLag(*place, start, end, lag, ",".join(sorted(members.get(place, ()))) or None))
    return rows


def fetch_share_starts(cluster: Cluster, group_id: str) -> dict[TopicPartition, tuple[int | None, int | None]]:
    """Where a share group begins in its partitions, and its lag there; None for what is not decided or not known."""
    request = Message(groups=[Message(group_id=group_id, topics=None)])

    def ask() -> dict[TopicPartition, tuple[int | None, int | None]]:
        (group,) = cluster.call(cluster.coordinator(group_id), apis.DESCRIBE_SHARE_GROUP_OFFSETS, request).groups
        check(group.error_code, f"offsets of group {group_id!r}")
        found: dict[TopicPartition, tuple[int | None, int | None]] = {}
        for topic in group.topics:
            for row in topic.partitions:
                check(row.error_code, f"offset of group {group_id!r} in {topic.topic_name}-{row.partition_index}")
                start, lag = (None if value is None or value < 0 else value for value in (row.start_offset, row.lag))
                found[topic.topic_name, row.partition_index] = start, lag
        return found

    return cluster.retry(ask)


def _ends(cluster: Cluster, places: Iterable[TopicPartition]) -> Committed:
    """Ends of the logs; partitions of topics that are gone are left out."""
    asked = by_topic(places)
    topics = cluster.retry(lambda: cluster.topology(sorted(asked))).topics
    ends: Committed = {}
    for name, topic in topics.items():
        wanted = [number for number in asked[name] if number < len(topic.partitions)]
        ends.update(((name, number), end) for number, end in offsets_at(cluster, name, wanted, LATEST).items())
    return ends


def delete_group(cluster: Cluster, group_id: str) -> None:
    def ask() -> None:
        (result,) = cluster.call(
            cluster.coordinator(group_id), apis.DELETE_GROUPS, Message(groups_names=[group_id])
        ).results
        check(result.error_code, f"delete group {group_id!r}")

    cluster.retry(ask)


def fetch_offsets(cluster: Cluster, group_id: str, partitions: Iterable[TopicPartition] | None = None) -> Committed:
    """What a group has committed, everywhere or for the partitions named; those without a commit are left out."""
    return {place: commit.offset for place, commit in fetch_commits(cluster, group_id, partitions).items()}


def fetch_commits(
    cluster: Cluster, group_id: str, partitions: Iterable[TopicPartition] | None = None
) -> dict[TopicPartition, Commit]:
    """As `fetch_offsets`, with their metadata."""
    request = offset_fetch_request(group_id, partitions)

    def ask() -> dict[TopicPartition, Commit]:
        (group,) = cluster.call(cluster.coordinator(group_id), apis.OFFSET_FETCH, request).groups
        check(group.error_code, f"offsets of group {group_id!r}")
        committed: dict[TopicPartition, Commit] = {}
        for topic in group.topics:
            for partition in topic.partitions:
                check(partition.error_code, f"offset of group {group_id!r} in {topic.name}-{partition.partition_index}")
                if partition.committed_offset >= 0:
                    found = Commit(partition.committed_offset, partition.metadata or "")
                    committed[topic.name, partition.partition_index] = found
        return committed

    return cluster.retry(ask)


def commit_offsets(
    cluster: Cluster, group_id: str, offsets: Mapping[TopicPartition, int], *, metadata: str = ""
) -> None:
    """Commit from outside into a group without members."""
    request = offset_commit_request(group_id, Identity(), offsets, metadata)

    def ask() -> None:
        for topic in cluster.call(cluster.coordinator(group_id), apis.OFFSET_COMMIT, request).topics:
            for partition in topic.partitions:
                check(partition.error_code, f"commit of group {group_id!r} in {topic.name}-{partition.partition_index}")

    cluster.retry(ask)


def delete_offsets(cluster: Cluster, group_id: str, partitions: Iterable[TopicPartition]) -> None:
    topics = [
        Message(name=topic, partitions=[Message(partition_index=number) for number in numbers])
        for topic, numbers in by_topic(partitions).items()
    ]
    request = Message(group_id=group_id, topics=topics)

    def ask() -> None:
        answer = cluster.call(cluster.coordinator(group_id), apis.OFFSET_DELETE, request)
        check(answer.error_code, f"delete offsets of group {group_id!r}")
        for topic in answer.topics:
            for partition in topic.partitions:
                check(
                    partition.error_code,
                    f"delete offset of group {group_id!r} in {topic.name}-{partition.partition_index}",
                )

    cluster.retry(ask)


def plan_reset(
    cluster: Cluster,
    group_id: str,
    *,
    moment: int | None = None,
    offset: int | None = None,
    topics: Sequence[str] = (),
    partitions: Sequence[int] = (),
) -> list[OffsetReset]:
    """What `commit_offsets` is to be given, so that the group goes on at a moment (EARLIEST, LATEST or a time in ms),
    or at an offset, or as near to it as the log reaches: in these topics, else in all that it has read; in these
    partitions, else in all. A group with members is refused.
    """
    committed = fetch_offsets(cluster, group_id)
    _refuse_members(cluster, group_id)
    wanted = topics or tuple(sorted({topic for topic, _ in committed}))
    if not wanted:
        raise InvalidRequest(f"group {group_id!r} has committed nothing; say which topics it shall read (--topic)")
    resets: list[OffsetReset] = []
    for topic in wanted:
        numbers = [cluster.partition(topic, number).index for number in partitions] or [
            partition.index for partition in cluster.topic(topic).partitions
        ]
        goals = _goals(cluster, topic, numbers, moment, offset)
        resets += [OffsetReset(topic, number, committed.get((topic, number)), goals[number]) for number in numbers]
    return resets


def _refuse_members(cluster: Cluster, group_id: str) -> None:
    try:
        members = describe_group(cluster, group_id).members
    except GroupNotFound:
        return
    if members:
        found = f"it is in use (members: {len(members)}); stop its consumers first"
        raise GroupNotEmpty(ErrorCode.NON_EMPTY_GROUP, f"group {group_id!r}", found)


def _goals(
    cluster: Cluster, topic: str, partitions: Sequence[int], moment: int | None, offset: int | None
) -> dict[int, int]:
    """The offset to go to in each partition, never outside its log."""
    if moment is not None:
        return offsets_at(cluster, topic, partitions, moment)
    assert offset is not None
    starts = offsets_at(cluster, topic, partitions, EARLIEST)
    ends = offsets_at(cluster, topic, partitions, LATEST)
    return {number: min(max(offset, starts[number]), ends[number]) for number in partitions}
