"""A consumer group of the classic protocol as a state table. No I/O: events come in, actions go out.

A join or sync that cannot be answered yet leaves its ticket, an opaque waiter of the caller's, with its member; every
ticket comes back exactly once in an `Answer`. `Store` asks the caller to make a snapshot durable and then to call
`stored`. Time is an argument. `next_deadline` is never later than the earliest of the group's deadlines: call
`expire` then. It may be earlier, because a heartbeat does not look for the next one.

What the rules are: KIP-62 (rebalance and session timeouts), KIP-134 (a first rebalance waits for more members),
KIP-345 (static members), KIP-394 (a member id before membership), KIP-814 (a returning static leader keeps the
assignment).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from headrace.coordinators.alarms import NEVER
from headrace.coordinators.record_fields import Record
from headrace.errors import ErrorCode
from headrace.groups.consumer_messages import ConsumerReply
from headrace.groups.consumer_protocol import CONSUMER
from headrace.groups.limits import GroupLimits
from headrace.groups.member import Member, select_protocol
from headrace.groups.messages import (
    CommitRequest,
    JoinReply,
    JoinRequest,
    Leaver,
    LeaveReply,
    LeftMember,
    SyncReply,
    SyncRequest,
)
from headrace.groups.records import GroupSnapshot, encode_group_key
from headrace.groups.roster import Roster


@dataclass(frozen=True, slots=True)
class Moment:
    """Monotonic seconds for deadlines, milliseconds since 1970 for what is stored."""

    seconds: float
    wall_ms: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Hand the reply to the waiter that came with the request."""

    ticket: object
    reply: JoinReply | SyncReply | ConsumerReply


@dataclass(frozen=True, slots=True)
class Store:
    """Make the snapshot durable, then call `stored` with this. `joined` and its ticket wait for that alone."""

    snapshot: GroupSnapshot
    joined: JoinReply | None = None
    ticket: object | None = None


Action = Answer | Store


class State(Enum):
    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class Cause(Enum):
    """Why a group changes its state."""

    DISTURBED = "a member came, left, fell silent or changed its protocols"
    JOINED = "all members have joined, or the rebalance timeout is over"
    DESERTED = "nobody is left to join"
    ASSIGNED = "the leader's assignment is stored"
    REMOVED = "the group was deleted, expired or moved to another broker"


TRANSITIONS: Final = {
    State.EMPTY: {Cause.DISTURBED: State.PREPARING, Cause.REMOVED: State.DEAD},
    State.PREPARING: {Cause.JOINED: State.COMPLETING, Cause.DESERTED: State.EMPTY, Cause.REMOVED: State.DEAD},
    State.COMPLETING: {Cause.ASSIGNED: State.STABLE, Cause.DISTURBED: State.PREPARING, Cause.REMOVED: State.DEAD},
    State.STABLE: {Cause.DISTURBED: State.PREPARING, Cause.REMOVED: State.DEAD},
    State.DEAD: {},
}

NEW_MEMBER_TIMEOUT_SECONDS: Final = 300.0
"""How long a member that was never answered may wait for its first rebalance."""
CLIENT_ID_IN_MEMBER_ID_MAX: Final = 255


class RebalanceDelay:
    """How long a rebalance waits for members to join. A first one, of an empty group, always waits a little, because
    more members are likely on their way, and a little more each time that one came (KIP-134), up to the rebalance
    timeout. Any other ends as soon as all have joined."""

    def __init__(self) -> None:
        self.deadline = NEVER
        self.first_round = False
        self.grew = False
        """A member came since the present wait began."""
        self._delay_ms = 0
        self._left_ms = 0

    def begin(self, now_seconds: float, timeout_ms: int) -> None:
        self.first_round = False
        self.deadline = now_seconds + timeout_ms / 1000

    def begin_first_round(self, now_seconds: float, timeout_ms: int, delay_ms: int) -> None:
        self._delay_ms, self._left_ms = delay_ms, timeout_ms
        self.first_round = True
        self._wait_on(now_seconds)

    def renew(self, now_seconds: float) -> bool:
        """The deadline has come; true if the wait goes on."""
        if not (self.first_round and self.grew and self._left_ms > 0):
            return False
        self._wait_on(now_seconds)
        return True

    def end(self) -> None:
        self.first_round = False
        self.deadline = NEVER

    def _wait_on(self, now_seconds: float) -> None:
        delay_ms = min(self._delay_ms, self._left_ms)
        self._left_ms -= delay_ms
        self.grew = False
        self.deadline = now_seconds + delay_ms / 1000


