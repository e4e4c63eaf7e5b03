"""A group of the consumer protocol (KIP-848) as a state table. No I/O: requests come in, answers and writes go out.

The group has an epoch, raised when its members or their topics change; a target assignment with an epoch of its own,
computed once for each raise, by one of `groups/assignors.py`; and what each member holds, which goes towards the target
in the steps of `groups/consumer_member.py`. A heartbeat that changes nothing is answered at once and looks at nothing
but its member. One that raises the epoch waits until the target is computed: at the end of the turn, together with all
others that came in it, and in a large group not before its last computing was paid off by a pause.

Members that speak the classic protocol are served too (JoinGroup, SyncGroup, Heartbeat, LeaveGroup): generation and
member epoch are the same number, and they join again whenever there is a step for them to take. So a group changes from
one protocol to the other member by member (`groups/migration.py`).

What is kept are records by key (`groups/consumer_records.py`). A change marks keys; `settle` hands out a `Write` with
what they stand for at that moment, and whoever was answered by such a change hears it when the write is `written`. A
write that fails leaves its keys marked: memory goes on, and the log follows with the next. Sessions and what is under
way are not kept.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from headrace.coordinators.alarms import NEVER
from headrace.coordinators.record_fields import Record
from headrace.errors import CorruptBatch, ErrorCode, InvalidPattern
from headrace.groups import consumer_records as records
from headrace.groups.assignors import (
    ASSIGNORS,
    NOTHING,
    Assignment,
    Partition,
    Subscriber,
    partitions_of,
)
from headrace.groups.consumer_member import ConsumerMember, is_within, reconciled
from headrace.groups.consumer_messages import JOINING, LEAVING, LEAVING_STATIC, ConsumerHeartbeat, ConsumerReply
from headrace.groups.consumer_protocol import (
    CONSUMER,
    ConsumerSubscription,
    PartitionsByName,
    decode_subscription,
    encode_assignment,
)
from headrace.groups.consumer_records import (
    ClassicSession,
    ConsumerGroupKey,
    CurrentAssignment,
    GroupEpoch,
    GroupPieces,
    MemberState,
    MemberSubscription,
    RecordKind,
)
from headrace.groups.group import Answer, Moment
from headrace.groups.limits import ConsumerLimits
from headrace.groups.messages import (
    CommitRequest,
    JoinReply,
    JoinRequest,
    Leaver,
    LeaveReply,
    LeftMember,
    Protocols,
    SyncReply,
    SyncRequest,
)
from headrace.groups.records import encode_group_key
from headrace.groups.roster import member_fault
from headrace.groups.topic_catalog import TopicCatalog

logger = logging.getLogger(__name__)

COMPUTE_SECONDS_PER_MEMBER: Final = 20e-6
COMPUTE_SECONDS_PER_PARTITION: Final = 5e-6
COMPUTE_SHARE: Final = 0.2
"""Of the time that computing targets of one group may take, as far as it is estimated."""
RETRY_SECONDS: Final = 0.5
"""Between a write that failed and the next."""
COMPUTE_UNNOTICED_SECONDS: Final = 0.005
"""Groups that are computed in less do it in every turn that asks for it."""

Reply = ConsumerReply | JoinReply | SyncReply


class ConsumerState(Enum):
    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


@dataclass(frozen=True, slots=True)
class Timing:
    """Of the members of one group that speak the consumer protocol."""

    session_timeout_ms: int
    heartbeat_interval_ms: int


@dataclass(slots=True)
class Write:
    """Records to append; `written` with this and the code when it is known."""

    number: int
    records: list[Record]
    keys: frozenset[ConsumerGroupKey]
    members: list[ConsumerMember]
    ends_classic: bool


@dataclass(slots=True)
class _Parked:
    """A request that waits for a target assignment."""

    ticket: object
    member: ConsumerMember
    owned: Assignment | None
    assigned: Assignment | None
    """What the member was told before, None if it has to be told in any case."""


class ConsumerGroup:
    group_type: Final = "consumer"

    def __init__(
        self,
        group_id: str,
        catalog: TopicCatalog,
        limits: Callable[[], ConsumerLimits],
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
        self.static: dict[str, str] = {}
        """Member id of each instance id."""
        self.held: dict[Partition, str] = {}
        """Who holds each partition: nobody else gets it before it is given up."""
        self.topics: frozenset[str] = frozenset()
        """Names that members subscribe to, as far as expressions stand for any; as of the last raise of the epoch."""
        self.empty_since_ms = now.wall_ms
        self.next_deadline = NEVER
        self.is_dead = False
        self._classic = 0
        """How many members speak the classic protocol."""
        self._catalog = catalog
        self._limits = limits
        self._timing = timing
        self._draw_id = draw_id
        self._topics_hash = 0
        self._ends_classic = False
        """A record of the classic group that it was has to go."""
        self._patterns: dict[str, frozenset[str]] = {}
        self._dumb_patterns: set[str] = set()
        """Of `_patterns`, those that cannot be looked for: it was told that they stand for nothing."""
        self._later_patterns: set[str] = set()
        """New ones of members that name topics too: they count from the next heartbeat on. Kafka looks for what matches
        after its answer, and clients take it that the topics named come first."""
        self._compute_at = 0.0
        self._write_at = 0.0
        """After a write that failed the next one waits."""
        self._marked: dict[ConsumerGroupKey, None] = {}
        """Keys whose records are not written as they are now, in the order in which they changed."""
        self._touched: dict[ConsumerMember, None] = {}
        self._parked: list[_Parked] = []
        self._write = 1
        """Number of the next write."""
        self._waiting: dict[int, list[tuple[object, Reply]]] = {1: []}
        """Answers that are given when their write is done."""
        self._answers: list[Answer] = []

    @classmethod
    def restored(
        cls,
        group_id: str,
        pieces: GroupPieces,
        catalog: TopicCatalog,
        limits: Callable[[], ConsumerLimits],
        timing: Callable[[], Timing],
        draw_id: Callable[[], str],
        now: Moment,
    ) -> ConsumerGroup:
        """The group as its records say; every session begins anew. Topics may have changed meanwhile."""
        group = cls(group_id, catalog, limits, timing, draw_id, now)
        kept = pieces.epoch or GroupEpoch(0)
        group.epoch, group._topics_hash = kept.epoch, kept.topics_hash
        group.target_epoch = min(pieces.target_epoch, kept.epoch)
        if kept.empty_since_ms >= 0:
            group.empty_since_ms = kept.empty_since_ms
        for member_id, subscription in pieces.members.items():
            member = ConsumerMember(member_id, subscription)
            group._enter(member)
            group._hold(member, pieces.current.get(member_id, member.current))
            group.target[member_id] = pieces.targets.get(member_id, NOTHING)
            group._hear(member, now)
            if member.current.state is MemberState.UNREVOKED_PARTITIONS:
                group._give_time(member, now)
        for pattern in pieces.patterns:
            group._patterns[pattern] = group._matching(pattern)
        texts = {text for member in group.members.values() if (text := member.subscription.pattern) is not None}
        group._later_patterns = texts - group._patterns.keys()
        if pieces.has_partitions:
            group._mark(RecordKind.PARTITIONS)
        group.topics_changed(None, now)
        return group

    # What it is

    @property
    def state(self) -> ConsumerState:
        if self.is_dead:
            return ConsumerState.DEAD
        if not self.members:
            return ConsumerState.EMPTY
        if self.epoch > self.target_epoch:
            return ConsumerState.ASSIGNING
        stable = all(member.is_reconciled(self.target_epoch) for member in self.members.values())
        return ConsumerState.STABLE if stable else ConsumerState.RECONCILING

    @property
    def state_name(self) -> str:
        return self.state.value

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
    def protocol_type(self) -> str:
        return CONSUMER

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
        return self._write_at if self._marked or self._waiting[self._write] else max(self._compute_at, self._write_at)

    @property
    def is_all_classic(self) -> bool:
        return 0 < len(self.members) == self._classic

    def answers(self) -> Sequence[Answer]:
        """Answers that can be given now; each once."""
        found, self._answers = self._answers, []
        return found

    def subscribed_topics(self) -> frozenset[str]:
        return self.topics

    # Members of the consumer protocol

    def heartbeat(self, ticket: object, request: ConsumerHeartbeat, now: Moment) -> None:
        """The group's own members, and such as want to be."""
        if request.member_epoch in (LEAVING, LEAVING_STATIC):
            self._leave(ticket, request, now)
            return
        fault = self._heartbeat_fault(request)
        if fault is not None:
            self._answers.append(Answer(ticket, fault))
            return
        if self._later_patterns and self.epoch == self.target_epoch:
            self._later_patterns.clear()
            self._raise_epoch(now)
        count = len(self.members)
        member = self.members.get(request.member_id)
        if request.member_epoch == JOINING:
            member = self._joining(request.member_id or self._draw_id(), request.instance_id)
        assert member is not None, "a heartbeat without a fault has its member"
        assigned = None if request.is_whole else member.current.assigned
        changed = len(self.members) > count
        if request.tells_of(member.subscription):
            changed |= self._subscribe(member, request.subscription(member.subscription))
        if changed:
            self._raise_epoch(now)
        self._hear(member, now)
        is_new = member.current.epoch <= JOINING or member.write == self._write
        if self.epoch > self.target_epoch and is_new:
            self._parked.append(_Parked(ticket, member, request.owned, assigned))
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
        limits = self._limits()
        if request.assignor is not None and request.assignor not in limits.assignors:
            known = ", ".join(limits.assignors)
            reason = f"there is no assignor {request.assignor!r}; there are {known}"
            return ConsumerReply(ErrorCode.UNSUPPORTED_ASSIGNOR, reason)
        if request.pattern:
            try:
                self._catalog.matching(request.pattern)
            except InvalidPattern as error:
                return ConsumerReply(error.kafka_code, str(error))
        if request.member_epoch == JOINING:
            return self._joining_fault(request, limits)
        fault = member_fault(self.members, self.static, request.member_id, request.instance_id)
        if fault != ErrorCode.NONE:
            return ConsumerReply(fault, f"{request.member_id} is no member of group {self.group_id}")
        current = self.members[request.member_id].current
        if request.member_epoch == current.epoch:
            return None
        was_told = request.member_epoch == current.previous_epoch and is_within(request.owned, current.assigned)
        if request.member_epoch < current.epoch and was_told:
            return None
        reason = f"member epoch {request.member_epoch} is not {current.epoch}: give up all partitions and join again"
        return ConsumerReply(ErrorCode.FENCED_MEMBER_EPOCH, reason)

    def _joining_fault(self, request: ConsumerHeartbeat, limits: ConsumerLimits) -> ConsumerReply | None:
        instance_id = request.instance_id
        former = None if instance_id is None else self.members.get(self.static.get(instance_id, ""))
        if former is not None:
            is_released = former.current.epoch == LEAVING_STATIC or former.is_classic
            if former.member_id != request.member_id and not is_released:
                reason = f"instance id {instance_id} belongs to member {former.member_id}, which has not left"
                return ConsumerReply(ErrorCode.UNRELEASED_INSTANCE_ID, reason)
        elif request.member_id not in self.members and len(self.members) >= limits.max_size:
            reason = f"group {self.group_id} has {len(self.members)} members, as many as it may have"
            return ConsumerReply(ErrorCode.GROUP_MAX_SIZE_REACHED, reason)
        return None

    def _joining(self, member_id: str, instance_id: str | None) -> ConsumerMember:
        """A new member, one that joins again, or a static one that comes back."""
        member = self.members.get(member_id)
        if member is not None:
            return member
        member = ConsumerMember(member_id)
        former = None if instance_id is None else self.members.get(self.static.get(instance_id, ""))
        if former is None:
            self._enter(member)
            self.target[member_id] = NOTHING
            self._mark_member(member, RecordKind.MEMBER, RecordKind.TARGET, RecordKind.CURRENT)
            return member
        member.subscription = former.subscription
        assigned, target = former.current.assigned, self.target.get(former.member_id, NOTHING)
        self._drop(former)
        self._enter(member)
        self.target[member_id] = target
        self._hold(member, CurrentAssignment(assigned=assigned))
        self._mark_member(member, RecordKind.MEMBER, RecordKind.TARGET, RecordKind.CURRENT)
        return member

    def _leave(self, ticket: object, request: ConsumerHeartbeat, now: Moment) -> None:
        fault = member_fault(self.members, self.static, request.member_id, request.instance_id)
        if fault != ErrorCode.NONE:
            reason = f"{request.member_id} is no member of group {self.group_id}"
            self._answers.append(Answer(ticket, ConsumerReply(fault, reason)))
            return
        member = self.members[request.member_id]
        if request.member_epoch == LEAVING_STATIC and member.subscription.instance_id is not None:
            self._hear(member, now)
            kept = CurrentAssignment(LEAVING_STATIC, LEAVING_STATIC, assigned=member.current.assigned)
            self._hold(member, kept)
            member.rebalance_deadline = NEVER
            self._mark_member(member, RecordKind.CURRENT)
        else:
            self._remove((member,), now)
        reply = ConsumerReply(ErrorCode.NONE, None, request.member_id, request.member_epoch)
        self._waiting[self._write].append((ticket, reply))

    # Members of the classic protocol

    def join(self, ticket: object, request: JoinRequest, now: Moment) -> None:
        subscription = _classic_subscription(request)
        fault = ErrorCode.COORDINATOR_NOT_AVAILABLE if self.is_dead else self._join_fault(request, subscription)
        if fault != ErrorCode.NONE or subscription is None:
            self._answers.append(Answer(ticket, JoinReply(fault, request.member_id)))
            return
        member_id = request.member_id or self._draw_member_id(request)
        if not request.member_id and request.group_instance_id is None and request.require_known_member_id:
            self._answers.append(Answer(ticket, JoinReply(ErrorCode.MEMBER_ID_REQUIRED, member_id)))
            return
        count = len(self.members)
        member = self._joining(member_id, request.group_instance_id)
        told = MemberSubscription(
            request.group_instance_id,
            subscription.rack,
            request.client_id,
            request.client_host,
            tuple(sorted(set(subscription.topics))),
            None,
            request.rebalance_timeout_ms,
            None,
            ClassicSession(request.session_timeout_ms, request.protocols),
        )
        if self._subscribe(member, told) or len(self.members) > count:
            self._raise_epoch(now)
        self._hear(member, now)
        member.rebalance_deadline = NEVER
        owned = self._by_id(subscription.owned)
        if self.epoch > self.target_epoch:
            self._parked.append(_Parked(ticket, member, owned, None))
        else:
            self._answer_join(ticket, member, owned, now)

    def _join_fault(self, request: JoinRequest, subscription: ConsumerSubscription | None) -> int:
        limits = self._limits()
        known = request.member_id in self.members or request.group_instance_id in self.static
        if not known and len(self.members) >= limits.max_size:
            return ErrorCode.GROUP_MAX_SIZE_REACHED
        if not limits.min_session_timeout_ms <= request.session_timeout_ms <= limits.max_session_timeout_ms:
            return ErrorCode.INVALID_SESSION_TIMEOUT
        if subscription is None or not self._speaks(request.protocols, request.member_id):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        if request.member_id and request.group_instance_id is not None:
            return member_fault(self.members, self.static, request.member_id, request.group_instance_id)
        return ErrorCode.NONE

    def _speaks(self, protocols: Protocols, member_id: str) -> bool:
        """Whether all classic members would have a protocol in common."""
        common = {name for name, _ in protocols}
        for member in self.members.values():
            if member.subscription.classic is not None and member.member_id != member_id:
                common &= {name for name, _ in member.subscription.classic.protocols}
        return bool(common)

    def _draw_member_id(self, request: JoinRequest) -> str:
        return f"{request.group_instance_id or request.client_id[:255]}-{self._draw_id()}"

    def _answer_join(self, ticket: object, member: ConsumerMember, owned: Assignment | None, now: Moment) -> None:
        self._reconcile(member, owned, now)
        classic = member.subscription.classic
        if classic is None:
            self._answers.append(Answer(ticket, JoinReply(ErrorCode.UNKNOWN_MEMBER_ID, member.member_id)))
            return
        self._give_time(member, now)  # to ask for its assignment
        name = classic.protocols[0][0]
        reply = JoinReply(ErrorCode.NONE, member.member_id, member.current.epoch, CONSUMER, name)
        self._answer_after(ticket, reply, member)

    def sync(self, ticket: object, request: SyncRequest, now: Moment) -> None:
        member = self.members.get(request.member_id)
        fault = self._classic_fault(request.member_id, request.group_instance_id, request.generation_id)
        if fault != ErrorCode.NONE or member is None or member.subscription.classic is None:
            self._answers.append(Answer(ticket, SyncReply(fault)))
            return
        name = member.subscription.classic.protocols[0][0]
        if request.protocol_type not in (None, CONSUMER) or request.protocol_name not in (None, name):
            self._answers.append(Answer(ticket, SyncReply(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)))
            return
        self._hear(member, now)
        if self.epoch > member.current.epoch and member.current.state is not MemberState.UNREVOKED_PARTITIONS:
            self._give_time(member, now)
            self._answers.append(Answer(ticket, SyncReply(ErrorCode.REBALANCE_IN_PROGRESS)))
            return
        member.rebalance_deadline = NEVER
        reply = SyncReply(ErrorCode.NONE, CONSUMER, name, self.classic_assignment(member))
        self._answer_after(ticket, reply, member)

    def beat(self, member_id: str, instance_id: str | None, generation_id: int, now: Moment) -> int:
        """A heartbeat of a classic member: it joins again if there is a step for it to take."""
        fault = self._classic_fault(member_id, instance_id, generation_id)
        if fault != ErrorCode.NONE:
            return fault
        member = self.members[member_id]
        self._hear(member, now)
        state = member.current.state
        steps = member.current.epoch < self.epoch or state is MemberState.UNREVOKED_PARTITIONS
        if steps or (state is MemberState.UNRELEASED_PARTITIONS and not self._waits_for_others(member)):
            if member.rebalance_deadline == NEVER:
                self._give_time(member, now)
            return ErrorCode.REBALANCE_IN_PROGRESS
        return ErrorCode.NONE

    def _waits_for_others(self, member: ConsumerMember) -> bool:
        target = self.target.get(member.member_id, NOTHING)
        return any(self.held.get(place, member.member_id) != member.member_id for place in partitions_of(target))

    def leave(self, leavers: Iterable[Leaver], now: Moment) -> LeaveReply:
        if self.is_dead:
            return LeaveReply(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        left: list[LeftMember] = []
        gone: list[ConsumerMember] = []
        for one in leavers:
            member_id = one.member_id or self.static.get(one.group_instance_id or "", "")
            fault = member_fault(self.members, self.static, member_id, one.group_instance_id)
            if fault == ErrorCode.NONE and not self.members[member_id].is_classic:
                fault = ErrorCode.UNKNOWN_MEMBER_ID
            if fault == ErrorCode.NONE and self.members[member_id] not in gone:
                gone.append(self.members[member_id])
            left.append(LeftMember(one.member_id, one.group_instance_id, fault))
        self._remove(gone, now)
        return LeaveReply(ErrorCode.NONE, tuple(left))

    def _classic_fault(self, member_id: str, instance_id: str | None, generation_id: int) -> int:
        if self.is_dead:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        fault = member_fault(self.members, self.static, member_id, instance_id)
        if fault != ErrorCode.NONE:
            return fault
        member = self.members[member_id]
        if not member.is_classic:
            return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE if member.current.epoch == generation_id else ErrorCode.ILLEGAL_GENERATION

    # Offsets

    def commit_fault(self, request: CommitRequest, now: Moment, *, in_transaction: bool = False) -> int:
        """Why this member may not commit now, or NONE. In a transaction a producer may commit that names no member, as
        old ones do not (KIP-447)."""
        if request.generation_id < 0 and not self.members:
            return ErrorCode.NONE
        unnamed = request.generation_id < 0 and not request.member_id and request.group_instance_id is None
        if in_transaction and unnamed and not self.is_dead:
            return ErrorCode.NONE
        if self.is_dead:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        fault = member_fault(self.members, self.static, request.member_id, request.group_instance_id)
        if fault == ErrorCode.NONE and not (request.has_member_epoch or self.members[request.member_id].is_classic):
            return ErrorCode.UNSUPPORTED_VERSION
        return fault or self.epoch_fault(request.member_id, request.generation_id)

    def epoch_fault(self, member_id: str, member_epoch: int) -> int:
        """Why who says this is not a member as it is now, or NONE."""
        member = self.members.get(member_id)
        if member is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if member.current.epoch == member_epoch:
            return ErrorCode.NONE
        return ErrorCode.ILLEGAL_GENERATION if member.is_classic else ErrorCode.STALE_MEMBER_EPOCH

    # Topics

    def topics_changed(self, names: frozenset[str] | None, now: Moment) -> None:
        """Topics of these names came, went or changed; None: any may have."""
        if not self.members or self.is_dead or self.epoch > self.target_epoch:
            return
        patterns_differ = any(self._matching(text) != found for text, found in self._patterns.items())
        if names is not None and names.isdisjoint(self.topics) and not patterns_differ:
            return
        before = self._topics_hash
        self._look_at_topics()
        if self._topics_hash != before:
            self._raise_epoch(now)

    def _look_at_topics(self) -> None:
        """Which topics the members subscribe to now, and whether they are as they were."""
        texts = {text for member in self.members.values() if (text := member.subscription.pattern) is not None}
        texts -= self._later_patterns
        for text in self._patterns.keys() - texts:
            del self._patterns[text]
            self._dumb_patterns.discard(text)
            self._mark(RecordKind.PATTERN, text)
        found: set[str] = set()
        for text in texts:
            matching = self._matching(text)
            if self._patterns.get(text) != matching:
                self._patterns[text] = matching
                self._mark(RecordKind.PATTERN, text)
            found |= matching
        for topics in {member.subscription.topics for member in self.members.values()}:
            found.update(topics)
        self.topics = frozenset(found)
        self._topics_hash = self._catalog.digest(found)

    def _matching(self, text: str) -> frozenset[str]:
        """An expression that was taken, and that is none here, or takes too long over the topics that there are now,
        stands for nothing. That is told once."""
        try:
            found = self._catalog.matching(text)
        except InvalidPattern as error:
            if text not in self._dumb_patterns:
                self._dumb_patterns.add(text)
                logger.warning("group %s: a subscription stands for no topic: %s", self.group_id, error)
            return frozenset()
        self._dumb_patterns.discard(text)
        return found

    def _by_id(self, partitions: PartitionsByName) -> Assignment:
        topics = self._catalog.topics
        return {topics[name].topic_id: indexes for name, indexes in partitions.items() if name in topics}

    def _by_name(self, assignment: Assignment) -> PartitionsByName:
        names = self._catalog.names
        return {names[topic_id]: indexes for topic_id, indexes in assignment.items() if topic_id in names}

    # The target assignment

    def settle(self, now: Moment) -> Write | None:
        """Compute the target if it is time, go on with who waits for it, and say what is to be written, if anything
        is. Called at the end of a turn, and when the pause after a large target is over."""
        if now.seconds < self._write_at:
            self._note_deadline(self._write_at)
            return None
        if self.epoch > self.target_epoch and now.seconds >= self._compute_at:
            self._compute(now)
        if self.epoch > self.target_epoch:
            self._note_deadline(self._compute_at)
        else:
            self._go_on(now)
        if not self._marked:
            self._give_what_waits()
            return None
        keys, self._marked = frozenset(self._marked), {}
        members, self._touched = list(self._touched), {}
        found = [self._record(key) for key in sorted(keys, key=_order)]
        ends_classic, self._ends_classic = self._ends_classic, False
        if ends_classic:
            found.insert(0, (encode_group_key(self.group_id), None))
        write = Write(self._write, found, keys, members, ends_classic)
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
                names = frozenset(told.topics) | self._patterns.get(told.pattern or "", frozenset())
                ids[key] = frozenset([topics[name].topic_id for name in names if name in topics])
            before = self.target.get(member.member_id, NOTHING)
            subscribers.append(Subscriber(member.member_id, ids[key], told.instance_id, told.rack, before))
        self.assignor = self._chosen_assignor()
        known = {topics[name].topic_id: topics[name] for name in self.topics if name in topics}
        target = ASSIGNORS[self.assignor](known, subscribers)
        for member_id, assignment in target.items():
            if assignment != self.target.get(member_id):
                self._mark(RecordKind.TARGET, member_id)
        self.target, self.target_epoch = target, self.epoch
        self._mark(RecordKind.GROUP)
        self._mark(RecordKind.TARGET_EPOCH)
        partitions = sum(topic.partitions for topic in known.values())
        cost = len(subscribers) * COMPUTE_SECONDS_PER_MEMBER + partitions * COMPUTE_SECONDS_PER_PARTITION
        self._compute_at = now.seconds + (cost / COMPUTE_SHARE if cost > COMPUTE_UNNOTICED_SECONDS else 0.0)

    def _chosen_assignor(self) -> str:
        """What most members ask for, of those that are allowed."""
        allowed = self._limits().assignors
        votes = Counter(member.subscription.assignor for member in self.members.values())
        found = max(allowed, key=lambda name: votes[name])
        return found if votes[found] else allowed[0]

    def _go_on(self, now: Moment) -> None:
        parked, self._parked = self._parked, []
        for one in parked:
            if self.members.get(one.member.member_id) is not one.member:
                self._answers.append(Answer(one.ticket, self._unknown(one.member)))
            elif one.member.is_classic:
                self._answer_join(one.ticket, one.member, one.owned, now)
            else:
                self._answer_heartbeat(one.ticket, one.member, one.owned, one.assigned, now)

    def _unknown(self, member: ConsumerMember) -> Reply:
        if member.is_classic:
            return JoinReply(ErrorCode.UNKNOWN_MEMBER_ID, member.member_id)
        return ConsumerReply(ErrorCode.UNKNOWN_MEMBER_ID, "the member has left", member.member_id)

    def _reconcile(self, member: ConsumerMember, owned: Assignment | None, now: Moment) -> None:
        target = self.target.get(member.member_id, NOTHING)
        if member.is_reconciled(self.target_epoch):
            return
        held, member_id = self.held, member.member_id
        current = reconciled(
            member.current,
            target,
            self.target_epoch,
            owned,
            lambda topic, index: held.get((topic, index), member_id) == member_id,
        )
        if current is member.current:
            return
        self._hold(member, current)
        self._mark_member(member, RecordKind.CURRENT)
        if member.is_classic:
            return
        if current.state is not MemberState.UNREVOKED_PARTITIONS:
            member.rebalance_deadline = NEVER
        else:
            self._give_time(member, now)

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
        classic = member.subscription.classic
        timeout_ms = self._timing().session_timeout_ms if classic is None else classic.session_timeout_ms
        member.deadline = now.seconds + timeout_ms / 1000
        self._note_deadline(member.deadline)

    def _give_time(self, member: ConsumerMember, now: Moment) -> None:
        """For a step that the others wait for."""
        member.rebalance_deadline = now.seconds + max(0, member.subscription.rebalance_timeout_ms) / 1000
        self._note_deadline(member.rebalance_deadline)

    def _note_deadline(self, deadline: float) -> None:
        self.next_deadline = min(self.next_deadline, deadline)

    # Members come and go

    def _subscribe(self, member: ConsumerMember, told: MemberSubscription) -> bool:
        """Take what a member says of itself; true if it changes who gets what."""
        before = member.subscription
        if told == before:
            return False
        member.subscription = told
        self._classic += (told.classic is not None) - (before.classic is not None)
        if told.instance_id is not None:
            self.static[told.instance_id] = member.member_id
        self._mark_member(member, RecordKind.MEMBER)
        if told.pattern and told.topics and told.pattern not in self._patterns:
            self._later_patterns.add(told.pattern)
        elif told.pattern:
            self._later_patterns.discard(told.pattern)
        return told.topics != before.topics or told.pattern != before.pattern

    def _raise_epoch(self, now: Moment) -> None:
        self.epoch += 1
        self._mark(RecordKind.GROUP)
        if not self.members:
            self.empty_since_ms = now.wall_ms

    def _enter(self, member: ConsumerMember) -> None:
        self.members[member.member_id] = member
        self._classic += member.is_classic
        instance_id = member.subscription.instance_id
        if instance_id is not None:
            self.static[instance_id] = member.member_id

    def _remove(self, gone: Sequence[ConsumerMember], now: Moment) -> None:
        for member in gone:
            self._drop(member)
        if gone:
            self._raise_epoch(now)

    def _drop(self, member: ConsumerMember) -> None:
        self._hold(member, CurrentAssignment())
        del self.members[member.member_id]
        self._classic -= member.is_classic
        self.target.pop(member.member_id, None)
        instance_id = member.subscription.instance_id
        if instance_id is not None and self.static.get(instance_id) == member.member_id:
            del self.static[instance_id]
        for kind in (RecordKind.CURRENT, RecordKind.TARGET, RecordKind.MEMBER):
            self._mark(kind, member.member_id)

    def _hold(self, member: ConsumerMember, current: CurrentAssignment) -> None:
        """The member holds this now, and nothing else."""
        before = {*partitions_of(member.current.assigned), *partitions_of(member.current.revoking)}
        after = {*partitions_of(current.assigned), *partitions_of(current.revoking)}
        for place in before - after:
            if self.held.get(place) == member.member_id:
                del self.held[place]
        for place in after - before:
            self.held[place] = member.member_id
        member.current = current

    def departed(self) -> Sequence[tuple[object, ConsumerReply]]:
        """Members that left and were not told yet, because no write has it; whoever asks tells them."""
        waiting, departed = self._waiting[self._write], []
        self._waiting[self._write] = []
        for ticket, reply in waiting:
            if isinstance(reply, ConsumerReply) and reply.member_epoch < JOINING:
                departed.append((ticket, reply))
            else:
                self._waiting[self._write].append((ticket, reply))
        return departed

    def remove(self, error_code: int, now: Moment) -> None:
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
        return [(records.encode_key(key), None) for key in sorted(keys, key=_order)]

    def _keys(self) -> Iterator[ConsumerGroupKey]:
        yield ConsumerGroupKey(RecordKind.GROUP, self.group_id)
        yield ConsumerGroupKey(RecordKind.TARGET_EPOCH, self.group_id)
        for text in self._patterns:
            yield ConsumerGroupKey(RecordKind.PATTERN, self.group_id, text)
        for member_id in self.members:
            for kind in (RecordKind.MEMBER, RecordKind.TARGET, RecordKind.CURRENT):
                yield ConsumerGroupKey(kind, self.group_id, member_id)

    def adopt(self, generation_id: int, members: Iterable[ConsumerMember], now: Moment) -> None:
        """Be what a classic group was, with its members; its record goes with the first write."""
        self.epoch = self.target_epoch = generation_id
        self._ends_classic = generation_id > 0
        for member in members:
            self._enter(member)
            held, member.current = member.current, CurrentAssignment()
            self._hold(member, held)
            self.target[member.member_id] = held.assigned
            self._hear(member, now)
            self._mark_member(member, RecordKind.MEMBER, RecordKind.TARGET, RecordKind.CURRENT)
        if generation_id:
            self._look_at_topics()
            self._mark(RecordKind.GROUP)
            self._mark(RecordKind.TARGET_EPOCH)

    def classic_assignment(self, member: ConsumerMember) -> bytes:
        """What a classic member holds, in its own words."""
        assert member.subscription.classic is not None, "only members of the classic protocol have such bytes"
        metadata = member.subscription.classic.protocols[0][1]
        version = int.from_bytes(metadata[:2], "big", signed=True)
        return encode_assignment(self._by_name(member.current.assigned), version)

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
            self._ends_classic |= write.ends_classic
            for key in write.keys:
                self._marked.setdefault(key)
            for member in write.members:
                self._touch(member)
        for ticket, reply in self._waiting.pop(write.number, ()):
            self._answers.append(Answer(ticket, _failed(reply, error_code) if error_code else reply))

    def _record(self, key: ConsumerGroupKey) -> Record:
        return records.encode_key(key), self._value(key)

    def _value(self, key: ConsumerGroupKey) -> bytes | None:
        kind, name = key.kind, key.name
        if kind is RecordKind.GROUP:
            since_ms = -1 if self.members else self.empty_since_ms
            return records.encode_group_epoch(GroupEpoch(self.epoch, self._topics_hash, since_ms))
        if kind is RecordKind.TARGET_EPOCH:
            return records.encode_target_epoch(self.target_epoch)
        if kind is RecordKind.PATTERN:
            topics = self._patterns.get(name)
            return None if topics is None else records.encode_pattern(sorted(topics), self._catalog.version, 0)
        member = self.members.get(name)
        if member is None or kind is RecordKind.PARTITIONS:
            return None
        if kind is RecordKind.MEMBER:
            return records.encode_subscription(member.subscription)
        if kind is RecordKind.TARGET:
            return records.encode_target(self.target.get(name, NOTHING))
        return records.encode_current(member.current)


def _classic_subscription(request: JoinRequest) -> ConsumerSubscription | None:
    """What a classic member subscribes to; None if it is no consumer, or its bytes have another form."""
    if request.protocol_type != CONSUMER or not request.protocols:
        return None
    try:
        return decode_subscription(request.protocols[0][1])
    except CorruptBatch:
        return None


def _failed(reply: Reply, error_code: int) -> Reply:
    if isinstance(reply, ConsumerReply):
        return ConsumerReply(error_code, None, reply.member_id)
    return JoinReply(error_code, reply.member_id) if isinstance(reply, JoinReply) else SyncReply(error_code)


def _order(key: ConsumerGroupKey) -> tuple[int, str]:
    """The group's own record first: it tells whoever replays that the group is of this kind."""
    return key.kind, key.name
