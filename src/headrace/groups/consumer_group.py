"""A group of the consumer protocol (KIP-848) as a state table. No I/O: requests come in, answers and writes go out.

It is a `ModernGroup` whose target assignment is computed by one of `groups/assignors.py`, and whose members hold what
nobody else holds: each goes towards the target in the steps of `groups/consumer_member.py`.

Members that speak the classic protocol are served too (JoinGroup, SyncGroup, Heartbeat, LeaveGroup): generation and
member epoch are the same number, and they join again whenever there is a step for them to take. So a group changes from
one protocol to the other member by member (`groups/migration.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import ClassVar

from headrace.coordinators.alarms import NEVER
from headrace.errors import CorruptBatch, ErrorCode, InvalidPattern
from headrace.groups import consumer_records as records
from headrace.groups.assignors import (
    ASSIGNORS,
    NOTHING,
    AssignedTopic,
    Assignment,
    Partition,
    Subscriber,
    partitions_of,
)
from headrace.groups.consumer_member import ConsumerMember, is_within, reconciled
from headrace.groups.consumer_messages import JOINING, LEAVING_STATIC, ConsumerHeartbeat, ConsumerReply
from headrace.groups.consumer_protocol import (
    CONSUMER,
    ConsumerSubscription,
    PartitionsByName,
    decode_subscription,
    encode_assignment,
)
from headrace.groups.consumer_records import (
    CONSUMER_KINDS,
    ClassicSession,
    ConsumerGroupKey,
    CurrentAssignment,
    GroupEpoch,
    GroupPieces,
    Kinds,
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
from headrace.groups.modern_group import ModernGroup, Parked, Reply, Timing, Write
from headrace.groups.records import encode_group_key
from headrace.groups.roster import member_fault
from headrace.groups.topic_catalog import TopicCatalog

logger = logging.getLogger(__name__)


class ConsumerState(Enum):
    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


class ConsumerGroup(ModernGroup):
    group_type: ClassVar[str] = "consumer"
    protocol_type: ClassVar[str] = CONSUMER
    kinds: ClassVar[Kinds] = CONSUMER_KINDS

    def __init__(
        self,
        group_id: str,
        catalog: TopicCatalog,
        limits: Callable[[], ConsumerLimits],
        timing: Callable[[], Timing],
        draw_id: Callable[[], str],
        now: Moment,
    ) -> None:
        super().__init__(group_id, catalog, timing, draw_id, now)
        self.static: dict[str, str] = {}
        """Member id of each instance id."""
        self.held: dict[Partition, str] = {}
        """Who holds each partition: nobody else gets it before it is given up."""
        self._classic = 0
        """How many members speak the classic protocol."""
        self._limits = limits
        self._ends_classic = False
        """A record of the classic group that it was has to go."""
        self._patterns: dict[str, frozenset[str]] = {}
        self._dumb_patterns: set[str] = set()
        """Of `_patterns`, those that cannot be looked for: it was told that they stand for nothing."""
        self._later_patterns: set[str] = set()
        """New ones of members that name topics too: they count from the next heartbeat on. Kafka looks for what matches
        after its answer, and clients take it that the topics named come first."""

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
        group._restore(pieces, now)
        for member in group.members.values():
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
    def is_all_classic(self) -> bool:
        return 0 < len(self.members) == self._classic

    def subscribed_topics(self) -> frozenset[str]:
        return self.topics

    # Members of the consumer protocol

    def _take(self, ticket: object, request: ConsumerHeartbeat, now: Moment) -> None:
        if self._later_patterns and self.epoch == self.target_epoch:
            self._later_patterns.clear()
            self._raise_epoch(now)
        super()._take(ticket, request, now)

    def _heartbeat_fault(self, request: ConsumerHeartbeat) -> ConsumerReply | None:
        assignors = self._limits().assignors
        if request.assignor is not None and request.assignor not in assignors:
            reason = f"there is no assignor {request.assignor!r}; there are {', '.join(assignors)}"
            return ConsumerReply(ErrorCode.UNSUPPORTED_ASSIGNOR, reason)
        if request.pattern:
            try:
                self._catalog.matching(request.pattern)
            except InvalidPattern as error:
                return ConsumerReply(error.kafka_code, str(error))
        return super()._heartbeat_fault(request)

    def _joining_fault(self, request: ConsumerHeartbeat) -> ConsumerReply | None:
        former = self._former(request.instance_id)
        if former is None:
            return super()._joining_fault(request)
        is_released = former.current.epoch == LEAVING_STATIC or former.is_classic
        if former.member_id == request.member_id or is_released:
            return None
        reason = f"instance id {request.instance_id} belongs to member {former.member_id}, which has not left"
        return ConsumerReply(ErrorCode.UNRELEASED_INSTANCE_ID, reason)

    def _former(self, instance_id: str | None) -> ConsumerMember | None:
        """Who has the instance id."""
        return None if instance_id is None else self.members.get(self.static.get(instance_id, ""))

    def _member_fault(self, request: ConsumerHeartbeat) -> int:
        return member_fault(self.members, self.static, request.member_id, request.instance_id)

    def _may_repeat(self, request: ConsumerHeartbeat, current: CurrentAssignment) -> bool:
        return is_within(request.owned, current.assigned)

    def _max_size(self) -> int:
        return self._limits().max_size

    def _joining(self, member_id: str, instance_id: str | None) -> ConsumerMember:
        """A new member, one that joins again, or a static one that comes back."""
        former = self._former(instance_id)
        if member_id in self.members or former is None:
            return super()._joining(member_id, instance_id)
        member = ConsumerMember(member_id, former.subscription)
        assigned, target = former.current.assigned, self.target.get(former.member_id, NOTHING)
        self._drop(former)
        self._admit(member, target)
        self._hold(member, CurrentAssignment(assigned=assigned))
        return member

    def _depart(self, member: ConsumerMember, member_epoch: int, now: Moment) -> None:
        if member_epoch == LEAVING_STATIC and member.subscription.instance_id is not None:
            self._hear(member, now)
            kept = CurrentAssignment(LEAVING_STATIC, LEAVING_STATIC, assigned=member.current.assigned)
            self._hold(member, kept)
            member.rebalance_deadline = NEVER
            self._mark_member(member, RecordKind.CURRENT)
        else:
            super()._depart(member, member_epoch, now)

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
            self._parked.append(Parked(ticket, member, owned, None))
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

    def _patterns_differ(self) -> bool:
        return any(self._matching(text) != found for text, found in self._patterns.items())

    def _matching_topics(self) -> frozenset[str]:
        texts = {text for member in self.members.values() if (text := member.subscription.pattern) is not None}
        texts -= self._later_patterns
        for text in self._patterns.keys() - texts:
            del self._patterns[text]
            self._dumb_patterns.discard(text)
            self._mark(RecordKind.PATTERN, text)
        for text in texts:
            matching = self._matching(text)
            if self._patterns.get(text) != matching:
                self._patterns[text] = matching
                self._mark(RecordKind.PATTERN, text)
        return frozenset().union(*self._patterns.values())

    def _matching_of(self, told: MemberSubscription) -> frozenset[str]:
        return self._patterns.get(told.pattern or "", frozenset())

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
        write = super().settle(now)
        if write is not None and self._ends_classic:
            write.records.insert(0, (encode_group_key(self.group_id), None))
            write.ends_classic, self._ends_classic = True, False
        return write

    def written(self, write: Write, error_code: int, now: Moment) -> None:
        if error_code != ErrorCode.NONE:
            self._ends_classic |= write.ends_classic
        super().written(write, error_code, now)

    def _assign(self, known: dict[bytes, AssignedTopic], subscribers: Sequence[Subscriber]) -> dict[str, Assignment]:
        self.assignor = self._chosen_assignor()
        return ASSIGNORS[self.assignor](known, subscribers)

    def _chosen_assignor(self) -> str:
        """What most members ask for, of those that are allowed."""
        allowed = self._limits().assignors
        votes = Counter(member.subscription.assignor for member in self.members.values())
        found = max(allowed, key=lambda name: votes[name])
        return found if votes[found] else allowed[0]

    def _answer_parked(self, one: Parked, now: Moment) -> None:
        if one.member.is_classic:
            self._answer_join(one.ticket, one.member, one.owned, now)
        else:
            super()._answer_parked(one, now)

    def _unknown(self, member: ConsumerMember) -> Reply:
        if member.is_classic:
            return JoinReply(ErrorCode.UNKNOWN_MEMBER_ID, member.member_id)
        return super()._unknown(member)

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

    def _session_timeout_ms(self, member: ConsumerMember) -> int:
        classic = member.subscription.classic
        return super()._session_timeout_ms(member) if classic is None else classic.session_timeout_ms

    def _give_time(self, member: ConsumerMember, now: Moment) -> None:
        """For a step that the others wait for."""
        member.rebalance_deadline = now.seconds + max(0, member.subscription.rebalance_timeout_ms) / 1000
        self._note_deadline(member.rebalance_deadline)

    # Members come and go

    def _subscribe(self, member: ConsumerMember, told: MemberSubscription) -> bool:
        before = member.subscription
        if told == before:
            return False
        differs = super()._subscribe(member, told)
        self._classic += (told.classic is not None) - (before.classic is not None)
        if told.instance_id is not None:
            self.static[told.instance_id] = member.member_id
        if told.pattern and told.topics and told.pattern not in self._patterns:
            self._later_patterns.add(told.pattern)
        elif told.pattern:
            self._later_patterns.discard(told.pattern)
        return differs or told.pattern != before.pattern

    def _enter(self, member: ConsumerMember) -> None:
        super()._enter(member)
        self._classic += member.is_classic
        instance_id = member.subscription.instance_id
        if instance_id is not None:
            self.static[instance_id] = member.member_id

    def _drop(self, member: ConsumerMember) -> None:
        self._hold(member, CurrentAssignment())
        super()._drop(member)
        self._classic -= member.is_classic
        instance_id = member.subscription.instance_id
        if instance_id is not None and self.static.get(instance_id) == member.member_id:
            del self.static[instance_id]

    def _hold(self, member: ConsumerMember, current: CurrentAssignment) -> None:
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

    # Records

    def _keys(self) -> Iterator[ConsumerGroupKey]:
        yield from super()._keys()
        for text in self._patterns:
            yield ConsumerGroupKey(RecordKind.PATTERN, self.group_id, text)

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

    def _value(self, key: ConsumerGroupKey) -> bytes | None:
        kind, name = key.kind, key.name
        if kind is RecordKind.GROUP:
            since_ms = -1 if self.members else self.empty_since_ms
            return records.encode_group_epoch(GroupEpoch(self.epoch, self._topics_hash, since_ms))
        if kind is RecordKind.PATTERN:
            topics = self._patterns.get(name)
            return None if topics is None else records.encode_pattern(sorted(topics), self._catalog.version, 0)
        member = self.members.get(name)
        if member is not None and kind is RecordKind.MEMBER:
            return records.encode_subscription(member.subscription)
        if member is not None and kind is RecordKind.CURRENT:
            return records.encode_current(member.current)
        return super()._value(key)


def _classic_subscription(request: JoinRequest) -> ConsumerSubscription | None:
    """What a classic member subscribes to; None if it is no consumer, or its bytes have another form."""
    if request.protocol_type != CONSUMER or not request.protocols:
        return None
    try:
        return decode_subscription(request.protocols[0][1])
    except CorruptBatch:
        return None
