"""One partition's batches on their way: which may leave now, under which sequence, and what an answer means for them.

No I/O and no clock: times come in, batches and their fates go out. Of an idempotent lane this holds:

- Batches leave in the order in which they were added. A batch gets its sequence when it first leaves, and keeps it, and
  its records, as long as an attempt at it may have been written.
- A log that does not know a producer takes any sequence from it. So until one batch has been acknowledged by this
  leader, and again after every failure, after a move of the leader and after a while of silence, one batch travels
  alone: none can slip past one that is refused.
- At most `in_flight` are out, never more than brokers remember (five): a batch sent again is recognised.
- A batch that is given up after its sequence was used leaves a hole, which the lane closes by a new epoch, from
  sequence 0 on. The log refuses the old epoch from then on, so what an old connection still carries cannot land behind
  newer batches. The hole is *sure* if no attempt at that batch can have been written: then nothing behind it can be,
  and all of it goes again under the new epoch. It is *open* if one may have been: then what follows and may be written
  too is tried under the old epoch first. The log has it, or takes it, or refuses it; in the last case its fate is told
  as unknown, because to send it under the new epoch could write it twice.
- A batch that the log refuses for its size goes on in parts. They have its sequences among them, so what was sent
  behind it keeps its own and follows when they are written.

Other lanes (acks 0 or 1) try again as long as it makes sense: a batch may be written twice, and, unless `in_flight` is
1, behind a later one.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from headrace.client.producer.outcomes import Outcome
from headrace.errors import HeadraceError

REMEMBERED_BATCHES: Final = 5
SEQUENCES: Final = 1 << 31
LAST_EPOCH: Final = 32_766
PROVEN_FOR_S: Final = 60.0
PAUSE_S: Final = 0.02
PAUSE_MAX_S: Final = 0.5


class Fate(Enum):
    DELIVERED = auto()
    FAILED = auto()
    """Not written."""
    UNKNOWN = auto()
    """May be written or not."""


@dataclass(slots=True, eq=False)
class Whole:
    """A batch that goes on in parts, itself maybe a part."""

    unsure: bool
    """An attempt at it may have been written; not once a part was, as they have its sequences."""
    within: Whole | None


@dataclass(slots=True, eq=False)
class Parcel:
    """One batch. `content` is the sender's; the lane looks at the numbers only."""

    count: int
    deadline: float
    content: object = None
    movable: bool = False
    """No key and no partition was asked for: another partition is as good."""
    place: int = -1
    """Order of arrival in its lane: how many records came before it."""
    producer_id: int = -1
    epoch: int = -1
    sequence: int = -1
    attempt: int = 0
    """Counts attempts: an answer to an older one says nothing any more."""
    whole: Whole | None = None
    """What it is a part of."""
    told: bool = False
    """Its fate was told before an attempt at it ended."""
    sent_at: float = 0.0
    reason: HeadraceError | None = None
    """What went wrong last; the sender's."""
    _unsure: bool = False

    @property
    def unsure(self) -> bool:
        """An attempt may have been written, at it or at what it is a part of."""
        return self._unsure or any(whole.unsure for whole in self._wholes())

    @unsure.setter
    def unsure(self, unsure: bool) -> None:
        self._unsure = unsure
        if not unsure:
            self.whole = None

    def divide(self) -> Whole:
        """What its parts are parts of."""
        return Whole(self._unsure, self.whole)

    def outdo_wholes(self) -> None:
        """It was written under its own sequence: what it is a part of was not, and will not be."""
        for whole in self._wholes():
            whole.unsure = False

    def _wholes(self) -> Iterator[Whole]:
        whole = self.whole
        while whole is not None:
            yield whole
            whole = whole.within

    @property
    def stamped(self) -> bool:
        return self.sequence >= 0

    def unstamp(self) -> None:
        self.producer_id = self.epoch = self.sequence = -1


Verdict = tuple[Parcel, Fate]


@dataclass(slots=True)
class _Pause:
    until: float = 0.0
    next_s: float = PAUSE_S

    def grow(self, now: float) -> None:
        """Once for all batches that come back together."""
        if self.until <= now:
            self.until = now + self.next_s
            self.next_s = min(2 * self.next_s, PAUSE_MAX_S)

    def end(self) -> None:
        self.until, self.next_s = 0.0, PAUSE_S