class Group:
    group_type: Final = "classic"

    def __init__(self, group_id: str, limits: GroupLimits, draw_id: Callable[[], str], now: Moment) -> None:
        self.group_id = group_id
        self.state = State.EMPTY
        self.state_since_ms = now.wall_ms
        self.generation_id = 0
        self.protocol_name: str | None = None
        self.roster = Roster()
        self.next_deadline = NEVER
        self._limits = limits
        self._draw_id = draw_id
        self._delay = RebalanceDelay()
        self._unsynced: set[str] = set()
        """Members that were told of the generation and have not asked for their assignment."""
        self._sync_deadline = NEVER
        self._storing = False
        """The assignment of this generation is on its way to the log."""
        self._actions: list[Action] = []

    @classmethod
    def restored(cls, kept: GroupSnapshot, limits: GroupLimits, draw_id: Callable[[], str], now: Moment) -> Group:
        """The group as its record says; every session begins anew."""
        group = cls(kept.group_id, limits, draw_id, now)
        group.generation_id = kept.generation_id
        group.roster.protocol_type = kept.protocol_type or None
        group.protocol_name = kept.protocol_name
        for one in kept.members:
            group._hear(group.roster.restore(one, kept.protocol_name), now)
        group.roster.leader = kept.leader
        if group.roster:
            group.state = State.STABLE
        if kept.state_since_ms >= 0:
            group.state_since_ms = kept.state_since_ms
        return group

    @classmethod
    def adopted(
        cls,
        group_id: str,
        generation_id: int,
        members: Iterable[Member],
        limits: GroupLimits,
        draw_id: Callable[[], str],
        now: Moment,
    ) -> Group:
        """A group that was of another protocol, with those members that speak this one."""
        group = cls(group_id, limits, draw_id, now)
        group.generation_id = generation_id
        for member in members:
            group.roster.add(member)
            group._hear(member, now)
        if group.roster:
            group.roster.protocol_type = CONSUMER
            group.protocol_name = select_protocol(group.roster.members.values())
            group.state = State.STABLE
        return group

    def snapshot(self, assignments: dict[str, bytes] | None = None) -> GroupSnapshot:
        """What is kept of the group, with these assignments or the ones that it has."""
        return GroupSnapshot(
            self.group_id,
            self.protocol_type or "",
            self.generation_id,
            self.protocol_name,
            self.roster.leader,
            self.state_since_ms,
            self.roster.snapshot(self.protocol_name, assignments),
        )

    @property
    def protocol_type(self) -> str | None:
        return self.roster.protocol_type

    @property
    def is_dead(self) -> bool:
        return self.state is State.DEAD

    @property
    def is_empty(self) -> bool:
        return self.state is State.EMPTY

    @property
    def is_vacant(self) -> bool:
        """Whether nobody is in it, or about to be."""
        return self.state is State.EMPTY and not self.roster.pending

    @property
    def state_name(self) -> str:
        return self.state.value

    def tombstones(self) -> list[Record]:
        """What removes the group itself from the log."""
        return [(encode_group_key(self.group_id), None)] if self.generation_id > 0 else []

    @property
    def never_used(self) -> bool:
        """Nothing of it is in the log and nobody is in it."""
        return self.state is State.EMPTY and self.generation_id == 0 and not self.roster.pending

    # Joining

    def join(self, ticket: object, request: JoinRequest, now: Moment) -> Sequence[Action]:
        dead = self.state is State.DEAD
        fault = ErrorCode.COORDINATOR_NOT_AVAILABLE if dead else self.roster.admission_fault(request, self._limits)
        if fault != ErrorCode.NONE:
            self._answer(ticket, JoinReply(fault, request.member_id))
        elif request.member_id:
            self._join_known(ticket, request, now)
        else:
            self._join_unknown(ticket, request, now)
        return self._drain()

    def _join_unknown(self, ticket: object, request: JoinRequest, now: Moment) -> None:
        instance_id = request.group_instance_id
        member_id = f"{instance_id or request.client_id[:CLIENT_ID_IN_MEMBER_ID_MAX]}-{self._draw_id()}"
        if instance_id is not None and instance_id in self.roster.static:
            self._replace_static(ticket, member_id, instance_id, request, now)
        elif instance_id is None and request.require_known_member_id:
            deadline = now.seconds + request.session_timeout_ms / 1000
            self.roster.pending[member_id] = deadline
            self._note_deadline(deadline)
            self._answer(ticket, JoinReply(ErrorCode.MEMBER_ID_REQUIRED, member_id))
        else:
            self._join_as_new(ticket, member_id, request, now)

    def _join_known(self, ticket: object, request: JoinRequest, now: Moment) -> None:
        if request.group_instance_id is None and self.roster.pending.pop(request.member_id, None) is not None:
            self._join_as_new(ticket, request.member_id, request, now)
            return
        fault = self.roster.fault(request.member_id, request.group_instance_id)
        if fault != ErrorCode.NONE:
            self._answer(ticket, JoinReply(fault, request.member_id))
            return
        member = self.roster.members[request.member_id]
        leads = member.member_id == self.roster.leader
        told = self.state is State.COMPLETING or (self.state is State.STABLE and not leads)
        if told and member.protocols == request.protocols:
            self._hear(member, now)
            self._answer(ticket, self._joined(member))
            return
        member.update(request)
        self._wait_for_join(ticket, member)
        self._disturb(now)

    def _join_as_new(self, ticket: object, member_id: str, request: JoinRequest, now: Moment) -> None:
        member = Member.joining(member_id, request, now.seconds + NEW_MEMBER_TIMEOUT_SECONDS)
        self.roster.add(member)
        self._note_deadline(member.deadline)
        self.roster.protocol_type = request.protocol_type
        self._delay.grew = True
        self._wait_for_join(ticket, member)
        self._disturb(now)

    def _replace_static(
        self, ticket: object, member_id: str, instance_id: str, request: JoinRequest, now: Moment
    ) -> None:
        """A static member came back under a new id: the old id is fenced, the assignment stays if it can."""
        leader_before = self.roster.leader
        member = self.roster.members[self.roster.static[instance_id]]
        self._dismiss(member, ErrorCode.FENCED_INSTANCE_ID)
        self._unsynced.discard(member.member_id)
        self.roster.rename(member, member_id)
        member.update(request)
        self._hear(member, now)
        if self.state is not State.STABLE or select_protocol(self.roster.members.values()) != self.protocol_name:
            self._wait_for_join(ticket, member)
            self._disturb(now)
            return
        reply = self._joined(member)
        if request.supports_skipping_assignment:
            reply = replace(reply, skip_assignment=self.roster.leader == member_id)
        else:
            # A client that cannot be told to skip the assignment must not believe that it leads.
            reply = replace(reply, leader=leader_before or "", members=())
        self._actions.append(Store(self.snapshot(), reply, ticket))

    def _wait_for_join(self, ticket: object, member: Member) -> None:
        if member.join_ticket is not None:
            self._answer(member.join_ticket, JoinReply(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id))
        member.join_ticket = ticket

    # Rebalancing

    def _disturb(self, now: Moment) -> None:
        """Make all members join again, or let a rebalance under way see whether it can end."""
        if self.state is not State.PREPARING:
            self._reset_syncs(ErrorCode.REBALANCE_IN_PROGRESS, now)
            timeout_ms, delay_ms = self.roster.rebalance_timeout_ms(), self._limits.initial_rebalance_delay_ms
            if self.state is State.EMPTY and delay_ms > 0:
                self._delay.begin_first_round(now.seconds, timeout_ms, delay_ms)
            else:
                self._delay.begin(now.seconds, timeout_ms)
            self._note_deadline(self._delay.deadline)
            self._move(Cause.DISTURBED, now)
        if not self._delay.first_round and self.roster.all_joined():
            self._complete_join(now)

    def _complete_join(self, now: Moment) -> None:
        """End the rebalance with those who have joined. Static members who have not keep their place."""
        for member in list(self.roster.members.values()):
            if member.join_ticket is None and member.group_instance_id is None:
                self._remove(member, ErrorCode.UNKNOWN_MEMBER_ID)
        joined = self.roster.joined()
        if self.roster and not joined:
            least_ms = self._limits.min_session_timeout_ms
            self._delay.begin(now.seconds, max(self.roster.rebalance_timeout_ms(), least_ms))
            return
        self._delay.end()
        self.generation_id += 1
        if joined:
            self.roster.elect(joined)
            self.protocol_name = select_protocol(self.roster.members.values())
            self._move(Cause.JOINED, now)
            self._tell_joined(joined, now)
        else:
            self.protocol_name = None
            self._move(Cause.DESERTED, now)
            self._actions.append(Store(self.snapshot()))

    def _tell_joined(self, joined: Sequence[Member], now: Moment) -> None:
        for member in joined:
            self._answer(member.join_ticket, self._joined(member))
            member.join_ticket = None
            member.is_new = False
            self._hear(member, now)
        self._unsynced = {member.member_id for member in joined}
        self._sync_deadline = now.seconds + self.roster.rebalance_timeout_ms() / 1000
        self._note_deadline(self._sync_deadline)

    def _joined(self, member: Member) -> JoinReply:
        leads = member.member_id == self.roster.leader
        return JoinReply(
            ErrorCode.NONE,
            member.member_id,
            self.generation_id,
            self.protocol_type,
            self.protocol_name,
            self.roster.leader or "",
            members=self.roster.metadata(self.protocol_name) if leads else (),
        )

    # Syncing

    def sync(self, ticket: object, request: SyncRequest, now: Moment) -> Sequence[Action]:
        fault = self._sync_fault(request)
        if fault != ErrorCode.NONE:
            self._answer(ticket, SyncReply(fault))
            return self._drain()
        member = self.roster.members[request.member_id]
        self._unsynced.discard(member.member_id)
        self._hear(member, now)
        if self.state is State.STABLE:
            self._answer(ticket, self._synced(member))
            return self._drain()
        if member.sync_ticket is not None:
            self._answer(member.sync_ticket, SyncReply(ErrorCode.REBALANCE_IN_PROGRESS))
        member.sync_ticket = ticket
        if member.member_id == self.roster.leader and not self._storing:
            self._storing = True
            self._actions.append(Store(self.snapshot(dict(request.assignments))))
        return self._drain()

    def _sync_fault(self, request: SyncRequest) -> int:
        fault = self._fault(request.member_id, request.group_instance_id, request.generation_id)
        if fault != ErrorCode.NONE:
            return fault
        same_type = request.protocol_type in (None, self.protocol_type)
        if not same_type or request.protocol_name not in (None, self.protocol_name):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        return ErrorCode.REBALANCE_IN_PROGRESS if self.state is State.PREPARING else ErrorCode.NONE

    def stored(self, store: Store, error_code: int, now: Moment) -> Sequence[Action]:
        """What a `Store` asked for is durable, or failed with this code."""
        if store.joined is not None:
            failed = JoinReply(error_code, store.joined.member_id)
            self._answer(store.ticket, store.joined if error_code == ErrorCode.NONE else failed)
        elif self.state is State.COMPLETING and store.snapshot.generation_id == self.generation_id:
            if error_code == ErrorCode.NONE:
                self._assign(store.snapshot, now)
            else:
                self._reset_syncs(error_code, now)
                self._disturb(now)
        return self._drain()

    def _assign(self, stored: GroupSnapshot, now: Moment) -> None:
        assignments = {member.member_id: member.assignment for member in stored.members}
        self._storing = False
        self._move(Cause.ASSIGNED, now)
        for member in self.roster.members.values():
            member.assignment = assignments.get(member.member_id, b"")
            if member.sync_ticket is not None:
                self._answer(member.sync_ticket, self._synced(member))
                member.sync_ticket = None
                self._hear(member, now)

    def _synced(self, member: Member) -> SyncReply:
        return SyncReply(ErrorCode.NONE, self.protocol_type, self.protocol_name, member.assignment)

    def _reset_syncs(self, error_code: int, now: Moment) -> None:
        """Whoever waits for an assignment of this generation will not get it."""
        self._unsynced.clear()
        self._sync_deadline = NEVER
        self._storing = False
        for member in self.roster.members.values():
            if self.state is State.COMPLETING:
                member.assignment = b""
            if member.sync_ticket is not None:
                self._answer(member.sync_ticket, SyncReply(error_code))
                member.sync_ticket = None
                self._hear(member, now)

    def rebalance(self, now: Moment) -> Sequence[Action]:
        """Make all members join again."""
        self._disturb(now)
        return self._drain()

    # Staying and leaving

    def heartbeat(self, member_id: str, instance_id: str | None, generation_id: int, now: Moment) -> int:
        fault = self._fault(member_id, instance_id, generation_id)
        if fault != ErrorCode.NONE:
            return fault
        self._hear(self.roster.members[member_id], now)
        return ErrorCode.REBALANCE_IN_PROGRESS if self.state is State.PREPARING else ErrorCode.NONE

    def commit_fault(self, request: CommitRequest, now: Moment, *, in_transaction: bool = False) -> int:
        """Why this member may not commit now, or NONE; its session goes on. In a transaction a producer may commit that
        names no member, as old ones do not (KIP-447), and so may a member while its group rebalances."""
        if request.generation_id < 0 and self.state is State.EMPTY:
            return ErrorCode.NONE
        unnamed = request.generation_id < 0 and not request.member_id and request.group_instance_id is None
        if in_transaction and unnamed and self.state is not State.DEAD:
            return ErrorCode.NONE
        fault = self._fault(request.member_id, request.group_instance_id, request.generation_id)
        if fault != ErrorCode.NONE:
            return fault
        self._hear(self.roster.members[request.member_id], now)
        rebalancing = self.state is State.COMPLETING and not in_transaction
        return ErrorCode.REBALANCE_IN_PROGRESS if rebalancing else ErrorCode.NONE

    def leave(self, leavers: Iterable[Leaver], now: Moment) -> tuple[LeaveReply, Sequence[Action]]:
        if self.state is State.DEAD:
            return LeaveReply(ErrorCode.COORDINATOR_NOT_AVAILABLE), ()
        members_before = len(self.roster)
        left = tuple(LeftMember(one.member_id, one.group_instance_id, self._leave_one(one)) for one in leavers)
        self._after_removal(len(self.roster) < members_before, now)
        return LeaveReply(ErrorCode.NONE, left), self._drain()

    def _leave_one(self, leaver: Leaver) -> int:
        if leaver.group_instance_id is None and self.roster.pending.pop(leaver.member_id, None) is not None:
            return ErrorCode.NONE
        member_id = leaver.member_id or self.roster.static.get(leaver.group_instance_id or "", "")
        fault = self.roster.fault(member_id, leaver.group_instance_id)
        if fault == ErrorCode.NONE:
            self._remove(self.roster.members[member_id], ErrorCode.UNKNOWN_MEMBER_ID)
        return fault

    def remove(self, error_code: int, now: Moment) -> Sequence[Action]:
        """The group ends here; everyone who waits is told this code."""
        for member in list(self.roster.members.values()):
            self._remove(member, error_code)
        self.roster.pending.clear()
        self._delay.end()
        self._sync_deadline = self.next_deadline = NEVER
        self._move(Cause.REMOVED, now)
        return self._drain()

    # Time

    def expire(self, now: Moment) -> Sequence[Action]:
        """Act on every deadline that has come."""
        roster = self.roster
        lapsed = [member_id for member_id, deadline in roster.pending.items() if deadline <= now.seconds]
        for member_id in lapsed:
            del roster.pending[member_id]
        gone = [one for one in roster.members.values() if one.deadline <= now.seconds and not one.waiting]
        if self._sync_deadline <= now.seconds:
            gone += [roster.members[member_id] for member_id in self._unsynced if roster.members[member_id] not in gone]
            self._sync_deadline = NEVER
        for member in gone:
            self._remove(member, ErrorCode.UNKNOWN_MEMBER_ID)
        self._after_removal(bool(gone), now)
        if self._delay.deadline <= now.seconds and not self._delay.renew(now.seconds):
            self._complete_join(now)
        self.next_deadline = min(self._delay.deadline, self._sync_deadline, roster.earliest_deadline())
        return self._drain()

    def _after_removal(self, members_left: bool, now: Moment) -> None:
        """A lapsed id disturbs nobody, but a rebalance under way may have waited for it alone."""
        if members_left or self.state is State.PREPARING:
            self._disturb(now)

    def _note_deadline(self, deadline: float) -> None:
        self.next_deadline = min(self.next_deadline, deadline)

    def _hear(self, member: Member, now: Moment) -> None:
        member.heard(now.seconds)
        self._note_deadline(member.deadline)

    # Parts of the above

    def _fault(self, member_id: str, instance_id: str | None, generation_id: int) -> int:
        if self.state is State.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        fault = self.roster.fault(member_id, instance_id)
        if fault == ErrorCode.NONE and generation_id != self.generation_id:
            return ErrorCode.ILLEGAL_GENERATION
        return fault

    def _remove(self, member: Member, error_code: int) -> None:
        self._dismiss(member, error_code)
        self._unsynced.discard(member.member_id)
        self.roster.remove(member)

    def _dismiss(self, member: Member, error_code: int) -> None:
        """Answer whatever the member waits for."""
        if member.join_ticket is not None:
            self._answer(member.join_ticket, JoinReply(error_code, member.member_id))
        if member.sync_ticket is not None:
            self._answer(member.sync_ticket, SyncReply(error_code))
        member.join_ticket = member.sync_ticket = None

    def _move(self, cause: Cause, now: Moment) -> None:
        self.state = TRANSITIONS[self.state][cause]
        self.state_since_ms = now.wall_ms

    def _answer(self, ticket: object, reply: JoinReply | SyncReply) -> None:
        self._actions.append(Answer(ticket, reply))

    def _drain(self) -> Sequence[Action]:
        actions, self._actions = self._actions, []
        return actions
