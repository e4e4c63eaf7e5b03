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
besides at each position of a follower that is not in it, and when a member asks for what may be committed."""
UNKNOWN: Final = -1
START_SECONDS_MAX: Final = 30.0
"""A member that does not raise its start at all in this time leaves the set: the others could delete nothing."""
NEVER_REACHED: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class IsrChange:
    """The in-sync set as its leader wants it, broker to incarnation, and in what it differs from what it is."""

    isr: Mapping[int, str]
    added: tuple[int, ...]
    removed: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class LagLimits:
    """When a follower is too far behind. A round limit of 0 is off; otherwise it takes a few seconds of slow rounds to
    leave, and many of quick ones to return."""

    lag_seconds: float = 10.0
    round_seconds: float = 0.0


class FollowerState:
    """A follower in one incarnation and one subscription; offsets below which it has everything."""

    __slots__ = (
        "below_committed",
        "caught_up_at",
        "flushed",
        "incarnation",
        "leader_end_at_report",
        "queued",
        "received",
        "reported_at",
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
        self.caught_up_at = self.reported_at = now
        """When it last held all that the leader had; when it last reported its positions."""
        self.leader_end_at_report = NEVER_REACHED
        """Where the leader's log ended at that report: who holds that at a later one held all that there was then."""
        self.below_committed = False
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
        "epoch",
        "epoch_start",
        "flush_required",
        "followers",
        "has_min_isr",
        "high_watermark",
        "incarnation",
        "isr",
        "min_isr",
        "needed_followers",
        "position",
        "proposed_isr",
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
        isr: Mapping[int, str],
        min_isr: int = 1,
        *,
        replicas: Iterable[int] = (),
        adding: Iterable[int] = (),
        flush_required: bool = False,
        revision: int = 0,
        now: float = 0.0,
        own_start: int = 0,
        told_start: int = 0,
    ) -> None:
        self.broker = broker
        self.incarnation = isr[broker]
        self.epoch = epoch
        self.epoch_start = epoch_start
        self.high_watermark = high_watermark
        self.isr = dict(isr)
        self.proposed_isr: Mapping[int, str] | None = None
        self.replicas = tuple(replicas) or tuple(isr)
        self.adding = tuple(adding)
        self.flush_required = flush_required
        self.revision = revision
        """Of the key that the set was read from; an older one says nothing new."""
        self._own_start = own_start
        self.wanted_start = own_start
        """Where the partition is to begin: followers are told. Never below where the leader's own log begins."""
        self.start = own_start if own_start <= told_start else UNKNOWN
        """Where it begins, as consumers are told; `told_start` is what they were told before this epoch, as far as this
        broker knows."""
        self.position = high_watermark
        self.followers: dict[int, FollowerState] = {}
        self._min_setting = min_isr
        self._began_at = now
        self._pause_until = now
        self.needed_followers: tuple[FollowerState, ...] | None = ()
        """Those whose positions the watermark needs; None: the set names one of them, or the leader, in an incarnation
        that is not here."""
        self._update_quorum()

    def is_in_sync(self, broker: int, incarnation: str) -> bool:
        return self.isr.get(broker) == incarnation

    def may_be_in_sync(self, broker: int, incarnation: str) -> bool:
        """Whether it is in the set, or in the proposed one, which may hold by now."""
        proposed = self.proposed_isr
        return self.is_in_sync(broker, incarnation) or (proposed is not None and proposed.get(broker) == incarnation)

    def may_be_carried_over(self, broker: int) -> bool:
        """Whether either set has it in any incarnation: the controller may carry it over to the one that it has now."""
        return broker in self.isr or (self.proposed_isr is not None and broker in self.proposed_isr)

    # Positions.

    def moved(self, position: int) -> bool:
        """The leader itself holds everything below the position."""
        if position <= self.position:
            return False
        self.position = position
        return self._advance()

    def subscribed(self, broker: int, incarnation: str, from_offset: int, now: float) -> FollowerState:
        """A follower begins, or begins again, to copy from this offset: what it told before counts no more."""
        before = self.followers.get(broker)
        follower = self.followers[broker] = FollowerState(incarnation, now)
        if before is not None and before.incarnation == incarnation:
            follower.caught_up_at = before.caught_up_at
            follower.leader_end_at_report, follower.reported_at = before.leader_end_at_report, before.reported_at
            follower.strikes, follower.rounds_judged_at = before.strikes, before.rounds_judged_at
            follower.start_due_at = before.start_due_at
        follower.below_committed = from_offset < self.high_watermark
        self._update_quorum()
        return follower

    def committed_before(self, *, mends: bool) -> int:
        """No member may lack anything below this offset. After a restart of all replicas the watermark is an old one:
        until it has reached what the epoch began with, all of that may be committed. A member that never held so much
        shows that it is not; one that drops what it held, to mend it, shows nothing."""
        return max(self.high_watermark, self.epoch_start) if mends else self.high_watermark

    def asked_below_committed(self, broker: int, incarnation: str, from_offset: int, now: float) -> None:
        """A member asks for what may be committed: it goes out of the set before it gets it."""
        self.subscribed(broker, incarnation, from_offset, now).below_committed = True

    def unsubscribed(self, broker: int, follower: FollowerState) -> None:
        """Its link is gone; a member holds what it last told until it leaves the set or tells otherwise."""
        if self.followers.get(broker) is follower and self.isr.get(broker) != follower.incarnation:
            del self.followers[broker]
            self._update_quorum()

    def position_reported(
        self, follower: FollowerState, received: int, written: int, flushed: int, end: int, now: float, start: int = 0
    ) -> bool:
        """A follower reported its positions, and where its log begins; `end` is where the leader's own log ends."""
        if UNKNOWN < follower.start < start:
            follower.start_due_at = now
        follower.received, follower.written, follower.flushed, follower.start = received, written, flushed, start
        position = flushed if self.flush_required else written
        if position >= end:
            follower.caught_up_at = now
        elif position >= follower.leader_end_at_report:
            follower.caught_up_at = max(follower.caught_up_at, follower.reported_at)
        follower.leader_end_at_report, follower.reported_at = end, now
        if follower.below_committed and position >= self.high_watermark:
            follower.below_committed = False
        return self._advance()

    def min_isr_changed(self, min_isr: int) -> bool:
        """The setting was altered; 0 is a majority of the replicas."""
        self._min_setting = min_isr
        self._update_quorum()
        return self._advance()

    def replicas_changed(self, replicas: Iterable[int], adding: Iterable[int] = ()) -> bool:
        """`adding` are those that a move is only about to make replicas: a majority is one without them."""
        self.replicas, self.adding = tuple(replicas), tuple(adding)
        for broker in [broker for broker in self.followers if broker not in self.replicas]:
            if broker not in self.isr:
                del self.followers[broker]
        self._update_quorum()
        return self._advance()

    def durability_changed(self, *, flush_required: bool, position: int) -> bool:
        """The setting was altered; `position` is what the leader itself holds in the way that counts from now on."""
        self.flush_required, self.position = flush_required, position
        return self._advance()

    def _update_quorum(self) -> None:
        sets = (self.isr,) if self.proposed_isr is None else (self.isr, self.proposed_isr)
        needed: dict[FollowerState, None] = {}
        unheard = any(isr.get(self.broker) != self.incarnation for isr in sets)
        for isr in sets:
            for broker, incarnation in isr.items():
                if broker == self.broker:
                    continue
                follower = self.followers.get(broker)
                if follower is None or follower.incarnation != incarnation:
                    unheard = True
                else:
                    needed[follower] = None
        self.needed_followers = None if unheard else tuple(needed)
        self.min_isr = self._min_setting or majority(len(self.replicas) - len(self.adding))
        sure = sets[0].items() if len(sets) == 1 else sets[0].items() & sets[1].items()
        self.has_min_isr = len(sure) >= self.min_isr

    def _advance(self) -> bool:
        needed = self.needed_followers
        if needed is None or not self.has_min_isr:
            return False
        least = self.position
        for follower in needed:
            position = follower.flushed if self.flush_required else follower.written
            least = min(least, position)
        if least <= self.high_watermark:
            return False
        self.high_watermark = least
        return True

    # The start.

    def want_start(self, offset: int, now: float) -> None:
        """All that lies below this offset, and is committed, is to be deleted."""
        assert offset <= self.high_watermark, "what is not committed is not deleted"
        for follower in self.followers.values():
            if self.wanted_start <= follower.start < offset:
                follower.start_due_at = now
        self.wanted_start = max(self.wanted_start, offset)

    def agreed_start(self) -> int:
        """Where all followers that count have their starts safe on disk: so far the leader may raise its own."""
        needed = self.needed_followers
        if needed is None:
            return UNKNOWN
        return min(self.wanted_start, min((follower.start for follower in needed), default=self.wanted_start))

    def start_safe(self, offset: int) -> bool:
        """The leader's own start is safe on disk. True: what consumers are told rose."""
        start = min(offset, self.agreed_start())
        if start <= self.start or start < self._own_start:
            return False
        self.start = start
        return True

    # The in-sync set.

    def judge_isr(self, now: float, end: int, heard_at: Mapping[int, float], limits: LagLimits) -> IsrChange | None:
        """The set as it should be, if that is not as it is. `heard_at` says when each broker's link last spoke.

        Judging changes what is known of followers: who holds all by now has caught up, and slow rounds are counted.
        """
        if self.proposed_isr is not None or now < self._pause_until:
            return None
        isr = dict(self.isr)
        reasons: list[str] = []
        for broker, incarnation in self.isr.items():
            if broker != self.broker and (why := self._judge_member(broker, incarnation, now, end, heard_at, limits)):
                del isr[broker]
                reasons.append(f"{broker} {why}")
        for broker, follower in self.followers.items():
            if (
                self.is_in_sync(broker, follower.incarnation)
                or self._seconds_silent(broker, now, heard_at) > limits.lag_seconds
            ):
                continue
            if self._judge_candidate(broker, follower, now, end, limits):
                isr[broker] = follower.incarnation
                reasons.append(f"{broker} has caught up")
        if isr == self.isr:
            return None
        added = tuple(broker for broker in isr if self.isr.get(broker) != isr[broker])
        removed = tuple(broker for broker in self.isr if broker not in isr)
        return IsrChange(isr, added, removed, ", ".join(reasons))

    def _judge_member(
        self, broker: int, incarnation: str, now: float, end: int, heard_at: Mapping[int, float], limits: LagLimits
    ) -> str:
        """Why it has to leave; empty if it stays. Counts its slow rounds."""
        follower = self.followers.get(broker)
        if follower is not None and follower.incarnation != incarnation:
            follower = None
        if follower is not None and follower.below_committed:
            return f"lacks, or has to copy anew, what may be committed (watermark {self.high_watermark})"
        if follower is not None and follower.start != UNKNOWN and (why := self._why_late_start(follower, now)):
            return why
        silent = self._seconds_silent(broker, now, heard_at)
        if silent > limits.lag_seconds:
            return f"was not heard from in {silent:.1f} s"
        if follower is None:
            behind = now - self._began_at
        else:
            behind = self._update_lag(follower, now, end)
            if self._judge_rounds(follower, behind, now, limits):
                return f"was too often more than {limits.round_seconds * 1000:.0f} ms behind"
        return f"was behind for {behind:.1f} s" if behind > limits.lag_seconds else ""

    def _why_late_start(self, follower: FollowerState, now: float) -> str:
        if follower.start < self.start:
            return f"begins at {follower.start}, and consumers were told {self.start}"
        if follower.start < self.wanted_start and now - follower.start_due_at > START_SECONDS_MAX:
            return f"begins at {follower.start} for {START_SECONDS_MAX:.0f} s, and not at {self.wanted_start}"
        return ""

    def _seconds_silent(self, broker: int, now: float, heard_at: Mapping[int, float]) -> float:
        return now - max(heard_at.get(broker, self._began_at), self._began_at)

    def _judge_candidate(self, broker: int, follower: FollowerState, now: float, end: int, limits: LagLimits) -> bool:
        """Whether it joins: at or beyond both the watermark and what this epoch began with, with the start that is
        wanted, and not slow. Counts its slow rounds."""
        if broker not in self.replicas or follower.start < self.wanted_start:
            return False
        position = follower.flushed if self.flush_required else follower.written
        if position < self.high_watermark or position < self.epoch_start:
            return False
        return not self._judge_rounds(follower, self._update_lag(follower, now, end), now, limits)

    def _update_lag(self, follower: FollowerState, now: float, end: int) -> float:
        """For how many seconds it has been behind. Who holds all that there is, is noted to have caught up now."""
        position = follower.flushed if self.flush_required else follower.written
        if position >= end:
            follower.caught_up_at = now
        return now - max(follower.caught_up_at, self._began_at)

    def _judge_rounds(self, follower: FollowerState, behind: float, now: float, limits: LagLimits) -> bool:
        """Whether its rounds are too slow. Each call counts a strike or takes one off, at most one in STRIKE_SECONDS;
        with hysteresis, because each flap would cost a change of metadata."""
        if not limits.round_seconds:
            return False
        if now - follower.rounds_judged_at >= STRIKE_SECONDS:
            follower.rounds_judged_at = now
            if behind <= limits.round_seconds:
                follower.strikes = max(0, follower.strikes - 1)
            elif follower.strikes < STRIKES_TO_LEAVE:
                follower.strikes += 1
                if follower.strikes == STRIKES_TO_LEAVE:
                    follower.strikes = STRIKES_TO_STAY_OUT
        return follower.strikes >= STRIKES_TO_LEAVE

    def proposed(self, change: IsrChange) -> None:
        """The change is about to be written: from now on both sets count."""
        assert self.proposed_isr is None, "one change at a time"
        assert self.broker in change.isr, "a leader is always in its own in-sync set"
        self.proposed_isr = dict(change.isr)
        self._update_quorum()

    def confirmed(self, isr: Mapping[int, str], revision: int) -> bool:
        """The set as its key has it. A newer revision also settles what was proposed: either it is that very change, or
        it keeps the change from ever being made."""
        if revision <= self.revision:
            return False
        self.revision = revision
        self.proposed_isr = None
        self.isr = dict(isr)
        self._update_quorum()
        return self._advance()

    def refused(self, now: float) -> bool:
        """The change was not made and never will be."""
        self.proposed_isr = None
        self._pause_until = now + REFUSED_PAUSE_SECONDS
        self._update_quorum()
        return self._advance()


def majority(count: int) -> int:
    return count // 2 + 1
