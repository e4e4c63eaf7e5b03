"""A share group (KIP-932) as a state table. No I/O: requests come in, answers, writes and errands go out.

It is a `ModernGroup` whose members share partitions: nobody has to give up one before another gets it, so a member is
told its target assignment, and that is all. Who acquires which record is decided where a partition is led (`queues/`).

What is acknowledged is kept by the share coordinator, per share partition, and there only if this group has asked for
it: that is how a deleted group has no state left behind, nor can a late fetch bring one back, and how it is known which
partitions a group has a start in. So the coordinator of the group initializes, as Kafka's does, and a data leader that
finds no state waits for it. A partition is first noted as one whose state may be kept (`initializing`), in the log;
then it is initialized, which changes nothing where it was before; then it is noted as `initialized`, and may be
assigned. A member that joins waits for that, but not longer than INITIALIZE_SECONDS. On the way out it is the same
backwards: a partition is initializing again before its state is deleted, and forgotten when it is. Whoever takes over
in between finds it among the initializing, and begins again.

A state that is made when members subscribe has state epoch 0; one whose start is set from outside has the epoch of the
group, raised for it, so that it replaces what is there, and is not replaced by a late initialization.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import ClassVar, Final

from headrace.errors import ErrorCode
from headrace.groups import share_records as records
from headrace.groups.assignors import (
    NOTHING,
    AssignedTopic,
    Assignment,
    Partition,
    Subscriber,
    assign_simple,
    by_topic,
    partitions_of,
)
from headrace.groups.consumer_member import ConsumerMember
from headrace.groups.consumer_messages import ConsumerHeartbeat, ConsumerReply
from headrace.groups.consumer_records import (
    SHARE_KINDS,
    ConsumerGroupKey,
    CurrentAssignment,
    GroupEpoch,
    Kinds,
    RecordKind,
)
from headrace.groups.group import Moment
from headrace.groups.limits import ShareLimits
from headrace.groups.modern_group import RETRY_SECONDS, ModernGroup, Timing, Write
from headrace.groups.share_records import KeptStates, SharePieces
from headrace.groups.topic_catalog import TopicCatalog

SHARE: Final = "share"
SIMPLE: Final = "simple"
FIRST_STATE_EPOCH: Final = 0
"""Of a state that was made because a member subscribed."""
INITIALIZING_MAX: Final = 500
"""Initializations of one group that are under way at a time."""
INITIALIZE_SECONDS: Final = 3.0
"""How long who joins waits for states that are not initialized yet; then it gets what there is."""


class ShareGroup(ModernGroup):
    group_type: ClassVar[str] = SHARE
    protocol_type: ClassVar[str] = SHARE
    kinds: ClassVar[Kinds] = SHARE_KINDS

    def __init__(
        self,
        group_id: str,
        catalog: TopicCatalog,
        limits: Callable[[], ShareLimits],
        timing: Callable[[], Timing],
        draw_id: Callable[[], str],
        now: Moment,
    ) -> None:
        super().__init__(group_id, catalog, timing, draw_id, now)
        self.assignor = SIMPLE
        self.initializing: set[Partition] = set()
        """Share partitions whose state may be kept, and has to be initialized before anybody gets them."""
        self.initialized: set[Partition] = set()
        self.is_changing_states = False
        """Starts are set, or states deleted, from outside: one such errand at a time, and nobody joins meanwhile."""
        self._limits = limits
        self._noted: frozenset[Partition] = frozenset()
        """What is initializing as far as the log has it: that may be asked for."""
        self._noting: dict[int, frozenset[Partition]] = {}
        """Likewise of the writes under way, by their numbers."""
        self._asked: set[Partition] = set()
        """Whose initialization is under way."""
        self._initialize_at = 0.0
        """After one that failed the next one waits."""
        self._wait_until = 0.0
        """Until when a target assignment waits for what is initializing."""

    @classmethod
    def restored(
        cls,
        group_id: str,
        pieces: SharePieces,
        catalog: TopicCatalog,
        limits: Callable[[], ShareLimits],
        timing: Callable[[], Timing],
        draw_id: Callable[[], str],
        now: Moment,
    ) -> ShareGroup:
        """The group as its records say; every session begins anew. Topics may have changed meanwhile."""
        group = cls(group_id, catalog, limits, timing, draw_id, now)
        group._restore(pieces, now)
        group.initializing = set(partitions_of(pieces.states.initializing))
        group.initialized = set(partitions_of(pieces.states.initialized)) - group.initializing
        group._noted = frozenset(group.initializing)
        group.topics_changed(None, now)
        group._note_states()
        return group

    @property
    def state_name(self) -> str:
        if self.is_dead:
            return "Dead"
        return "Stable" if self.members else "Empty"

    @property
    def _compute_due(self) -> float:
        return max(self._compute_at, self._wait_until) if self._awaited() else self._compute_at

    def pieces(self) -> SharePieces:
        """What its records say, of a group without members."""
        states = KeptStates(by_topic(self.initializing), by_topic(self.initialized))
        return SharePieces(GroupEpoch(self.epoch, self._topics_hash), self.target_epoch, states=states)

    # Members

    def _may_repeat(self, request: ConsumerHeartbeat, current: CurrentAssignment) -> bool:
        return True

    def _has_to_tell(self, request: ConsumerHeartbeat, member: ConsumerMember) -> bool:
        """Who repeats an epoch has missed what it was told in its own; it does not say what it knows."""
        return super()._has_to_tell(request, member) or request.member_epoch != member.current.epoch

    def _max_size(self) -> int:
        return self._limits().max_size

    def _reconcile(self, member: ConsumerMember, owned: Assignment | None, now: Moment) -> None:
        target = self.target.get(member.member_id, NOTHING)
        current = member.current
        if current.epoch == self.target_epoch:
            return
        assigned = current.assigned if current.assigned == target else target
        self._hold(member, CurrentAssignment(self.target_epoch, current.epoch, assigned=assigned))
        self._mark_member(member, self.kinds.current)

    # The target assignment

    def settle(self, now: Moment) -> Write | None:
        if self.epoch > self.target_epoch:
            self._look_at_topics()
            self._note_states()
            self._wait_until = self._wait_until or now.seconds + INITIALIZE_SECONDS
        write = super().settle(now)
        if self.epoch == self.target_epoch:
            self._wait_until = 0.0
        if write is not None and ConsumerGroupKey(RecordKind.SHARE_STATES, self.group_id) in write.keys:
            self._noting[write.number] = frozenset(self.initializing)
        return write

    def _assign(self, known: dict[bytes, AssignedTopic], subscribers: Sequence[Subscriber]) -> dict[str, Assignment]:
        return assign_simple(known, subscribers, by_topic(self.initialized))

    # States of share partitions

    def _subscribed(self) -> Iterator[Partition]:
        """The partitions of the topics that members subscribe to."""
        for name in self.topics:
            topic = self._catalog.topics.get(name)
            if topic is not None:
                yield from ((topic.topic_id, index) for index in range(topic.partitions))

    def _note_states(self) -> None:
        """What members subscribe to is to be initialized."""
        known = self.initialized | self.initializing
        new = [place for place in self._subscribed() if place not in known]
        if new:
            self.initializing.update(new)
            self._mark(RecordKind.SHARE_STATES)

    def _awaited(self) -> bool:
        """Whether something that members subscribe to is not initialized yet."""
        return bool(self.initializing) and not self.initializing.isdisjoint(self._subscribed())

    def to_initialize(self, now: Moment) -> list[Partition]:
        """Share partitions whose state is to be initialized now, in FIRST_STATE_EPOCH and without a start; tell
        `state_initialized` of each what became of it."""
        if self.is_dead or not self.initializing or not self.members:
            return []
        # This is asked with each answer, and looks at all: so not before half of them have come, nor if none is left.
        if len(self._asked) > INITIALIZING_MAX // 2 or len(self._asked) >= len(self.initializing):
            return []
        may_be = self._noted & self.initializing - self._asked
        due = [place for place in self._subscribed() if place in may_be]
        if due and now.seconds < self._initialize_at:
            self._note_deadline(self._initialize_at)
            return []
        due = sorted(due)[: max(0, INITIALIZING_MAX - len(self._asked))]
        self._asked.update(due)
        return due

    def state_initialized(self, place: Partition, error_code: int, now: Moment) -> None:
        """A state that is kept in a higher epoch is one as well."""
        self._asked.discard(place)
        if self.is_dead or place not in self.initializing:
            return
        if error_code in (ErrorCode.NONE, ErrorCode.FENCED_STATE_EPOCH):
            self._keep([place])
            if self.members and self.epoch == self.target_epoch:
                self._raise_epoch(now)
        else:
            self._initialize_at = now.seconds + RETRY_SECONDS
            self._note_deadline(self._initialize_at)

    def _keep(self, places: Collection[Partition]) -> None:
        found = self.initializing.intersection(places)  # not what was deleted with its topic meanwhile
        self.initializing -= found
        self.initialized |= found
        self._mark(RecordKind.SHARE_STATES)

    def states(self) -> list[Partition]:
        """Share partitions whose state is kept, or may be."""
        return sorted(self.initialized | self.initializing)

    @property
    def is_initializing(self) -> bool:
        """Whether initializations are under way."""
        return bool(self._asked)

    def begin_change(self, places: Collection[Partition], ticket: object, now: Moment, *, sets_starts: bool) -> int:
        """The states of these share partitions are set anew, or deleted, from outside. Whoever holds the ticket hears
        when that is in the log, and may begin; then it calls `end_change`. Answers the state epoch for new starts."""
        assert not self.members, "states are changed of a group without members"
        assert not self.is_changing_states, "one errand at a time changes the states of a group"
        self.is_changing_states = True
        self.initialized.difference_update(places)
        self.initializing.update(places)
        self._mark(RecordKind.SHARE_STATES)
        if sets_starts:
            self._raise_epoch(now)
        self._waiting[self._write].append((ticket, ConsumerReply(ErrorCode.NONE)))
        return self.epoch

    def end_change(self, ticket: object, *, kept: Collection[Partition] = (), gone: Collection[Partition] = ()) -> None:
        """These are initialized now, and those have no state any more. Whoever holds the ticket hears when the log has
        it."""
        self.is_changing_states = False
        if kept:
            self._keep(kept)
        if gone:
            self.initializing.difference_update(gone)
            self._mark(RecordKind.SHARE_STATES)
        self._waiting[self._write].append((ticket, ConsumerReply(ErrorCode.NONE)))

    def forget_topics(self, ids: Collection[bytes]) -> None:
        """Topics with these ids were deleted, and what was kept of their share partitions with them."""
        for places in (self.initializing, self.initialized):
            gone = [place for place in places if place[0] in ids]
            if gone:
                places.difference_update(gone)
                self._mark(RecordKind.SHARE_STATES)

    # Records

    def written(self, write: Write, error_code: int, now: Moment) -> None:
        noted = self._noting.pop(write.number, None)
        if noted is not None and error_code == ErrorCode.NONE:
            self._noted = noted
        super().written(write, error_code, now)

    def _keys(self) -> Iterator[ConsumerGroupKey]:
        yield from super()._keys()
        yield ConsumerGroupKey(RecordKind.SHARE_STATES, self.group_id)

    def _value(self, key: ConsumerGroupKey) -> bytes | None:
        kind = key.kind
        if kind is RecordKind.SHARE_GROUP:
            return records.encode_group_epoch(GroupEpoch(self.epoch, self._topics_hash))
        if kind is RecordKind.SHARE_STATES:
            states = KeptStates(by_topic(self.initializing), by_topic(self.initialized))
            names: Mapping[bytes, str] = self._catalog.names
            return records.encode_states(states, names) if states != KeptStates() else None
        member = self.members.get(key.name)
        if member is not None and kind is RecordKind.SHARE_MEMBER:
            return records.encode_member(member.subscription)
        if member is not None and kind is RecordKind.SHARE_CURRENT:
            return records.encode_current(member.current)
        return super()._value(key)