@dataclass(slots=True, eq=False)
class Lane:
    topic: str
    partition: int
    acks: int
    idempotent: bool
    in_flight: int = REMEMBERED_BATCHES
    leader: int = -1
    """The broker that the batches in flight went to."""
    wants_identity: bool = False
    """A producer id has to come by `adopt` before anything leaves."""
    renewals: int = 0
    producer_id: int = -1
    epoch: int = -1
    waiting: deque[Parcel] = field(default_factory=deque)
    """In order; those that were sent before come first."""
    flying: list[Parcel] = field(default_factory=list)
    _next_sequence: int = 0
    _places: int = 0
    _proven_at: float | None = None
    _sure_hole: int | None = None
    _open_holes: set[int] = field(default_factory=set)
    _distrusted: bool = False
    """The log has answered what it cannot, if it knew this producer: nothing follows from the order of sequences."""
    _fenced: bool = False
    _pause: _Pause = field(default_factory=_Pause)

    def __post_init__(self) -> None:
        if self.idempotent:
            self.in_flight = min(self.in_flight, REMEMBERED_BATCHES)
            self.wants_identity = True

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.flying

    @property
    def paused_until(self) -> float:
        return self._pause.until

    def add(self, parcel: Parcel) -> None:
        parcel.place = self._places
        self._places += parcel.count
        self.waiting.append(parcel)

    def adopt(self, producer_id: int, epoch: int) -> None:
        """An identity that no batch of this lane has used yet."""
        assert self.wants_identity
        self.producer_id, self.epoch = producer_id, epoch
        self._next_sequence = 0
        self.wants_identity = False

    def doubt(self) -> None:
        """The log may be another one now: the next batch travels alone."""
        self._proven_at = None

    def hurry(self) -> None:
        """What made the last attempt fail has changed."""
        self._pause.end()

    def stamp_alone(self, leader: int) -> tuple[int, int, int] | None:
        """The stamp under which a batch may go to this leader now, as the only one; None if it is not as simple."""
        if self.waiting or self.flying or self.wants_identity:
            return None
        if self._sure_hole is not None or self._open_holes:
            return None
        if leader != self.leader or self._pause.until:
            return None
        return (self.producer_id, self.epoch, self._next_sequence) if self.idempotent else (-1, -1, -1)

    def went_alone(self, count: int, now: float) -> None:
        """A batch of so many records was written under that stamp; nothing else was asked of the lane meanwhile."""
        self._places += count
        self._proven_at = now
        if self.idempotent:
            self._next_sequence = (self._next_sequence + count) % SEQUENCES

    def next(self, now: float, leader: int) -> Parcel | None:
        """The batch to send to this leader now; it counts as in flight from here on."""
        if not self.waiting or self._pause.until > now:
            return None
        if self.flying:
            if leader != self.leader or self._holed or len(self.flying) >= self._window(now):
                return None
        elif leader != self.leader:
            self.leader = leader
            self.doubt()
        if self._holed and not self._old_epoch_serves(self.waiting[0]):
            self._renew()
        if self.wants_identity:
            return None
        parcel = self.waiting.popleft()
        if self.idempotent and not parcel.stamped:
            parcel.producer_id, parcel.epoch, parcel.sequence = self.producer_id, self.epoch, self._next_sequence
            self._next_sequence = (self._next_sequence + parcel.count) % SEQUENCES
        parcel.attempt += 1
        parcel.sent_at = now
        self.flying.append(parcel)
        return parcel

    def answered(self, parcel: Parcel, attempt: int, outcome: Outcome, now: float) -> list[Verdict]:
        """An attempt has ended. Gives the fates that this settles; what is worth another try waits again."""
        if attempt != parcel.attempt or parcel not in self.flying:
            return []
        self.flying.remove(parcel)
        if outcome is Outcome.KNOWN and not parcel.unsure:
            # The log claims to have a sequence under which nothing of ours can be: to believe it would lose the batch.
            outcome = Outcome.GAP
        if outcome in (Outcome.WRITTEN, Outcome.KNOWN):
            if outcome is Outcome.WRITTEN and parcel.stamped:
                parcel.outdo_wholes()
            self._written(parcel, now)
            return [] if parcel.told else [(parcel, Fate.DELIVERED)]
        self._proven_at = None
        if outcome in (Outcome.UNSURE, Outcome.LOST):
            parcel.unsure = True
        verdicts: list[Verdict] = []
        if parcel.told or outcome in (Outcome.DENIED, Outcome.TOO_LARGE, Outcome.LOST):
            verdicts = self._give_up(parcel)
        elif not self.idempotent or outcome not in (Outcome.GAP, Outcome.FENCED):
            self._wait_again(parcel, now)
        else:
            verdicts = self._out_of_sequence(parcel, outcome, now)
        if self._distrusted and not self.flying:
            verdicts += self.withdraw(lambda other: other.stamped and other.unsure)
        return verdicts

    def splits(self, parcel: Parcel, attempt: int) -> bool:
        """Whether the batch can go on in parts, now that this attempt was refused for its size."""
        return attempt == parcel.attempt and parcel in self.flying and parcel.count > 1 and not parcel.told

    def split(self, parcel: Parcel, parts: Sequence[Parcel]) -> None:
        """Parts of a batch in flight that was refused for its size wait in its place."""
        assert sum(part.count for part in parts) == parcel.count
        self.flying.remove(parcel)
        self._proven_at = None
        followed = any(other.stamped and other.place > parcel.place for other in (*self.flying, *self.waiting))
        keep = parcel.stamped and (followed or parcel.unsure)
        if parcel.stamped and not keep:
            self._next_sequence = parcel.sequence
        first, whole = 0, parcel.divide()
        for part in parts:
            part.place, part.whole = parcel.place + first, whole
            if keep:
                part.producer_id, part.epoch = parcel.producer_id, parcel.epoch
                part.sequence = (parcel.sequence + first) % SEQUENCES
            first += part.count
            insort(self.waiting, part, key=lambda waiting: waiting.place)

    def expire(self, now: float) -> list[Verdict]:
        """Fates of batches whose time is up. Those in flight stay there, told, until their attempt ends."""
        verdicts: list[Verdict] = []
        for parcel in self.flying:
            if parcel.deadline <= now and not parcel.told:
                parcel.told = True
                verdicts.append((parcel, Fate.UNKNOWN))
        return verdicts + self.withdraw(lambda parcel: parcel.deadline <= now)

    def abandon(self, now: float) -> list[Verdict]:
        """The leader that the batches in flight went to is not the leader any more: they are to be sent again.

        Only for idempotent lanes, where a log that has a batch already knows it again.
        """
        assert self.idempotent
        verdicts = []
        for parcel in list(self.flying):
            verdicts += self.answered(parcel, parcel.attempt, Outcome.UNSURE, now)
        self._pause.end()
        return verdicts

    def release(self, parcel: Parcel) -> bool:
        """Let go of a batch that waits, so that it can go to another partition; False if the log here may have it."""
        if self.idempotent and parcel.unsure:
            return False
        self.waiting.remove(parcel)
        self._give_up(parcel)
        parcel.unstamp()
        return True

    def withdraw(self, matches: Callable[[Parcel], bool]) -> list[Verdict]:
        """Give up the batches that wait and match."""
        verdicts: list[Verdict] = []
        for parcel in [parcel for parcel in self.waiting if matches(parcel)]:
            self.waiting.remove(parcel)
            verdicts += self._give_up(parcel)
        return verdicts

    @property
    def _holed(self) -> bool:
        return self._sure_hole is not None or bool(self._open_holes)

    def _window(self, now: float) -> int:
        if not self.idempotent:
            return self.in_flight
        return self.in_flight if self._proven_at is not None and now - self._proven_at < PROVEN_FOR_S else 1

    def _written(self, parcel: Parcel, now: float) -> None:
        self._proven_at = now
        self._pause.end()
        if self._open_holes:
            # Sequences are taken in order, so what was given up before this one is in the log.
            self._open_holes = {place for place in self._open_holes if place > parcel.place}

    def _out_of_sequence(self, parcel: Parcel, outcome: Outcome, now: float) -> list[Verdict]:
        behind_sure_hole = self._sure_hole is not None and self._sure_hole < parcel.place
        behind_open_hole = any(place < parcel.place for place in self._open_holes)
        follows = any(other.stamped and other.place < parcel.place for other in (*self.flying, *self.waiting))
        if outcome is Outcome.FENCED:
            self._fenced = self._distrusted = True
        elif follows or behind_sure_hole:
            self._wait_again(parcel, now)
            return []
        elif not behind_open_hole:
            self._distrusted = True
        if parcel.unsure:
            return self._give_up(parcel)
        self._note_hole(parcel.place - 1)
        self._wait_again(parcel, now)
        return []

    def _wait_again(self, parcel: Parcel, now: float) -> None:
        insort(self.waiting, parcel, key=lambda waiting: waiting.place)
        self._pause.grow(now)

    def _give_up(self, parcel: Parcel) -> list[Verdict]:
        if parcel.stamped and parcel.unsure:
            self._open_holes.add(parcel.place)
        elif parcel.stamped:
            self._note_hole(parcel.place)
        if parcel.told:
            return []
        return [(parcel, Fate.UNKNOWN if parcel.unsure else Fate.FAILED)]

    def _note_hole(self, place: int) -> None:
        self._sure_hole = place if self._sure_hole is None else min(place, self._sure_hole)

    def _old_epoch_serves(self, first: Parcel) -> bool:
        """Whether the first batch that waits goes on under the old epoch, though there is a hole somewhere."""
        if not first.stamped or self._fenced:
            return False
        if self._sure_hole is not None and self._sure_hole < first.place:
            return False
        return first.unsure or not any(place < first.place for place in self._open_holes)

    def _renew(self) -> None:
        """Begin a new epoch. Nothing is in flight, and the log has nothing of what waits."""
        for parcel in self.waiting:
            parcel.unstamp()
            parcel.unsure = False
        self._sure_hole = None
        self._open_holes.clear()
        self._proven_at = None
        self._next_sequence = 0
        self.renewals += 1
        if self._fenced or self.epoch >= LAST_EPOCH:
            self.wants_identity = True
        self.epoch += 1
        self._fenced = self._distrusted = False
