"""A group whose coordinator assigns the partitions, as a state table without I/O: what groups of the consumer protocol
(KIP-848, `groups/consumer_group.py`) and share groups (KIP-932, `groups/share_group.py`) have in common.

The group has an epoch, raised when its members or their topics change; a target assignment with an epoch of its own,
computed once for each raise; and what each member was told of it. A heartbeat that changes nothing is answered at once
and looks at nothing but its member. One that raises the epoch waits until the target is computed: at the end of the
turn, together with all others that came in it, and in a large group not before its last computing was paid off by a
pause.

What is kept are records by key (`groups/consumer_records.py`, `groups/share_records.py`). A change marks keys; `settle`
hands out a `Write` with what they stand for at that moment, and whoever was answered by such a change hears it when the
write is `written`. A write that fails leaves its keys marked: memory goes on, and the log follows with the next.
Sessions and what is under way are not kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from headrace.coordinators.alarms import NEVER
from headrace.coordinators.record_fields import Record
from headrace.errors import ErrorCode
from headrace.groups import consumer_records as records
from headrace.groups.assignors import NOTHING, AssignedTopic, Assignment, Subscriber
from headrace.groups.consumer_member import ConsumerMember
from headrace.groups.consumer_messages import JOINING, LEAVING, LEAVING_STATIC, ConsumerHeartbeat, ConsumerReply
from headrace.groups.consumer_records import (
    ConsumerGroupKey,
    CurrentAssignment,
    GroupEpoch,
    GroupPieces,
    Kinds,
    MemberSubscription,
    RecordKind,
)
from headrace.groups.group import Answer, Moment
from headrace.groups.messages import JoinReply, SyncReply
from headrace.groups.topic_catalog import TopicCatalog

COMPUTE_SECONDS_PER_MEMBER: Final = 20e-6
COMPUTE_SECONDS_PER_PARTITION: Final = 5e-6
COMPUTE_SHARE: Final = 0.2
"""Of the time that computing targets of one group may take, as far as it is estimated."""
RETRY_SECONDS: Final = 0.5
"""Between a write that failed and the next."""
COMPUTE_UNNOTICED_SECONDS: Final = 0.005
"""Groups that are computed in less do it in every turn that asks for it."""

Reply = ConsumerReply | JoinReply | SyncReply


@dataclass(frozen=True, slots=True)
class Timing:
    """Of the members of one group whose heartbeats are the group's own."""

    session_timeout_ms: int
    heartbeat_interval_ms: int


@dataclass(slots=True)
class Write:
    """Records to append; `written` with this and the code when it is known."""

    number: int
    records: list[Record]
    keys: frozenset[ConsumerGroupKey]
    members: list[ConsumerMember]
    ends_classic: bool = False


@dataclass(slots=True)
class Parked:
    """A request that waits for a target assignment."""

    ticket: object
    member: ConsumerMember
    owned: Assignment | None
    assigned: Assignment | None
    """What the member was told before, None if it has to be told in any case."""


