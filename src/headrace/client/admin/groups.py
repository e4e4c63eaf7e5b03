"""Consumer groups seen from outside: which there are, who is in them, how far they have read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.client.admin.cluster import Cluster, Request
from headrace.client.consumer.coordinator import Identity, offset_commit_request, offset_fetch_request
from headrace.client.consumer.group_protocol import (
    PROTOCOL_TYPE,
    Assignment,
    TopicPartition,
    by_topic,
    decode_assignment,
)
from headrace.client.errors import Refusal, check
from headrace.errors import ErrorCode
from headrace.wire import api as apis
from headrace.wire.message import Message

Committed = dict[TopicPartition, int]
"""(topic, partition) to the offset of the next record to read."""


@dataclass(frozen=True, slots=True)
class Commit:
    """An offset, and what the one who committed it has written beside it."""

    offset: int
    metadata: str


@dataclass(frozen=True, slots=True)
class GroupListing:
    group_id: str
    protocol_type: str
    state: str


@dataclass(frozen=True, slots=True)
class GroupMember:
    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class GroupDescription:
    group_id: str
    state: str
    protocol_type: str
    assignor: str
    members: tuple[GroupMember, ...]


def list_groups(cluster: Cluster) -> list[GroupListing]:
    """The groups of all brokers, by name."""

    def ask() -> list[GroupListing]:
        brokers = cluster.topology([]).brokers
        asked = [(cluster.broker(broker_id), Request(apis.LIST_GROUPS, Message())) for broker_id in brokers]
        groups: list[GroupListing] = []
        for answer in cluster.call_all(asked):
            check(answer.error_code, "list groups")
            groups += [GroupListing(group.group_id, group.protocol_type, group.group_state) for group in answer.groups]
        return sorted(groups, key=lambda group: group.group_id)

    return cluster.retry(ask)


def describe_group(cluster: Cluster, group_id: str) -> GroupDescription:
    """A group that is not there is a Refusal with GROUP_ID_NOT_FOUND, whatever version the broker speaks."""

    def ask() -> GroupDescription:
        (group,) = cluster.call(cluster.coordinator(group_id), apis.DESCRIBE_GROUPS, Message(groups=[group_id])).groups
        check(
            group.error_code,
            f"group {group_id!r}",
            group.error_message if group.error_code != ErrorCode.GROUP_ID_NOT_FOUND else None,
        )
        if group.group_state == "Dead":
            raise Refusal(ErrorCode.GROUP_ID_NOT_FOUND, f"group {group_id!r}")
        members = tuple(_member(member, group.protocol_type) for member in group.members)
        return GroupDescription(group_id, group.group_state, group.protocol_type, group.protocol_data, members)

    return cluster.retry(ask)


def _member(member: Message, protocol_type: str) -> GroupMember:
    assignment = decode_assignment(member.member_assignment) if protocol_type == PROTOCOL_TYPE else {}
    return GroupMember(member.member_id, member.group_instance_id, member.client_id, member.client_host, assignment)


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
