"""One partition's batches on their way: which may leave now, under which sequence, and what an answer means for them.

No I/O and no clock: times come in, batches and their fates go out. Of an idempotent lane this holds:

- Batches leave in the order in which they were added. A batch gets its sequence when it first leaves, and keeps it, and
  its records, as long as an attempt at it may have been written.
- A log that does not know a producer takes any sequence from it. So until one batch has been acknowledged by this
  leader, and again after every failure, after a move of the leader and after a while of silence, one batch travels
  alone: none can slip past one that is refused.
- At most `max_in_flight` are out, never more than brokers remember (five): a batch sent again is recognised.
- A batch that is given up after its sequence was used leaves a hole, which the lane closes by a new epoch, from
  sequence 0 on. The log refuses the old epoch from then on, so what an old connection still carries cannot land behind
  newer batches. The hole is *sure* if no attempt at that batch can have been written: then nothing behind it can be,
  and all of it goes again under the new epoch. It is *open* if one may have been: then what follows and may be written
  too is tried under the old epoch first. The log has it, or takes it, or refuses it; in the last case its fate is
  unknown, because to send it under the new epoch could write it twice.
- A batch that the log refuses for its size goes on in parts. They have its sequences among them, so what was sent
  behind it keeps its own and follows when they are written.

A lane of transactions is idempotent under the producer id and epoch of its transaction, which it never changes by
itself. What it gives up fails the transaction: nothing follows, until the next one begins with `rebase`.

Other lanes (acks 0 or 1) try again as long as it makes sense: a batch may be written twice, and, unless
`max_in_flight` is 1, behind a later one.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final, Generic, TypeVar

from headrace.client.connection.reactor import Backoff
from headrace.errors import ErrorCode, HeadraceError, Unsupported
from headrace.wire import schema

REMEMBERED_BATCHES: Final = 5
"""Of each producer and partition, by brokers: more in flight could not be told from new ones when sent again."""
SEQUENCES: Final = 1 << 31
LAST_EPOCH: Final = 32_766
PROVEN_FOR_S: Final = 60.0
BACKOFF_MAX_S: Final = 0.5

SIZES: Final = (ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE)


class Outcome(Enum):
    """What the end of an attempt says of a batch: written, not written, or unknown; worth another try or not.

    Only the codes in `_NOT_WRITTEN` are taken as a promise that nothing was written. A leader that steps down while a
    batch waits for its followers answers NOT_LEADER_OR_FOLLOWER, and the batch may be in the next leader's log: that
    code, and every other that a try may change, leaves it open.
    """

    WRITTEN = auto()
    """Acknowledged."""
    DUPLICATE = auto()
    """The log has had this sequence; where is not told."""
    REFUSED = auto()
    """Not written, worth another try."""
    UNSURE = auto()
    """May be written, worth another try."""
    NEVER_SENT = auto()
    """No byte of it left."""
    OUT_OF_ORDER = auto()
    """Not written in this attempt: the log has not had the sequence before it, or has forgotten this producer."""
    FENCED = auto()
    """Not written in this attempt: the log has seen a newer epoch of this producer."""
    FATAL = auto()
    """Not written, and no try will change that."""
    TOO_LARGE = auto()
    """Not written: fewer records at once may be."""
    FATAL_UNKNOWN = auto()
    """May be written, and no try makes sense."""


_NOT_WRITTEN: Final = frozenset(
    {
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.CONCURRENT_TRANSACTIONS,
    }
)
_OF_SEQUENCES: Final = {
    ErrorCode.DUPLICATE_SEQUENCE_NUMBER: Outcome.DUPLICATE,
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER: Outcome.OUT_OF_ORDER,
    ErrorCode.UNKNOWN_PRODUCER_ID: Outcome.OUT_OF_ORDER,
    ErrorCode.INVALID_PRODUCER_EPOCH: Outcome.FENCED,
    ErrorCode.PRODUCER_FENCED: Outcome.FENCED,
}


def outcome_of_code(code: int) -> Outcome:
    """What a broker's answer for one partition says."""
    if code == ErrorCode.NONE:
        return Outcome.WRITTEN
    if code in _OF_SEQUENCES:
        return _OF_SEQUENCES[code]
    if code in _NOT_WRITTEN:
        return Outcome.REFUSED
    if code in SIZES:
        return Outcome.TOO_LARGE
    _, retriable = schema.error_codes().get(code, ("", False))
    if retriable:
        return Outcome.UNSURE
    return (
        Outcome.FATAL
        if code in schema.error_codes() and code != ErrorCode.UNKNOWN_SERVER_ERROR
        else Outcome.FATAL_UNKNOWN
    )


