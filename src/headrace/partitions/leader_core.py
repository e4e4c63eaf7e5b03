"""What a leader decides, without I/O: the in-sync set, each replica's position, the high watermark.

A position is the offset below which a replica holds everything in the way the topic's durability asks for: written to
the page cache, or flushed to disk. The high watermark is the least position over the in-sync set. It never falls within
an epoch, and it stands still while the set is smaller than the minimum. One node alone is a set of one.

A member of the set is a broker in one incarnation, that is, one run of its process: a position that another incarnation
told counts for nothing. While a change of the set is proposed and not answered, nobody knows which of the two sets
holds: the watermark then needs the positions of both, and the minimum is counted over the members that are in both.

The start of a partition rises in the same way, so that no change of leader lowers it: the leader only wants a start;
its followers raise theirs, make it safe on disk and tell it; when all that count have it, the leader raises its own,
and consumers are told of it when that is safe too. So each member's start is at least what any leader has told. A new
leader that does not begin at 0 cannot know which starts the one before had told: it tells none until all members have
its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

REFUSED_PAUSE_SECONDS: Final = 1.0
STRIKES_TO_LEAVE: Final = 3
STRIKES_TO_STAY_OUT: Final = 20
STRIKE_SECONDS: Final = 0.9
"""A follower's rounds are judged at most once in this time, however often the set is: it is judged once a second, and
besides at each position of a follower that is not in it."""
UNKNOWN: Final = -1
START_SECONDS_MAX: Final = 30.0
"""A member that does not raise its start at all in this time leaves the set: the others could delete nothing."""
NEVER_REACHED: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class SetChange:
    """The in-sync set as its leader wants it: broker to incarnation."""

    members: Mapping[int, str]
    added: tuple[int, ...]
    removed: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class LagLimits:
    """When a follower is too far behind. A round limit of 0 is off; otherwise it takes a few seconds of slow rounds to
    leave, and many of quick ones to return."""

    lag_seconds: float = 10.0
    round_seconds: float = 0.0


class Progress:
    """A follower in one incarnation and one subscription; offsets below which it has everything."""

    __slots__ = (
        "caught_up_at",
        "end_then",
        "flushed",
        "has_lost",
        "heard_at",
        "incarnation",
        "queued",
        "received",
        "rounds_judged_at",
        "sent",
        "start",
        "start_due_at",
        "strikes",
        "written",
    )

    def __init__(self, incarnation: str, now: float) -> None:
        self.incarnation = incarnation
        self.queued = self.sent = self.received = self.written = self.flushed = UNKNOWN
        self.start = UNKNOWN
        """Where its log begins, safe on its disk."""
        self.start_due_at = now
        """Since when it begins below what is wanted, if it does, and has not come nearer."""
        self.caught_up_at = self.heard_at = now
        """When it last held all that the leader had; when it last told its position."""
        self.end_then = NEVER_REACHED
        """Where the leader's log ended when it last told its position."""
        self.has_lost = False
        """It began below what may be committed, which no member of the set may."""
        self.strikes = 0
        """Slow rounds less quick ones, from 0 to `STRIKES_TO_LEAVE`; then `STRIKES_TO_STAY_OUT`, less quick ones."""
        self.rounds_judged_at = now


