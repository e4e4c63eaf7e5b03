"""A group changes from the classic protocol to the consumer protocol, or back, while it has members. Pure.

Members keep what they hold, and the number that they know: the generation is the epoch. The first member that speaks
the consumer protocol brings a classic group over; the last one that leaves takes it back, and those who stay join
again. In between both kinds are members of one group, which computes one target for all.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import CorruptBatch
from headrace.groups.consumer_group import ConsumerGroup
from headrace.groups.consumer_member import ConsumerMember
from headrace.groups.consumer_protocol import CONSUMER, decode_assignment, decode_subscription
from headrace.groups.consumer_records import ClassicSession, CurrentAssignment, MemberSubscription
from headrace.groups.group import Group, Moment
from headrace.groups.limits import ConsumerLimits, GroupLimits
from headrace.groups.member import Member
from headrace.groups.topic_catalog import TopicCatalog


def may_upgrade(group: Group, limits: ConsumerLimits) -> bool:
    if group.is_vacant:
        return True
    return limits.upgrades and group.protocol_type == CONSUMER and len(group.roster) <= limits.max_size


def upgrade(group: Group, into: ConsumerGroup, catalog: TopicCatalog, now: Moment) -> bool:
    """Bring the members over. False if what they say cannot be read."""
    try:
        members = [_consumer(member, group, catalog) for member in group.roster.members.values()]
    except CorruptBatch:
        return False
    into.adopt(group.generation_id, members, now)
    return True


def _consumer(member: Member, group: Group, catalog: TopicCatalog) -> ConsumerMember:
    metadata = member.metadata(group.protocol_name) or member.protocols[0][1]
    told = decode_subscription(metadata)
    subscription = MemberSubscription(
        member.group_instance_id,
        told.rack,
        member.client_id,
        member.client_host,
        tuple(sorted(set(told.topics))),
        None,
        member.rebalance_timeout_ms,
        None,
        ClassicSession(member.session_timeout_ms, member.protocols),
    )
    held = {
        catalog.topics[topic].topic_id: indexes
        for topic, indexes in decode_assignment(member.assignment).items()
        if topic in catalog.topics and indexes
    }
    epoch = group.generation_id
    return ConsumerMember(member.member_id, subscription, CurrentAssignment(epoch, epoch, assigned=held))


def may_downgrade(group: ConsumerGroup, limits: ConsumerLimits, classic: GroupLimits) -> bool:
    return limits.downgrades and group.is_all_classic and len(group.members) <= classic.max_size


def downgraded(group: ConsumerGroup, limits: GroupLimits, draw_id: Callable[[], str], now: Moment) -> Group:
    """The classic group with the same members, all of whom speak the classic protocol; of none, an empty one. Its
    generation is one that they know, so that they commit what they have read before they join again."""
    members = [_classic(member, group) for member in group.members.values()]
    generation_id = max((member.current.epoch for member in group.members.values()), default=group.epoch)
    return Group.adopted(group.group_id, max(1, generation_id), members, limits, draw_id, now)


def _classic(member: ConsumerMember, group: ConsumerGroup) -> Member:
    told = member.subscription
    assert told.classic is not None, "a group goes back when no member speaks the consumer protocol"
    return Member(
        member.member_id,
        told.instance_id,
        told.client_id,
        told.client_host,
        told.rebalance_timeout_ms,
        told.classic.session_timeout_ms,
        told.classic.protocols,
        group.classic_assignment(member),
    )