def outcome_of_error(error: HeadraceError, sent: bool) -> Outcome:
    """What it says when no answer came; `sent` tells whether a byte of the request left."""
    if isinstance(error, Unsupported):
        return Outcome.FATAL
    return Outcome.UNSURE if sent else Outcome.NEVER_SENT


class Fate(Enum):
    DELIVERED = auto()
    FAILED = auto()
    """Not written."""
    UNKNOWN = auto()
    """May be written or not."""


@dataclass(slots=True, eq=False)
class SplitOrigin:
    """A batch that goes on in parts, itself maybe a part."""

    unsure: bool
    """An attempt at it may have been written; not once a part was, as they have its sequences."""
    origin: SplitOrigin | None


@dataclass(slots=True, eq=False)
class LaneBatch:
    """One batch as its lane sees it; what is in it is the sender's (`accumulator.ProducerBatch`)."""

    count: int
    deadline: float
    movable: bool = False
    """No key and no partition was asked for: another partition is as good."""
    position: int = -1
    """Order of arrival in its lane: how many records came before it."""
    producer_id: int = -1
    epoch: int = -1
    sequence: int = -1
    attempt: int = 0
    """Counts attempts: an answer to an older one says nothing any more."""
    origin: SplitOrigin | None = None
    """What it is a part of."""
    reported: bool = False
    """Its fate was reported before an attempt at it ended."""
    sent_at: float = 0.0
    reason: HeadraceError | None = None
    """What went wrong last; the sender's."""
    _unsure: bool = False

    @property
    def unsure(self) -> bool:
        """An attempt may have been written, at it or at what it is a part of."""
        return self._unsure or any(origin.unsure for origin in self._origins())

    @unsure.setter
    def unsure(self, unsure: bool) -> None:
        self._unsure = unsure
        if not unsure:
            self.origin = None

    def as_origin(self) -> SplitOrigin:
        """What its parts are parts of."""
        return SplitOrigin(self._unsure, self.origin)

    def rule_out_origins(self) -> None:
        """It was written under its own sequence: what it is a part of was not, and will not be."""
        for origin in self._origins():
            origin.unsure = False

    def _origins(self) -> Iterator[SplitOrigin]:
        origin = self.origin
        while origin is not None:
            yield origin
            origin = origin.origin

    @property
    def stamped(self) -> bool:
        return self.sequence >= 0

    def unstamp(self) -> None:
        self.producer_id = self.epoch = self.sequence = -1


B = TypeVar("B", bound=LaneBatch)
Verdict = tuple[B, Fate]


