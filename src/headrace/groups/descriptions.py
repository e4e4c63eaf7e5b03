"""What is shown of groups: descriptions, lists, lag. Reads, changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from headrace.errors import ErrorCode
from headrace.groups.assignors import NOTHING
from headrace.groups.consumer_messages import DescribedConsumer, DescribedConsumerGroup
from headrace.groups.group import State
from headrace.groups.messages import DescribedGroup, DescribedMember, ListedGroup
from headrace.groups.modern_group import ModernGroup
from headrace.groups.offsets import TopicId
from headrace.groups.shard import AnyGroup, Shard


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a group is behind the end of a partition that it committed to."""

    group_id: str
    topic: str
    partition: int
    committed_offset: int
    lag: int


def description(group: AnyGroup) -> DescribedGroup:
    """Metadata and assignments are shown when they hold: in a stable group."""
    if isinstance(group, ModernGroup):
        return _modern_in_general(group)
    kept = group.snapshot()
    stable = group.state is State.STABLE
    members = tuple(
        DescribedMember(
            one.member_id,
            one.group_instance_id,
            one.client_id,
            one.client_host,
            one.metadata if stable else b"",
            one.assignment if stable else b"",
        )
        for one in kept.members
    )
    protocol = (kept.protocol_name or "") if stable else ""
    return DescribedGroup(ErrorCode.NONE, group.group_id, group.state.value, kept.protocol_type, protocol, members)


def _modern_in_general(group: ModernGroup) -> DescribedGroup:
    members = tuple(
        DescribedMember(member.member_id, told.instance_id, told.client_id, told.client_host, b"", b"")
        for member in group.members.values()
        for told in (member.subscription,)
    )
    kind, assignor = group.protocol_type, group.assignor
    return DescribedGroup(ErrorCode.NONE, group.group_id, group.state_name, kind, assignor, members, group.group_type)


def modern_description(group: ModernGroup) -> DescribedConsumerGroup:
    members = tuple(
        DescribedConsumer(
            member.member_id,
            told.instance_id,
            told.rack,
            member.current.epoch,
            told.client_id,
            told.client_host,
            told.topics,
            told.pattern,
            member.current.assigned,
            group.target.get(member.member_id, NOTHING),
            member.is_classic,
        )
        for member in group.members.values()
        for told in (member.subscription,)
    )
    return DescribedConsumerGroup(
        ErrorCode.NONE,
        group.group_id,
        None,
        group.state_name,
        group.epoch,
        group.target_epoch,
        group.assignor,
        members,
    )


def listed(shards: Iterable[Shard], states: Collection[str], types: Collection[str]) -> tuple[ListedGroup, ...]:
    """Groups in any of these states and types, in whatever case they are written; empty for all."""
    wanted_states = {state.lower() for state in states}
    wanted_types = {kind.lower() for kind in types}
    found = (
        ListedGroup(group.group_id, group.protocol_type or "", group.state_name, group.group_type)
        for shard in shards
        for group in shard.groups.values()
        if not group.is_dead
    )
    return tuple(
        group
        for group in found
        if not (wanted_states and group.group_state.lower() not in wanted_states)
        if not (wanted_types and group.group_type not in wanted_types)
    )


def lags(shards: Iterable[Shard], end_offset_of: Callable[[str, int], int | None], topic_id: TopicId) -> Iterator[Lag]:
    for shard in shards:
        for group_id in shard.offsets.groups():
            for (topic, partition), committed in shard.offsets.of(group_id).items():
                end = end_offset_of(topic, partition)
                if end is not None and committed.is_of(topic_id(topic)):
                    yield Lag(group_id, topic, partition, committed.offset, max(0, end - committed.offset))
