"""When a committed offset is no longer kept. Pure.

Retention counts, for a group that had members, from when it became empty; for a group that never had (it only
commits), from the commit. While a consumer group is stable, offsets of topics that it no longer subscribes to count
from their commit, and the others are in use. Offsets of an earlier topic of that name count from their commit in any
group. A client of an old version may have set the end itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.groups.group import Group, State
from headrace.groups.offsets import NO_EXPIRY, OffsetAndMetadata, OffsetKey, TopicId
from headrace.groups.subscription import CONSUMER, subscribed


def subscribed_topics(group: Group) -> frozenset[str] | None:
    """None when any topic may be in use."""
    if group.protocol_type != CONSUMER or group.protocol_name is None:
        return None
    return subscribed(member.metadata(group.protocol_name) for member in group.roster.members.values())


def expired(
    group: Group,
    offsets: Mapping[tuple[str, int], OffsetAndMetadata],
    now_ms: int,
    retention_ms: int,
    topic_id: TopicId,
) -> list[OffsetKey]:
    topics = subscribed_topics(group) if group.state is State.STABLE else None
    keys = []
    for (topic, partition), committed in offsets.items():
        if committed.expiry_ms != NO_EXPIRY:
            over = committed.expiry_ms <= now_ms
        elif not committed.is_of(topic_id(topic)):
            over = now_ms - committed.commit_ms >= retention_ms
        elif group.state is State.EMPTY:
            base_ms = committed.commit_ms if group.protocol_type is None else group.state_since_ms
            over = now_ms - base_ms >= retention_ms
        else:
            unused = topics is not None and topic not in topics
            over = unused and now_ms - committed.commit_ms >= retention_ms
        if over:
            keys.append(OffsetKey(group.group_id, topic, partition))
    return keys
