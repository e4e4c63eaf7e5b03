"""What the members of a share group were given and told in one run, and whether it may be.

A delivery counts when it leaves its broker, an acknowledgement is asked for when it is sent, and answered when the
answer leaves. A record may be delivered again, and only then:
- when its lock is over: not before the lock's duration has passed since the member asked for records, or for a renewal
  that was answered. Where the clocks of machines were set, a lock may end earlier or later when the lead moves;
- when its member has asked to release it, answered or not;
- when its member's session has ended, or may have: it has closed it, or a connection of it has ended other than by the
  death of the broker, or the broker was asked to stop;
and never when an acceptance or a rejection of it was answered without an error, by whoever leads. One that was not
answered, or with an error, may have been taken or not.

Delivery counts begin with 1, rise by one with each delivery and never fall: what the end of a session gives back counts
as never delivered, so the next delivery may have the same count. A delivery may be kept and not told, when its broker
dies or cannot know that it is kept: then the next count is higher, by one for each lock that has passed since, or for
each release that was sent again. No count is above the limit. Who holds a record, and asks within the lock, is not told
that it does not.

Before the first fault all of this is exact: nothing is kept and not told, and what a closed session gives back has the
same count again.

At the end every record is final: it was accepted or rejected by one who was given it, or delivered as often as may be,
or is deleted, or was never there (compaction).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from headrace.errors import ErrorCode
from headrace.queues.messages import AcknowledgeType
from headrace.simulator.history import Violation
from headrace.storage.log import TopicPartition

ROUNDED_SECONDS: Final = 0.002
"""Brokers count in milliseconds."""
FINAL: Final = {AcknowledgeType.ACCEPT: "accepted", AcknowledgeType.REJECT: "rejected", AcknowledgeType.GAP: "a gap"}
FEW: Final = 10
"""So many deliveries a record may have had without anybody being told, where clocks were set."""
REFUSED: Final = frozenset({ErrorCode.INVALID_RECORD_STATE, ErrorCode.INVALID_REQUEST})
"""Nothing of it was taken."""


@dataclass(slots=True, eq=False)
class MemberLife:
    """One member id, which no other has in the run."""

    member_id: str
    era: int
    """How often the group's start had been set anew when it began."""
    brokers: set[str] = field(default_factory=set)
    """Lives of brokers that it has asked."""
    has_ended: bool = False
    """Whether a session of it has ended, or may have."""
    closed_at: float = float("inf")
    """When it was answered that its session is closed."""


@dataclass(slots=True, eq=False)
class Delivery:
    member: MemberLife
    count: int
    asked_at: float
    locked_until: float
    """It certainly is, until then."""
    by: str
    given_back: bool = False
    """Whether its member has asked to release it."""
    releases: int = 0
    """How often: each time after the first may give back a delivery that was kept and not told."""
    unanswered: int = 0
    """Acknowledgements of it that were sent, and may have been taken or not."""


@dataclass(slots=True, eq=False)
class Record:
    deliveries: list[Delivery] = field(default_factory=list)
    final: str = ""
    """Who was told that it is accepted or rejected, and how."""
    may_be_final: bool = False
    """Whether one who was given it has asked for that."""


@dataclass(slots=True, eq=False)
class Claim:
    """What a member says of records of one partition in one request: all of it is taken, or nothing."""

    where: TopicPartition
    member: MemberLife
    types: dict[int, int]
    asked_at: float
    era: int
    deliveries: dict[int, Delivery] = field(default_factory=dict)
    """Its own, of these records."""