@dataclass(slots=True, eq=False)
class Lane(Generic[B]):
    topic: str
    partition: int
    acks: int
    idempotent: bool
    max_in_flight: int = REMEMBERED_BATCHES
    transactional: bool = False
    leader: int = -1
    """The broker that the batches in flight went to."""
    wants_producer_id: bool = False
    """A producer id has to come by `adopt` before anything leaves."""
    renewals: int = 0
    producer_id: int = -1
    epoch: int = -1
    waiting: deque[B] = field(default_factory=deque)
    """In order; those that were sent before come first."""
    in_flight: list[B] = field(default_factory=list)
    backoff_until: float = 0.0
    """Nothing leaves before, after an attempt that failed."""
    _next_sequence: int = 0
    _next_position: int = 0
    _proven_at: float | None = None
    _sure_hole: int | None = None
    _open_holes: set[int] = field(default_factory=set)
    _distrusted: bool = False
    """The log has answered what it cannot, if it knew this producer: nothing follows from the order of sequences."""
    _fenced: bool = False
    _backoff: Backoff = field(default_factory=partial(Backoff, most_s=BACKOFF_MAX_S))

    def __post_init__(self) -> None:
        if self.idempotent:
            self.max_in_flight = min(self.max_in_flight, REMEMBERED_BATCHES)
            self.wants_producer_id = True

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.in_flight

    def add(self, batch: B) -> None:
        batch.position = self._next_position
        self._next_position += batch.count
        self.waiting.append(batch)

    def adopt(self, producer_id: int, epoch: int) -> None:
        """A producer id and epoch that no batch of this lane has used yet."""
        assert self.wants_producer_id
        self.producer_id, self.epoch = producer_id, epoch
        self._next_sequence = 0
        self.wants_producer_id = False

    def rebase(self, producer_id: int, epoch: int) -> None:
        """A transaction begins under another identity than the one before: from sequence 0 on. What of earlier ones is
        still on its way says nothing any more.

        A log that knows the producer takes nothing else first from a later epoch: what was proven stays so.
        """
        assert self.transactional
        if producer_id != self.producer_id:
            self._proven_at = None
        self.wants_producer_id = True
        self.in_flight.clear()
        self._sure_hole = None
        self._open_holes.clear()
        self._fenced = self._distrusted = False
        self.end_backoff()
        self.adopt(producer_id, epoch)

    def doubt(self) -> None:
        """The log may be another one now: the next batch travels alone."""
        self._proven_at = None

    def end_backoff(self) -> None:
        """What made the last attempt fail has changed."""
        if self.backoff_until:
            self.backoff_until = 0.0
            self._backoff.reset()

    def stamp_alone(self, leader: int) -> tuple[int, int, int] | None:
        """The stamp under which a batch may go to this leader now, as the only one; None if it is not as simple."""
        if self.waiting or self.in_flight or self.wants_producer_id:
            return None
        if self._sure_hole is not None or self._open_holes:
            return None
        if leader != self.leader or self.backoff_until:
            return None
        return (self.producer_id, self.epoch, self._next_sequence) if self.idempotent else (-1, -1, -1)

    def went_alone(self, count: int, now: float) -> None:
        """A batch of so many records was written under that stamp; nothing else was asked of the lane meanwhile."""
        self._next_position += count
        self._proven_at = now
        if self.idempotent:
            self._next_sequence = (self._next_sequence + count) % SEQUENCES

    def next(self, now: float, leader: int) -> B | None:
        """The batch to send to this leader now; it counts as in flight from here on."""
        if not self.waiting or self.backoff_until > now:
            return None
        if self.in_flight:
            if leader != self.leader or self._holed or len(self.in_flight) >= self._window(now):
                return None
        elif leader != self.leader:
            self.leader = leader
            self.doubt()
        if self._holed and not self._old_epoch_serves(self.waiting[0]):
            if self.transactional:
                return None
            self._renew()
        if self.wants_producer_id:
            return None
        batch = self.waiting.popleft()
        if self.idempotent and not batch.stamped:
            batch.producer_id, batch.epoch, batch.sequence = self.producer_id, self.epoch, self._next_sequence
            self._next_sequence = (self._next_sequence + batch.count) % SEQUENCES
        batch.attempt += 1
        batch.sent_at = now
        self.in_flight.append(batch)
        return batch

    def answered(self, batch: B, attempt: int, outcome: Outcome, now: float) -> list[Verdict[B]]:
        """An attempt has ended. Gives the fates that this settles; what is worth another try waits again."""
        if attempt != batch.attempt or batch not in self.in_flight:
            return []
        self.in_flight.remove(batch)
        if outcome is Outcome.DUPLICATE and not batch.unsure:
            # The log claims to have a sequence under which nothing of ours can be: to believe it would lose the batch.
            outcome = Outcome.OUT_OF_ORDER
        if outcome in (Outcome.WRITTEN, Outcome.DUPLICATE):
            if outcome is Outcome.WRITTEN and batch.stamped:
                batch.rule_out_origins()
            self._written(batch, now)
            return [] if batch.reported else [(batch, Fate.DELIVERED)]
        self._proven_at = None
        if outcome in (Outcome.UNSURE, Outcome.FATAL_UNKNOWN):
            batch.unsure = True
        verdicts: list[Verdict[B]] = []
        if batch.reported or outcome in (Outcome.FATAL, Outcome.TOO_LARGE, Outcome.FATAL_UNKNOWN):
            verdicts = self._give_up(batch)
        elif not self.idempotent or outcome not in (Outcome.OUT_OF_ORDER, Outcome.FENCED):
            self._wait_again(batch, now)
        else:
            verdicts = self._out_of_sequence(batch, outcome, now)
        if self._distrusted and not self.in_flight:
            verdicts += self.withdraw(lambda other: other.stamped and other.unsure)
        return verdicts

    def splits(self, batch: B, attempt: int) -> bool:
        """Whether the batch can go on in parts, now that this attempt was refused for its size."""
        return attempt == batch.attempt and batch in self.in_flight and batch.count > 1 and not batch.reported

    def split(self, batch: B, parts: Sequence[B]) -> None:
        """Parts of a batch in flight that was refused for its size wait in its place."""
        assert sum(part.count for part in parts) == batch.count
        self.in_flight.remove(batch)
        self._proven_at = None
        followed = any(other.stamped and other.position > batch.position for other in (*self.in_flight, *self.waiting))
        keep = batch.stamped and (followed or batch.unsure)
        if batch.stamped and not keep:
            self._next_sequence = batch.sequence
        first, origin = 0, batch.as_origin()
        for part in parts:
            part.position, part.origin = batch.position + first, origin
            if keep:
                part.producer_id, part.epoch = batch.producer_id, batch.epoch
                part.sequence = (batch.sequence + first) % SEQUENCES
            first += part.count
            insort(self.waiting, part, key=lambda waiting: waiting.position)

    def expire(self, now: float) -> list[Verdict[B]]:
        """Fates of batches whose time is up. Those in flight stay there, reported, until their attempt ends."""
        verdicts: list[Verdict[B]] = []
        for batch in self.in_flight:
            if batch.deadline <= now and not batch.reported:
                batch.reported = True
                verdicts.append((batch, Fate.UNKNOWN))
        return verdicts + self.withdraw(lambda batch: batch.deadline <= now)

    def abandon(self, now: float) -> list[Verdict[B]]:
        """The leader that the batches in flight went to is not the leader any more: they are to be sent again.

        Only for idempotent lanes, where a log that has a batch already knows it again.
        """
        assert self.idempotent
        verdicts = []
        for batch in list(self.in_flight):
            verdicts += self.answered(batch, batch.attempt, Outcome.UNSURE, now)
        self.end_backoff()
        return verdicts

    def release(self, batch: B) -> bool:
        """Let go of a batch that waits, so that it can go to another partition; False if the log here may have it."""
        if self.idempotent and (batch.unsure or (self.transactional and batch.stamped)):
            return False
        self.waiting.remove(batch)
        self._give_up(batch)
        batch.unstamp()
        return True

    def withdraw(self, matches: Callable[[B], bool]) -> list[Verdict[B]]:
        """Give up the batches that wait and match."""
        verdicts: list[Verdict[B]] = []
        for batch in [batch for batch in self.waiting if matches(batch)]:
            self.waiting.remove(batch)
            verdicts += self._give_up(batch)
        return verdicts

    @property
    def _holed(self) -> bool:
        return self._sure_hole is not None or bool(self._open_holes)

    def _window(self, now: float) -> int:
        if not self.idempotent:
            return self.max_in_flight
        return self.max_in_flight if self._proven_at is not None and now - self._proven_at < PROVEN_FOR_S else 1

    def _written(self, batch: B, now: float) -> None:
        self._proven_at = now
        self.end_backoff()
        if self._open_holes:
            # Sequences are taken in order, so what was given up before this one is in the log.
            self._open_holes = {position for position in self._open_holes if position > batch.position}

    def _out_of_sequence(self, batch: B, outcome: Outcome, now: float) -> list[Verdict[B]]:
        behind_sure_hole = self._sure_hole is not None and self._sure_hole < batch.position
        behind_open_hole = any(position < batch.position for position in self._open_holes)
        follows = any(other.stamped and other.position < batch.position for other in (*self.in_flight, *self.waiting))
        if outcome is Outcome.FENCED:
            self._fenced = self._distrusted = True
        elif follows or behind_sure_hole:
            self._wait_again(batch, now)
            return []
        elif not behind_open_hole:
            self._distrusted = True
        if batch.unsure or self.transactional:
            return self._give_up(batch)
        self._note_hole(batch.position - 1)
        self._wait_again(batch, now)
        return []

    def _wait_again(self, batch: B, now: float) -> None:
        insort(self.waiting, batch, key=lambda waiting: waiting.position)
        if self.backoff_until <= now:
            # Once for all batches that come back together.
            self.backoff_until = now + self._backoff.take()

    def _give_up(self, batch: B) -> list[Verdict[B]]:
        if batch.stamped and batch.unsure:
            self._open_holes.add(batch.position)
        elif batch.stamped:
            self._note_hole(batch.position)
        if batch.reported:
            return []
        return [(batch, Fate.UNKNOWN if batch.unsure else Fate.FAILED)]

    def _note_hole(self, position: int) -> None:
        self._sure_hole = position if self._sure_hole is None else min(position, self._sure_hole)

    def _old_epoch_serves(self, first: B) -> bool:
        """Whether the first batch that waits goes on under the old epoch, though there is a hole somewhere."""
        if not first.stamped or self._fenced:
            return False
        if self._sure_hole is not None and self._sure_hole < first.position:
            return False
        return first.unsure or not any(position < first.position for position in self._open_holes)

    def _renew(self) -> None:
        """Begin a new epoch. Nothing is in flight, and the log has nothing of what waits."""
        for batch in self.waiting:
            batch.unstamp()
            batch.unsure = False
        self._sure_hole = None
        self._open_holes.clear()
        self._proven_at = None
        self._next_sequence = 0
        self.renewals += 1
        if self._fenced or self.epoch >= LAST_EPOCH:
            self.wants_producer_id = True
        self.epoch += 1
        self._fenced = self._distrusted = False
