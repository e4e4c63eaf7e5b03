"""Requests to groups of the consumer protocol (KIP-848) and share groups (KIP-932), and their replies: plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from headrace.groups.assignors import Assignment
from headrace.groups.consumer_records import MemberSubscription

JOINING: Final = 0
LEAVING: Final = -1
LEAVING_STATIC: Final = -2
"""Member epochs by which a member says what it wants. One that left in the last way comes back soon."""
UNCHANGED: Final = -1


@dataclass(frozen=True, slots=True)
class ConsumerHeartbeat:
    """None, and a rebalance timeout of -1, is what has not changed since the last one."""

    member_id: str
    member_epoch: int
    instance_id: str | None = None
    rack: str | None = None
    rebalance_timeout_ms: int = UNCHANGED
    topics: tuple[str, ...] | None = None
    pattern: str | None = None
    """A regular expression; an empty one ends it."""
    assignor: str | None = None
    owned: Assignment | None = None
    client_id: str = ""
    client_host: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the member says everything, because it joins or has missed an answer: it is told everything too."""
        whole = self.rebalance_timeout_ms != UNCHANGED and self.topics is not None and self.owned is not None
        return whole or self.member_epoch == JOINING

    def tells_of(self, known: MemberSubscription) -> bool:
        """Whether it may change what is known of the member: hardly any heartbeat does."""
        told = (self.rack, self.topics, self.pattern, self.assignor) != (None, None, None, None)
        return told or self.rebalance_timeout_ms != UNCHANGED or self.client_host != known.client_host

    def subscription(self, known: MemberSubscription) -> MemberSubscription:
        """What is known of the member with what it says now."""
        return replace(
            known,
            instance_id=known.instance_id if self.instance_id is None else self.instance_id,
            rack=known.rack if self.rack is None else self.rack,
            client_id=self.client_id,
            client_host=self.client_host,
            topics=known.topics if self.topics is None else tuple(sorted(set(self.topics))),
            pattern=known.pattern if self.pattern is None else self.pattern or None,
            rebalance_timeout_ms=(
                known.rebalance_timeout_ms if self.rebalance_timeout_ms == UNCHANGED else self.rebalance_timeout_ms
            ),
            assignor=known.assignor if self.assignor is None else self.assignor,
            classic=None,
        )


@dataclass(frozen=True, slots=True)
class ShareHeartbeat(ConsumerHeartbeat):
    """Of a member of a share group (KIP-932), which has no instance id, expression or assignor, and owns nothing."""

    @property
    def is_whole(self) -> bool:
        return self.topics is not None or self.member_epoch == JOINING


@dataclass(frozen=True, slots=True)
class ConsumerReply:
    error_code: int
    error_message: str | None = None
    member_id: str | None = None
    member_epoch: int = 0
    heartbeat_interval_ms: int = 0
    assignment: Assignment | None = None
    """None: as the member was told before."""


@dataclass(frozen=True, slots=True)
class DescribedConsumer:
    member_id: str
    instance_id: str | None
    rack: str | None
    member_epoch: int
    client_id: str
    client_host: str
    topics: tuple[str, ...]
    pattern: str | None
    assigned: Assignment
    target: Assignment
    is_classic: bool


@dataclass(frozen=True, slots=True)
class DescribedConsumerGroup:
    error_code: int
    group_id: str
    error_message: str | None = None
    group_state: str = ""
    group_epoch: int = 0
    assignment_epoch: int = 0
    assignor: str = ""
    members: tuple[DescribedConsumer, ...] = ()
