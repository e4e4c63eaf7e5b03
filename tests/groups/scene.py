"""A coordinator on a virtual clock and a log in memory, with members that act one step at a time.

Appends are acknowledged at once, or with `held` kept until `acknowledge`, so that a test can stand between an append
and its answer. `take_over` makes the next coordinator from the acknowledged records.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.coordinators.record_fields import Record
from headrace.coordinators.state_log import AppendDone
from headrace.errors import ErrorCode
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.group import Group
from headrace.groups.limits import CoordinatorLimits, GroupLimits
from headrace.groups.messages import (
    CommitRequest,
    JoinReply,
    JoinRequest,
    OffsetToCommit,
    PartitionResult,
    SyncReply,
    SyncRequest,
)
from headrace.virtual.clock import VirtualClock

LIMITS = CoordinatorLimits(GroupLimits(1000, 60_000, max_size=50, initial_rebalance_delay_ms=0))
SESSION_MS = 10_000
REBALANCE_MS = 30_000
GROUP = "g"
TOPIC_ID = b"the topic's id.."

T = TypeVar("T")


class Waiter(Generic[T]):
    """The other end of a reply callback; a second reply is an error."""

    def __init__(self) -> None:
        self.replies: list[T] = []

    def __call__(self, reply: T) -> None:
        assert not self.replies, f"answered twice: {self.replies[0]} and {reply}"
        self.replies.append(reply)

    @property
    def answered(self) -> bool:
        return bool(self.replies)

    @property
    def reply(self) -> T:
        assert self.replies, "not answered"
        return self.replies[0]


@dataclass(slots=True)
class Scene:
    limits: CoordinatorLimits = LIMITS
    partitions: int = 1
    clock: VirtualClock = field(default_factory=VirtualClock)
    held: bool = False
    log: dict[int, list[Record]] = field(default_factory=dict)
    on_the_way: list[tuple[int, list[Record], AppendDone]] = field(default_factory=list)
    coordinator: GroupCoordinator = field(init=False)
    ids: Callable[[], str] = field(init=False)
    topics: dict[str, bytes | None] = field(default_factory=dict)
    """Ids of topics, None for one that is not there; all others are there, and have one."""

    def __post_init__(self) -> None:
        numbers = itertools.count(1)
        self.ids = lambda: f"{next(numbers)}"
        self.coordinator = self._coordinator()
        for partition in range(self.partitions):
            self.coordinator.lead(partition, 0).ready()

    def _coordinator(self) -> GroupCoordinator:
        return GroupCoordinator(self.clock, self.append, self.partitions, self.ids, self.limits, self.topic_id)

    def topic_id(self, name: str) -> bytes | None:
        return self.topics.get(name, TOPIC_ID)

    def append(self, partition: int, _epoch: int, records: list[Record], done: AppendDone) -> None:
        self.on_the_way.append((partition, records, done))
        if not self.held:
            self.acknowledge()

    def acknowledge(self, error_code: int = ErrorCode.NONE) -> None:
        while self.on_the_way:
            partition, records, done = self.on_the_way.pop(0)
            if error_code == ErrorCode.NONE:
                self.log.setdefault(partition, []).extend(records)
            done(error_code)

    def take_over(self) -> GroupCoordinator:
        """The coordinator after this one; this one is asked no more."""
        self.coordinator.close()
        self.coordinator = self._coordinator()
        for partition in range(self.partitions):
            loading = self.coordinator.lead(partition, 0)
            for record in self.log.get(partition, ()):
                loading.replay([record])
            loading.ready()
        return self.coordinator

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def group(self, group_id: str = GROUP) -> Group:
        group = next(s.groups[group_id] for s in self.coordinator._shards.values() if group_id in s.groups)
        assert isinstance(group, Group)
        return group

    def state(self, group_id: str = GROUP) -> str:
        return self.coordinator.describe(group_id).group_state

    def join(
        self,
        member_id: str = "",
        instance: str | None = None,
        *,
        client: str = "c",
        protocols: tuple[tuple[str, bytes], ...] = (("range", b"m"),),
        kind: str = "consumer",
        known: bool = False,
        skips: bool = False,
        session_ms: int = SESSION_MS,
        rebalance_ms: int = REBALANCE_MS,
        group_id: str = GROUP,
    ) -> Waiter[JoinReply]:
        waiter: Waiter[JoinReply] = Waiter()
        request = JoinRequest(
            member_id, instance, client, "/127.0.0.1", session_ms, rebalance_ms, kind, protocols, known, skips
        )
        self.coordinator.join(group_id, request, waiter)
        return waiter

    def sync(
        self,
        joined: JoinReply,
        assignments: dict[str, bytes] | None = None,
        instance: str | None = None,
        group_id: str = GROUP,
    ) -> Waiter[SyncReply]:
        waiter: Waiter[SyncReply] = Waiter()
        request = SyncRequest(
            joined.member_id,
            joined.generation_id,
            instance,
            joined.protocol_type,
            joined.protocol_name,
            tuple((assignments or {}).items()),
        )
        self.coordinator.sync(group_id, request, waiter)
        return waiter

    def beat(self, joined: JoinReply, instance: str | None = None) -> int:
        return self.coordinator.heartbeat(GROUP, joined.member_id, joined.generation_id, instance)

    def commit(
        self,
        offsets: dict[tuple[str, int], int],
        joined: JoinReply | None = None,
        *,
        group_id: str = GROUP,
        metadata: str = "",
        retention_ms: int = -1,
    ) -> Waiter[tuple[PartitionResult, ...]]:
        waiter: Waiter[tuple[PartitionResult, ...]] = Waiter()
        wanted = tuple(
            OffsetToCommit(t, p, offset, 0, metadata, self.topic_id(t)) for (t, p), offset in offsets.items()
        )
        if joined is None:
            request = CommitRequest(wanted, retention_time_ms=retention_ms)
        else:
            request = CommitRequest(wanted, joined.member_id, joined.generation_id, retention_time_ms=retention_ms)
        self.coordinator.commit(group_id, request, waiter)
        return waiter

    def committed(self, group_id: str = GROUP) -> dict[tuple[str, int], int]:
        reply = self.coordinator.fetch_offsets(group_id, None)
        return {(one.topic, one.partition_index): one.committed_offset for one in reply.offsets}

    def stable(self, count: int, *, static: bool = False) -> list[JoinReply]:
        """A stable group of this many members, the leader first; member n has the assignment b"n"."""
        members: list[JoinReply] = []
        for number in range(count):
            new = self.join(instance=f"i{number}" if static else None, client=f"c{number}")
            again = [
                self.join(member.member_id, f"i{n}" if static else None, client=f"c{n}")
                for n, member in enumerate(members)
            ]
            members = [waiter.reply for waiter in (*again, new)]
        leader = next(member for member in members if member.member_id == member.leader)
        assignments = {member.member_id: b"%d" % number for number, member in enumerate(members)}
        for number, member in enumerate(members):
            self.sync(member, assignments if member is leader else None, f"i{number}" if static else None)
        assert self.state() == "Stable"
        return members