class ShareHistory:
    """`stopped` tells whether a broker's life was asked to end in order; `clocks_differ` whether any was set; `is_calm`
    that no fault has come yet, and no lead is moved."""

    def __init__(
        self,
        note: Callable[[str], None],
        now: Callable[[], float],
        lock_seconds: float,
        delivery_limit: int,
        stopped: Callable[[str], bool],
        clocks_differ: Callable[[], bool],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.era = 0
        self.is_calm: Callable[[], bool] = lambda: False
        self.is_doubted: Callable[[], bool] = lambda: False
        """Whether what is kept of the group may be lost by now: then nothing is promised any more."""
        self.last_accepted: tuple[TopicPartition, float] | None = None
        self.last_delivered: tuple[TopicPartition, float] | None = None
        self._note = note
        self._now = now
        self._lock_seconds = lock_seconds
        self._limit = delivery_limit
        self._stopped = stopped
        self._clocks_differ = clocks_differ
        self._began_at = now()
        self._records: dict[TopicPartition, dict[int, Record]] = {}
        self._starts: dict[TopicPartition, int] = {}
        """Where the group was told to begin."""

    def member(self, member_id: str) -> MemberLife:
        return MemberLife(member_id, self.era)

    def record(self, where: TopicPartition, offset: int) -> Record:
        return self._records.setdefault(where, {}).setdefault(offset, Record())

    def given(self, where: TopicPartition) -> list[int]:
        """Offsets that were delivered to anybody."""
        return [offset for offset, record in self._records.get(where, {}).items() if record.deliveries]

    def begin_anew(self, starts: dict[TopicPartition, int]) -> None:
        """An operator was told that the group begins there now; it has no members. What was before is over."""
        self._note(f"the group begins anew at {starts}")
        self.counts["starts set anew"] += 1
        self.era += 1
        self._records.clear()
        self._starts = dict(starts)
        self._began_at = self._now()

    # Deliveries.

    def delivered(
        self, where: TopicPartition, offset: int, count: int, member: MemberLife, asked_at: float, by: str
    ) -> None:
        """A broker lets a member have a record."""
        if member.era != self.era or self.is_doubted():
            return
        now, record = self._now(), self.record(where, offset)
        self._note(f"{by} delivers {where} {offset} to {member.member_id}, count {count}")
        self.counts["deliveries"] += 1
        self.last_delivered = where, now
        before = record.deliveries[-1] if record.deliveries else None
        what = f"{where}: {by} delivers {offset} to {member.member_id} with count {count}"
        if not 1 <= count <= self._limit:
            raise Violation(f"{what}, where {self._limit} deliveries are allowed")
        if offset < self._starts.get(where, 0):
            raise Violation(f"{what}, though the group was told to begin at {self._starts[where]}")
        differ = self._clocks_differ()
        is_overtaken = differ and before is not None and count <= before.count
        if record.final and not is_overtaken:
            raise Violation(f"{what}, though it was {record.final}")
        until = asked_at + self._lock_seconds - ROUNDED_SECONDS
        delivery = Delivery(member, count, asked_at, until, by)
        if is_overtaken:
            record.deliveries.insert(-1, delivery)
            return
        if before is not None:
            self.counts["redeliveries"] += 1
            self._compare(what, before, count, now)
        elif not differ:
            self._bound(what, 0, count, self._began_at, now)
        record.deliveries.append(delivery)

    def _compare(self, what: str, before: Delivery, count: int, now: float) -> None:
        whose = f"{before.member.member_id}, with count {before.count} by {before.by} at {before.asked_at:.3f}"
        given_back = before.given_back or self._may_have_ended(before.member)
        if not given_back and now < before.locked_until and not self._clocks_differ():
            raise Violation(f"{what}, which is locked by {whose}")
        if count < before.count or (count == before.count and not self._may_have_ended(before.member)):
            raise Violation(f"{what}; it was delivered to {whose}")
        if not self._clocks_differ():
            closed_in_time = before.member.closed_at < before.locked_until
            is_undone = closed_in_time and not (before.given_back or before.unanswered) and self.is_calm()
            unlocked = max(0, before.releases - 1)
            self._bound(what, before.count - is_undone + unlocked, count, before.asked_at, now)

    def _bound(self, what: str, before: int, count: int, since: float, now: float) -> None:
        unseen = self._unseen(since, now)
        if count > before + 1 + unseen:
            raise Violation(f"{what}, where it can have been {before + 1 + unseen} at most")
        if count > before + 1:
            self.counts["deliveries that were kept and not told"] += count - before - 1

    def _unseen(self, since: float, now: float) -> int:
        """How many deliveries may have been kept and not told meanwhile: each was locked all the same."""
        return 0 if self.is_calm() else int((now - since + ROUNDED_SECONDS) / self._lock_seconds)

    def _may_have_ended(self, member: MemberLife) -> bool:
        return member.has_ended or any(self._stopped(life) for life in member.brokers)

    # Acknowledgements.

    def asks(self, where: TopicPartition, member: MemberLife, types: dict[int, int]) -> Claim:
        """A member sends what it says of these records."""
        claim = Claim(where, member, types, self._now(), self.era)
        for offset, type in types.items():
            record = self.record(where, offset)
            own = next((each for each in reversed(record.deliveries) if each.member is member), None)
            if own is None:
                continue
            claim.deliveries[offset] = own
            own.unanswered += 1
            if type in FINAL:
                record.may_be_final = True
            elif type == AcknowledgeType.RELEASE:
                own.given_back = True
                own.releases += 1
        return claim

    def told(self, claim: Claim, code: int, by: str) -> None:
        """A broker answers it."""
        where, now = claim.where, self._now()
        offsets = list(claim.types)
        self._note(f"{by} answers {claim.member.member_id} with {code} to {where} {offsets[0]} to {offsets[-1]}")
        if claim.era != self.era or self.is_doubted():
            return
        for own in claim.deliveries.values() if code == ErrorCode.NONE or code in REFUSED else ():
            own.unanswered -= 1
        if code in REFUSED:
            self._check_refusal(claim, code, now, by)
        if code != ErrorCode.NONE:
            self.counts["acknowledgements refused"] += 1
            return
        for offset, type in claim.types.items():
            record, held = self.record(where, offset), claim.deliveries.get(offset)
            self.counts[AcknowledgeType(type).name.lower()] += 1
            if type in FINAL or held is None:
                if held is not None:
                    self.last_accepted = where, now
                how = FINAL.get(AcknowledgeType(type), "passed over")
                record.final = record.final or f"{how} by {claim.member.member_id}, as {by} answered"
            elif type == AcknowledgeType.RENEW:
                until = claim.asked_at + self._lock_seconds - ROUNDED_SECONDS
                held.locked_until = max(held.locked_until, until)

    def _check_refusal(self, claim: Claim, code: int, now: float, by: str) -> None:
        """Whether one of the records may be another's by now, or nobody's."""
        if self._clocks_differ() or self._may_have_ended(claim.member) or len(claim.deliveries) < len(claim.types):
            return
        for offset, own in claim.deliveries.items():
            record = self.record(claim.where, offset)
            was_released = own.given_back and claim.types[offset] != AcknowledgeType.RELEASE
            is_last = record.deliveries[-1] is own
            if record.final or was_released or own.unanswered or not is_last or now >= own.locked_until:
                return
        raise Violation(
            f"{claim.where}: {by} answers {claim.member.member_id} with {code}, though it holds {list(claim.types)}"
        )

    # The end.

    def judge(self, where: TopicPartition, start: int, end: int, there: Collection[int]) -> None:
        """The group has nothing left in this partition, whose log begins and ends there and has these records."""
        if self.is_doubted():
            return
        now = self._now()
        for offset in range(max(start, self._starts.get(where, 0)), end):
            record = self.record(where, offset)
            if record.final or record.may_be_final or offset not in there:
                continue
            last = record.deliveries[-1] if record.deliveries else None
            known, since = (0, self._began_at) if last is None else (last.count, last.asked_at)
            unseen = FEW if self._clocks_differ() else self._unseen(since, now)
            if known + unseen < self._limit:
                raise Violation(f"{where}: {offset} was delivered {known} times, not acknowledged, and is passed over")
            self.counts["given up"] += 1