class LeaderCore:
    """State of the leader of one partition in one epoch. Methods answer whether the watermark rose."""

    __slots__ = (
        "_began_at",
        "_min_setting",
        "_own_start",
        "_pause_until",
        "adding",
        "broker",
        "counted",
        "enough_in_sync",
        "epoch",
        "epoch_start",
        "flushed_counts",
        "followers",
        "high_watermark",
        "incarnation",
        "members",
        "min_in_sync",
        "position",
        "proposed_members",
        "replicas",
        "revision",
        "start",
        "wanted_start",
    )

    def __init__(
        self,
        broker: int,
        epoch: int,
        epoch_start: int,
        high_watermark: int,
        members: Mapping[int, str],
        min_in_sync: int = 1,
        *,
        replicas: Iterable[int] = (),
        adding: Iterable[int] = (),
        flushed_counts: bool = False,
        revision: int = 0,
        now: float = 0.0,
        own_start: int = 0,
        told_start: int = 0,
    ) -> None:
        self.broker = broker
        self.incarnation = members[broker]
        self.epoch = epoch
        self.epoch_start = epoch_start
        self.high_watermark = high_watermark
        self.members = dict(members)
        self.proposed_members: Mapping[int, str] | None = None
        self.replicas = tuple(replicas) or tuple(members)
        self.adding = tuple(adding)
        self.flushed_counts = flushed_counts
        self.revision = revision
        """Of the key that the set was read from; an older one says nothing new."""
        self._own_start = own_start
        self.wanted_start = own_start
        """Where the partition is to begin: followers are told. Never below where the leader's own log begins."""
        self.start = own_start if own_start <= told_start else UNKNOWN
        """Where it begins, as consumers are told; `told_start` is what they were told before this epoch, as far as this
        broker knows."""
        self.position = high_watermark
        self.followers: dict[int, Progress] = {}
        self._min_setting = min_in_sync
        self._began_at = now
        self._pause_until = now
        self.counted: tuple[Progress, ...] | None = ()
        """Followers whose positions the watermark needs; None: one of them has told none yet."""
        self._recount()

    @property
    def in_sync(self) -> frozenset[int]:
        return frozenset(self.members)

    def is_member(self, broker: int, incarnation: str) -> bool:
        return self.members.get(broker) == incarnation

    def counts(self, broker: int, incarnation: str) -> bool:
        """Whether it is a member, or may be one for all that is known."""
        proposed = self.proposed_members
        return self.is_member(broker, incarnation) or (proposed is not None and proposed.get(broker) == incarnation)

    def may_count(self, broker: int) -> bool:
        """Whether it is a member in any incarnation: the controller may carry it over to the one that it has now."""
        return broker in self.members or (self.proposed_members is not None and broker in self.proposed_members)

    # Positions.

    def moved(self, position: int) -> bool:
        """The leader itself holds everything below the position."""
        if position <= self.position:
            return False
        self.position = position
        return self._advance()

    def subscribed(self, broker: int, incarnation: str, from_offset: int, now: float) -> Progress:
        """A follower begins, or begins again, to copy from this offset: what it told before counts no more."""
        before = self.followers.get(broker)
        progress = self.followers[broker] = Progress(incarnation, now)
        if before is not None and before.incarnation == incarnation:
            progress.caught_up_at = before.caught_up_at
            progress.end_then, progress.heard_at = before.end_then, before.heard_at
            progress.strikes, progress.rounds_judged_at = before.strikes, before.rounds_judged_at
            progress.start_due_at = before.start_due_at
        progress.has_lost = from_offset < self.high_watermark
        self._recount()
        return progress

    def committed_before(self, *, mends: bool) -> int:
        """No member may lack anything below this offset. After a restart of all replicas the watermark is an old one:
        until it has reached what the epoch began with, all of that may be committed. A member that never held so much
        shows that it is not; one that drops what it held, to mend it, shows nothing."""
        return max(self.high_watermark, self.epoch_start) if mends else self.high_watermark

    def must_leave(self, broker: int, incarnation: str, from_offset: int, now: float) -> None:
        """A member asks for what may be committed: it goes out of the set before it gets it."""
        self.subscribed(broker, incarnation, from_offset, now).has_lost = True

    def unsubscribed(self, broker: int, progress: Progress) -> None:
        """Its link is gone; a member holds what it last told until it leaves the set or tells otherwise."""
        if self.followers.get(broker) is progress and self.members.get(broker) != progress.incarnation:
            del self.followers[broker]
            self._recount()

    def heard(
        self, progress: Progress, received: int, written: int, flushed: int, end: int, now: float, start: int = 0
    ) -> bool:
        """A follower told its positions, and where its log begins; `end` is where the leader's own log ends."""
        if UNKNOWN < progress.start < start:
            progress.start_due_at = now
        progress.received, progress.written, progress.flushed, progress.start = received, written, flushed, start
        position = flushed if self.flushed_counts else written
        if position >= end:
            progress.caught_up_at = now
        elif position >= progress.end_then:
            progress.caught_up_at = max(progress.caught_up_at, progress.heard_at)
        progress.end_then, progress.heard_at = end, now
        if progress.has_lost and position >= self.high_watermark:
            progress.has_lost = False
        return self._advance()

    def min_in_sync_changed(self, min_in_sync: int) -> bool:
        """The setting was altered; 0 is a majority of the replicas."""
        self._min_setting = min_in_sync
        self._recount()
        return self._advance()

    def replicas_changed(self, replicas: Iterable[int], adding: Iterable[int] = ()) -> bool:
        """`adding` are those that a move is only about to make replicas: a majority is one without them."""
        self.replicas, self.adding = tuple(replicas), tuple(adding)
        for broker in [broker for broker in self.followers if broker not in self.replicas]:
            if broker not in self.members:
                del self.followers[broker]
        self._recount()
        return self._advance()

    def durability_changed(self, *, flushed_counts: bool, position: int) -> bool:
        """The setting was altered; `position` is what the leader itself holds in the way that counts from now on."""
        self.flushed_counts, self.position = flushed_counts, position
        return self._advance()

    def _recount(self) -> None:
        sets = (self.members,) if self.proposed_members is None else (self.members, self.proposed_members)
        counted: dict[Progress, None] = {}
        unheard = any(members.get(self.broker) != self.incarnation for members in sets)
        for members in sets:
            for broker, incarnation in members.items():
                if broker == self.broker:
                    continue
                progress = self.followers.get(broker)
                if progress is None or progress.incarnation != incarnation:
                    unheard = True
                else:
                    counted[progress] = None
        self.counted = None if unheard else tuple(counted)
        self.min_in_sync = self._min_setting or majority(len(self.replicas) - len(self.adding))
        sure = sets[0].items() if len(sets) == 1 else sets[0].items() & sets[1].items()
        self.enough_in_sync = len(sure) >= self.min_in_sync

    def _advance(self) -> bool:
        counted = self.counted
        if counted is None or not self.enough_in_sync:
            return False
        least = self.position
        for progress in counted:
            position = progress.flushed if self.flushed_counts else progress.written
            least = min(least, position)
        if least <= self.high_watermark:
            return False
        self.high_watermark = least
        return True

    # The start.

    def want_start(self, offset: int, now: float) -> None:
        """All that lies below this offset, and is committed, is to be deleted."""
        assert offset <= self.high_watermark, "what is not committed is not deleted"
        for progress in self.followers.values():
            if self.wanted_start <= progress.start < offset:
                progress.start_due_at = now
        self.wanted_start = max(self.wanted_start, offset)

    def agreed_start(self) -> int:
        """Where all followers that count have their starts safe on disk: so far the leader may raise its own."""
        counted = self.counted
        if counted is None:
            return UNKNOWN
        return min(self.wanted_start, min((progress.start for progress in counted), default=self.wanted_start))

    def start_safe(self, offset: int) -> bool:
        """The leader's own start is safe on disk. True: what consumers are told rose."""
        start = min(offset, self.agreed_start())
        if start <= self.start or start < self._own_start:
            return False
        self.start = start
        return True

    # The in-sync set.

    def wanted_change(self, now: float, end: int, heard_at: Mapping[int, float], limits: LagLimits) -> SetChange | None:
        """The set as it should be, if that is not as it is. `heard_at` says when each broker's link last spoke."""
        if self.proposed_members is not None or now < self._pause_until:
            return None
        members = dict(self.members)
        reasons: list[str] = []
        for broker, incarnation in self.members.items():
            if broker != self.broker and (why := self._why_out(broker, incarnation, now, end, heard_at, limits)):
                del members[broker]
                reasons.append(f"{broker} {why}")
        for broker, progress in self.followers.items():
            if self.is_member(broker, progress.incarnation) or self._silent(broker, now, heard_at) > limits.lag_seconds:
                continue
            if self._may_join(broker, progress, now, end, limits):
                members[broker] = progress.incarnation
                reasons.append(f"{broker} has caught up")
        if members == self.members:
            return None
        added = tuple(broker for broker in members if self.members.get(broker) != members[broker])
        removed = tuple(broker for broker in self.members if broker not in members)
        return SetChange(members, added, removed, ", ".join(reasons))

    def _why_out(
        self, broker: int, incarnation: str, now: float, end: int, heard_at: Mapping[int, float], limits: LagLimits
    ) -> str:
        progress = self.followers.get(broker)
        if progress is not None and progress.incarnation != incarnation:
            progress = None
        if progress is not None and progress.has_lost:
            return f"lacks, or has to copy anew, what may be committed (watermark {self.high_watermark})"
        if progress is not None and progress.start != UNKNOWN and (why := self._why_out_by_start(progress, now)):
            return why
        silent = self._silent(broker, now, heard_at)
        if silent > limits.lag_seconds:
            return f"was not heard from in {silent:.1f} s"
        if progress is None:
            behind = now - self._began_at
        else:
            behind = self._behind(progress, now, end)
            if self._is_slow(progress, behind, now, limits):
                return f"was too often more than {limits.round_seconds * 1000:.0f} ms behind"
        return f"was behind for {behind:.1f} s" if behind > limits.lag_seconds else ""

    def _why_out_by_start(self, progress: Progress, now: float) -> str:
        if progress.start < self.start:
            return f"begins at {progress.start}, and consumers were told {self.start}"
        if progress.start < self.wanted_start and now - progress.start_due_at > START_SECONDS_MAX:
            return f"begins at {progress.start} for {START_SECONDS_MAX:.0f} s, and not at {self.wanted_start}"
        return ""

    def _silent(self, broker: int, now: float, heard_at: Mapping[int, float]) -> float:
        return now - max(heard_at.get(broker, self._began_at), self._began_at)

    def _may_join(self, broker: int, progress: Progress, now: float, end: int, limits: LagLimits) -> bool:
        """At or beyond both the watermark and what this epoch began with, and with the start that is wanted."""
        if broker not in self.replicas or progress.start < self.wanted_start:
            return False
        position = progress.flushed if self.flushed_counts else progress.written
        if position < self.high_watermark or position < self.epoch_start:
            return False
        return not self._is_slow(progress, self._behind(progress, now, end), now, limits)

    def _behind(self, progress: Progress, now: float, end: int) -> float:
        position = progress.flushed if self.flushed_counts else progress.written
        if position >= end:
            progress.caught_up_at = now
        return now - max(progress.caught_up_at, self._began_at)

    def _is_slow(self, progress: Progress, behind: float, now: float, limits: LagLimits) -> bool:
        """The rule of quick rounds, with hysteresis: each flap would cost a change of metadata."""
        if not limits.round_seconds:
            return False
        if now - progress.rounds_judged_at < STRIKE_SECONDS:
            return progress.strikes >= STRIKES_TO_LEAVE
        progress.rounds_judged_at = now
        if behind <= limits.round_seconds:
            progress.strikes = max(0, progress.strikes - 1)
        elif progress.strikes < STRIKES_TO_LEAVE:
            progress.strikes += 1
            if progress.strikes == STRIKES_TO_LEAVE:
                progress.strikes = STRIKES_TO_STAY_OUT
        return progress.strikes >= STRIKES_TO_LEAVE

    def proposed(self, change: SetChange) -> None:
        """The change is about to be written: from now on both sets count."""
        assert self.proposed_members is None, "one change at a time"
        assert self.broker in change.members, "a leader is always in its own in-sync set"
        self.proposed_members = dict(change.members)
        self._recount()

    def confirmed(self, members: Mapping[int, str], revision: int) -> bool:
        """The set as its key has it. A newer revision also settles what was proposed: either it is that very change, or
        it keeps the change from ever being made."""
        if revision <= self.revision:
            return False
        self.revision = revision
        self.proposed_members = None
        self.members = dict(members)
        self._recount()
        return self._advance()

    def refused(self, now: float) -> bool:
        """The change was not made and never will be."""
        self.proposed_members = None
        self._pause_until = now + REFUSED_PAUSE_SECONDS
        self._recount()
        return self._advance()


def majority(count: int) -> int:
    return count // 2 + 1