class ModernGroup(ABC):
    group_type: ClassVar[str]
    protocol_type: ClassVar[str]
    kinds: ClassVar[Kinds]

    def __init__(
        self,
        group_id: str,
        catalog: TopicCatalog,
        timing: Callable[[], Timing],
        draw_id: Callable[[], str],
        now: Moment,
    ) -> None:
        self.group_id = group_id
        self.epoch = 0
        self.target_epoch = 0
        self.target: dict[str, Assignment] = {}
        self.assignor = ""
        """That computed the target."""
        self.members: dict[str, ConsumerMember] = {}
        self.topics: frozenset[str] = frozenset()
        """Names that members subscribe to, as far as expressions stand for any; as of the last raise of the epoch."""
        self.empty_since_ms = now.wall_ms
        self.next_deadline = NEVER
        self.is_dead = False
        self._catalog = catalog
        self._timing = timing
        self._draw_id = draw_id
        self._topics_hash = 0
        self._compute_at = 0.0
        self._write_at = 0.0
        """After a write that failed the next one waits."""
        self._marked: dict[ConsumerGroupKey, None] = {}
        """Keys whose records are not written as they are now, in the order in which they changed."""
        self._touched: dict[ConsumerMember, None] = {}
        self._parked: list[Parked] = []
        self._write = 1
        """Number of the next write."""
        self._waiting: dict[int, list[tuple[object, Reply]]] = {1: []}
        """Answers that are given when their write is done."""
        self._answers: list[Answer] = []

    def _restore(self, pieces: GroupPieces, now: Moment) -> None:
        """Be as the records say; every session begins anew."""
        kept = pieces.epoch or GroupEpoch(0)
        self.epoch, self._topics_hash = kept.epoch, kept.topics_hash
        self.target_epoch = min(pieces.target_epoch, kept.epoch)
        if kept.empty_since_ms >= 0:
            self.empty_since_ms = kept.empty_since_ms
        for member_id, subscription in pieces.members.items():
            member = ConsumerMember(member_id, subscription)
            self._enter(member)
            self._hold(member, pieces.current.get(member_id, member.current))
            self.target[member_id] = pieces.targets.get(member_id, NOTHING)
            self._hear(member, now)

    # What it is

    @property
    @abstractmethod
    def state_name(self) -> str: ...

    @property
    def is_empty(self) -> bool:
        return not self.members and not self.is_dead

    @property
    def is_vacant(self) -> bool:
        """Whether nobody is in it, or about to be."""
        return self.is_empty

    @property
    def never_used(self) -> bool:
        """Nothing of it is in the log and nobody is in it."""
        return not self.members and not self.epoch

    @property
    def state_since_ms(self) -> int:
        """Of an empty group."""
        return self.empty_since_ms

    @property
    def unsettled(self) -> bool:
        """Whether `settle` has something to do."""
        behind = self.epoch > self.target_epoch
        return not self.is_dead and bool(behind or self._marked or self._parked or self._waiting[self._write])

    @property
    def settle_at(self) -> float:
        """When: a target assignment may have to wait, and a write after one that failed."""
        return self._write_at if self._marked or self._waiting[self._write] else max(self._compute_due, self._write_at)

    @property
    def _compute_due(self) -> float:
        """From when on a target may be computed."""
        return self._compute_at

    def answers(self) -> Sequence[Answer]:
        """Answers that can be given now; each once."""
        found, self._answers = self._answers, []
        return found

    # Heartbeats

    def heartbeat(self, ticket: object, request: ConsumerHeartbeat, now: Moment) -> None:
        """The group's own members, and such as want to be."""
        if request.member_epoch in (LEAVING, LEAVING_STATIC):
            self._leave(ticket, request, now)
            return
        fault = self._heartbeat_fault(request)
        if fault is not None:
            self._answers.append(Answer(ticket, fault))
        else:
            self._take(ticket, request, now)

    def _take(self, ticket: object, request: ConsumerHeartbeat, now: Moment) -> None:
        count = len(self.members)
        member = self.members.get(request.member_id)
        if request.member_epoch == JOINING:
            member = self._joining(request.member_id or self._draw_id(), request.instance_id)
        assert member is not None, "a heartbeat without a fault has its member"
        assigned = None if self._has_to_tell(request, member) else member.current.assigned
        changed = len(self.members) > count
        if request.tells_of(member.subscription):
            changed |= self._subscribe(member, request.subscription(member.subscription))
        if changed:
            self._raise_epoch(now)
        self._hear(member, now)
        is_new = member.current.epoch <= JOINING or member.write == self._write
        if self.epoch > self.target_epoch and is_new:
            self._parked.append(Parked(ticket, member, request.owned, assigned))
        else:
            self._answer_heartbeat(ticket, member, request.owned, assigned, now)

    def _answer_heartbeat(
        self, ticket: object, member: ConsumerMember, owned: Assignment | None, assigned: Assignment | None, now: Moment
    ) -> None:
        """`assigned`: what the member is known to have been told; None if it has to be told in any case."""
        self._reconcile(member, owned, now)
        current = member.current
        same = assigned is current.assigned or (assigned is not None and assigned == current.assigned)
        told = None if same else current.assigned
        interval_ms = self._timing().heartbeat_interval_ms
        reply = ConsumerReply(ErrorCode.NONE, None, member.member_id, current.epoch, interval_ms, told)
        self._answer_after(ticket, reply, member)

    def _heartbeat_fault(self, request: ConsumerHeartbeat) -> ConsumerReply | None:
        if request.member_epoch == JOINING:
            return self._joining_fault(request)
        fault = self._member_fault(request)
        if fault != ErrorCode.NONE:
            return self._no_member(request, fault)
        current = self.members[request.member_id].current
        if request.member_epoch == current.epoch:
            return None
        if request.member_epoch == current.previous_epoch < current.epoch and self._may_repeat(request, current):
            return None
        reason = f"member epoch {request.member_epoch} is not {current.epoch}: give up all partitions and join again"
        return ConsumerReply(ErrorCode.FENCED_MEMBER_EPOCH, reason)

    def _joining_fault(self, request: ConsumerHeartbeat) -> ConsumerReply | None:
        if request.member_id in self.members or len(self.members) < self._max_size():
            return None
        reason = f"group {self.group_id} has {len(self.members)} members, as many as it may have"
        return ConsumerReply(ErrorCode.GROUP_MAX_SIZE_REACHED, reason)

    def _member_fault(self, request: ConsumerHeartbeat) -> int:
        """Why who says this is no member, or NONE."""
        return ErrorCode.NONE if request.member_id in self.members else ErrorCode.UNKNOWN_MEMBER_ID

    def _no_member(self, request: ConsumerHeartbeat, fault: int) -> ConsumerReply:
        return ConsumerReply(fault, f"{request.member_id} is no member of group {self.group_id}")

    @abstractmethod
    def _may_repeat(self, request: ConsumerHeartbeat, current: CurrentAssignment) -> bool:
        """Whether a member that speaks in the epoch before its own may have missed the answer that told it."""

    def _has_to_tell(self, request: ConsumerHeartbeat, _member: ConsumerMember) -> bool:
        """Whether the member is told its assignment though it has not changed."""
        return request.is_whole

    @abstractmethod
    def _max_size(self) -> int: ...

    def _joining(self, member_id: str, _instance_id: str | None) -> ConsumerMember:
        """A new member, or one that joins again."""
        member = self.members.get(member_id)
        if member is None:
            member = ConsumerMember(member_id)
            self._admit(member, NOTHING)
        return member

    def _admit(self, member: ConsumerMember, target: Assignment) -> None:
        self._enter(member)
        self.target[member.member_id] = target
        self._mark_member(member, self.kinds.member, self.kinds.target, self.kinds.current)

    def _leave(self, ticket: object, request: ConsumerHeartbeat, now: Moment) -> None:
        fault = self._member_fault(request)
        if fault != ErrorCode.NONE:
            self._answers.append(Answer(ticket, self._no_member(request, fault)))
            return
        self._depart(self.members[request.member_id], request.member_epoch, now)
        reply = ConsumerReply(ErrorCode.NONE, None, request.member_id, request.member_epoch)
        self._waiting[self._write].append((ticket, reply))

    def _depart(self, member: ConsumerMember, _member_epoch: int, now: Moment) -> None:
        self._remove((member,), now)

    # Topics

    def topics_changed(self, names: frozenset[str] | None, now: Moment) -> None:
        """Topics of these names came, went or changed; None: any may have."""
        if not self.members or self.is_dead or self.epoch > self.target_epoch:
            return
        if names is not None and names.isdisjoint(self.topics) and not self._patterns_differ():
            return
        before = self._topics_hash
        self._look_at_topics()
        if self._topics_hash != before:
            self._raise_epoch(now)

    def _look_at_topics(self) -> None:
        """Which topics the members subscribe to now, and whether they are as they were."""
        found = set(self._matching_topics())
        for topics in {member.subscription.topics for member in self.members.values()}:
            found.update(topics)
        self.topics = frozenset(found)
        self._topics_hash = self._catalog.digest(found)

    def _patterns_differ(self) -> bool:
        """Whether an expression stands for other topics now."""
        return False

    def _matching_topics(self) -> frozenset[str]:
        """Names that expressions of members stand for now."""
        return frozenset()

    # The target assignment

    def settle(self, now: Moment) -> Write | None:
        """Compute the target if it is time, go on with who waits for it, and say what is to be written, if anything
        is. Called at the end of a turn, and when the pause after a large target is over."""
        if now.seconds < self._write_at:
            self._note_deadline(self._write_at)
            return None
        if self.epoch > self.target_epoch and now.seconds >= self._compute_due:
            self._compute(now)
        if self.epoch > self.target_epoch:
            self._note_deadline(self._compute_due)
        else:
            self._go_on(now)
        if not self._marked:
            self._give_what_waits()
            return None
        keys, self._marked = frozenset(self._marked), {}
        members, self._touched = list(self._touched), {}
        found = [(records.encode_key(key), self._value(key)) for key in sorted(keys, key=self._order)]
        write = Write(self._write, found, keys, members)
        self._write += 1
        self._waiting[self._write] = []
        return write

    def _give_what_waits(self) -> None:
        """Nothing was changed by who waits for the next write."""
        waiting, self._waiting[self._write] = self._waiting[self._write], []
        self._answers += [Answer(ticket, reply) for ticket, reply in waiting]

    def _compute(self, now: Moment) -> None:
        """Once for each raise of the epoch, however many members caused it."""
        self._look_at_topics()
        ids: dict[tuple[tuple[str, ...], str | None], frozenset[bytes]] = {}
        topics = self._catalog.topics
        subscribers = []
        for member in self.members.values():
            told = member.subscription
            key = told.topics, told.pattern
            if key not in ids:
                names = frozenset(told.topics) | self._matching_of(told)
                ids[key] = frozenset([topics[name].topic_id for name in names if name in topics])
            before = self.target.get(member.member_id, NOTHING)
            subscribers.append(Subscriber(member.member_id, ids[key], told.instance_id, told.rack, before))
        known = {topics[name].topic_id: topics[name] for name in self.topics if name in topics}
        target = self._assign(known, subscribers)
        for member_id, assignment in target.items():
            if assignment != self.target.get(member_id):
                self._mark(self.kinds.target, member_id)
        self.target, self.target_epoch = target, self.epoch
        self._mark(self.kinds.group)
        self._mark(self.kinds.target_epoch)
        partitions = sum(topic.partitions for topic in known.values())
        cost = len(subscribers) * COMPUTE_SECONDS_PER_MEMBER + partitions * COMPUTE_SECONDS_PER_PARTITION
        self._compute_at = now.seconds + (cost / COMPUTE_SHARE if cost > COMPUTE_UNNOTICED_SECONDS else 0.0)

    @abstractmethod
    def _assign(self, known: dict[bytes, AssignedTopic], subscribers: Sequence[Subscriber]) -> dict[str, Assignment]:
        """The target of each subscriber; `known` are the topics that there are."""

    def _matching_of(self, _told: MemberSubscription) -> frozenset[str]:
        """What the expression of a member stood for when it was looked at last."""
        return frozenset()

    def _go_on(self, now: Moment) -> None:
        parked, self._parked = self._parked, []
        for one in parked:
            if self.members.get(one.member.member_id) is not one.member:
                self._answers.append(Answer(one.ticket, self._unknown(one.member)))
            else:
                self._answer_parked(one, now)

    def _answer_parked(self, one: Parked, now: Moment) -> None:
        self._answer_heartbeat(one.ticket, one.member, one.owned, one.assigned, now)

    def _unknown(self, member: ConsumerMember) -> Reply:
        return ConsumerReply(ErrorCode.UNKNOWN_MEMBER_ID, "the member has left", member.member_id)

    @abstractmethod
    def _reconcile(self, member: ConsumerMember, owned: Assignment | None, now: Moment) -> None:
        """Bring the member as far towards its target as it can go now."""

    # Time

    def expire(self, now: Moment) -> None:
        """Act on every deadline that has come."""
        gone = [
            member
            for member in self.members.values()
            if member.deadline <= now.seconds or member.rebalance_deadline <= now.seconds
        ]
        self._remove(gone, now)
        deadlines = (min(member.deadline, member.rebalance_deadline) for member in self.members.values())
        self.next_deadline = min(deadlines, default=NEVER)
        if self.unsettled and self.settle_at > now.seconds:
            self._note_deadline(self.settle_at)

    def _hear(self, member: ConsumerMember, now: Moment) -> None:
        member.deadline = now.seconds + self._session_timeout_ms(member) / 1000
        self._note_deadline(member.deadline)

    def _session_timeout_ms(self, _member: ConsumerMember) -> int:
        return self._timing().session_timeout_ms

    def _note_deadline(self, deadline: float) -> None:
        self.next_deadline = min(self.next_deadline, deadline)

    # Members come and go

    def _subscribe(self, member: ConsumerMember, told: MemberSubscription) -> bool:
        """Take what a member says of itself; true if it changes who gets what."""
        before = member.subscription
        if told == before:
            return False
        member.subscription = told
        self._mark_member(member, self.kinds.member)
        return told.topics != before.topics

    def _raise_epoch(self, now: Moment) -> None:
        self.epoch += 1
        self._mark(self.kinds.group)
        if not self.members:
            self.empty_since_ms = now.wall_ms

    def _enter(self, member: ConsumerMember) -> None:
        self.members[member.member_id] = member

    def _remove(self, gone: Sequence[ConsumerMember], now: Moment) -> None:
        for member in gone:
            self._drop(member)
        if gone:
            self._raise_epoch(now)

    def _drop(self, member: ConsumerMember) -> None:
        del self.members[member.member_id]
        self.target.pop(member.member_id, None)
        for kind in (self.kinds.current, self.kinds.target, self.kinds.member):
            self._mark(kind, member.member_id)

    def _hold(self, member: ConsumerMember, current: CurrentAssignment) -> None:
        """The member holds this now, and nothing else."""
        member.current = current

    def remove(self, error_code: int, _now: Moment) -> None:
        """The group ends here; everyone who waits is told this code."""
        self.is_dead = True
        self.next_deadline = NEVER
        for one in self._parked:
            reply = self._unknown(one.member)
            self._answers.append(Answer(one.ticket, _failed(reply, error_code)))
        self._parked = []
        for waiting in self._waiting.values():
            self._answers += [Answer(ticket, _failed(reply, error_code)) for ticket, reply in waiting]
        self._waiting = {self._write: []}

    # Records

    def tombstones(self) -> list[Record]:
        """What removes all of it from the log."""
        keys = {*self._keys(), *self._marked}
        return [(records.encode_key(key), None) for key in sorted(keys, key=self._order)]

    def _keys(self) -> Iterator[ConsumerGroupKey]:
        yield ConsumerGroupKey(self.kinds.group, self.group_id)
        yield ConsumerGroupKey(self.kinds.target_epoch, self.group_id)
        for member_id in self.members:
            for kind in (self.kinds.member, self.kinds.target, self.kinds.current):
                yield ConsumerGroupKey(kind, self.group_id, member_id)

    def _order(self, key: ConsumerGroupKey) -> tuple[bool, int, str]:
        """The group's own record first: it tells whoever replays that the group is of this kind."""
        return key.kind is not self.kinds.group, key.kind, key.name

    def _mark(self, kind: RecordKind, name: str = "") -> None:
        self._marked[ConsumerGroupKey(kind, self.group_id, name)] = None

    def _mark_member(self, member: ConsumerMember, *kinds: RecordKind) -> None:
        for kind in kinds:
            self._mark(kind, member.member_id)
        self._touch(member)

    def _touch(self, member: ConsumerMember) -> None:
        member.write = self._write
        self._touched[member] = None

    def _answer_after(self, ticket: object, reply: Reply, member: ConsumerMember) -> None:
        """Answer when the last change of the member is in the log."""
        waiting = self._waiting.get(member.write)
        if waiting is None:
            self._answers.append(Answer(ticket, reply))
        else:
            waiting.append((ticket, reply))

    def written(self, write: Write, error_code: int, now: Moment) -> None:
        """What a write asked for is in the log, or failed with this code."""
        if error_code != ErrorCode.NONE:
            self._write_at = now.seconds + RETRY_SECONDS
            self._note_deadline(self._write_at)
            for key in write.keys:
                self._marked.setdefault(key)
            for member in write.members:
                self._touch(member)
        for ticket, reply in self._waiting.pop(write.number, ()):
            self._answers.append(Answer(ticket, _failed(reply, error_code) if error_code else reply))

    def _value(self, key: ConsumerGroupKey) -> bytes | None:
        """What the record of this key says now; None where it has to go."""
        if key.kind is self.kinds.target_epoch:
            return records.encode_target_epoch(self.target_epoch)
        if key.kind is self.kinds.target and key.name in self.members:
            return records.encode_target(self.target.get(key.name, NOTHING))
        return None


def _failed(reply: Reply, error_code: int) -> Reply:
    if isinstance(reply, ConsumerReply):
        return ConsumerReply(error_code, None, reply.member_id)
    return JoinReply(error_code, reply.member_id) if isinstance(reply, JoinReply) else SyncReply(error_code)
