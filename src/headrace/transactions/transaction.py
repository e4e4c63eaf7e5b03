"""A transactional id and its transaction as a state table. No I/O: what is kept and an event go in, what is to be kept
from then on comes out, or the code that says why not.

A `Transaction` is a value. The caller makes the new one durable before anyone acts on it, so an event that could not be
stored has not happened. The same value comes back where nothing changes: the reply is then as for the event that made
it, which is how an answer that was lost is given again.

Whom a request is from is told by producer id and epoch (`client`). An epoch that was handed out is never handed out
again: a new producer gets the next one, and each transaction of version 2 has its own (KIP-890). The id and epoch
before are kept (`last_epoch`) as long as only their owner can have come from there, so that it may repeat what it was
not answered (KIP-360, KIP-890); a producer that another one took over from, or whose transaction timed out, is fenced.
Epochs end at LAST_EPOCH, one before the highest, so that who has it can still be fenced; the next id comes then.

A two-phase transaction (KIP-939) has no timeout. A producer that comes back for it gets the next identity
(`next_producer_id`, `next_epoch`) while that under which its records were written stays in `producer_id` and `epoch`,
for the markers. In the states PrepareCommit and PrepareAbort `producer_id` and `epoch` are those of the markers: from
version 2 on an epoch above that of the records.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, NamedTuple

from headrace.errors import ErrorCode
from headrace.transactions.messages import (
    EPOCHS_BUMPED,
    NO_EPOCH,
    NO_PRODUCER_ID,
    AddRequest,
    EndReply,
    EndRequest,
    InitReply,
    InitRequest,
    Owner,
    Place,
)

LAST_EPOCH: Final = 32_766
"""The last that a producer gets."""
FENCED_EPOCH: Final = LAST_EPOCH + 1
"""That nobody has."""
NO_TIMEOUT_MS: Final = (1 << 31) - 1
"""As Kafka keeps it for two-phase transactions."""
NO_NUMBER: Final = -1
NO_TIME_MS: Final = -1


class State(Enum):
    __hash__ = object.__hash__  # that of Enum is a call, and every event asks for several
    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"
    DEAD = "Dead"


class Cause(Enum):
    """Why a transactional id changes its state."""

    __hash__ = object.__hash__
    OPENED = "a producer asked for its id and epoch"
    KEPT = "a producer came back for its two-phase transaction"
    ADDED = "a partition was added"
    COMMITTED = "its producer commits"
    ABORTED = "its producer aborts"
    FENCED = "another producer took over, or the timeout is over"
    MARKED = "every partition has its marker"
    EXPIRED = "nobody used it for long"


_IDLE: Final = {
    Cause.OPENED: State.EMPTY,
    Cause.ADDED: State.ONGOING,
    Cause.ABORTED: State.COMPLETE_ABORT,
    Cause.EXPIRED: State.DEAD,
}
TRANSITIONS: Final = {
    State.EMPTY: _IDLE,
    State.ONGOING: {
        Cause.KEPT: State.ONGOING,
        Cause.ADDED: State.ONGOING,
        Cause.COMMITTED: State.PREPARE_COMMIT,
        Cause.ABORTED: State.PREPARE_ABORT,
        Cause.FENCED: State.PREPARE_ABORT,
    },
    State.PREPARE_COMMIT: {Cause.MARKED: State.COMPLETE_COMMIT},
    State.PREPARE_ABORT: {Cause.MARKED: State.COMPLETE_ABORT},
    State.COMPLETE_COMMIT: _IDLE,
    State.COMPLETE_ABORT: _IDLE,
    State.DEAD: {},
}
COMPLETED: Final = frozenset({State.COMPLETE_COMMIT, State.COMPLETE_ABORT})
IDLE: Final = COMPLETED | {State.EMPTY}
PREPARED: Final = frozenset({State.PREPARE_COMMIT, State.PREPARE_ABORT})
OPEN: Final = PREPARED | {State.ONGOING}
COMMITTING: Final = frozenset({State.PREPARE_COMMIT, State.COMPLETE_COMMIT})


class Identity(NamedTuple):
    producer_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Transaction:
    """What is kept of a transactional id."""

    producer_id: int
    epoch: int
    state: State = State.EMPTY
    timeout_ms: int = 0
    update_ms: int = 0
    start_ms: int = NO_TIME_MS
    """When the transaction began that is open, or was last."""
    partitions: frozenset[Place] = frozenset()
    """That it wrote to, or may have; empty when none is open."""
    number: int = NO_NUMBER
    """Of the transaction that is open, or was last, counted from 0."""
    transaction_version: int = 0
    """That its client follows."""
    previous_producer_id: int = NO_PRODUCER_ID
    last_epoch: int = NO_EPOCH
    """With the id before, what the client had before what it has now; NO_EPOCH when that is fenced."""
    next_producer_id: int = NO_PRODUCER_ID
    next_epoch: int = NO_EPOCH
    """What the client has, where that is not `producer_id` and `epoch`."""
    owner: Owner = field(default_factory=Owner)

    @property
    def client(self) -> Identity:
        """Who may speak for it."""
        if self.next_producer_id != NO_PRODUCER_ID:
            return Identity(self.next_producer_id, self.next_epoch)
        return Identity(self.producer_id, self.epoch)

    @property
    def last(self) -> Identity | None:
        """Who may repeat what it was not answered."""
        return None if self.last_epoch == NO_EPOCH else Identity(self.previous_producer_id, self.last_epoch)

    @property
    def two_phase(self) -> bool:
        return self.timeout_ms == NO_TIMEOUT_MS

    @property
    def is_kept(self) -> bool:
        """Open, with records of an earlier producer than the one that has it now."""
        return self.state is State.ONGOING and self.next_producer_id != NO_PRODUCER_ID


class Lack(Enum):
    """What an event cannot be decided without."""

    PRODUCER_ID = "the epochs of its producer id are used up, or it has none: draw an id and ask again"


Decision = Transaction | Lack | int
"""What is to be kept, what is lacking, or a code of Kafka's."""


def _move(kept: Transaction, cause: Cause, now_ms: int, **changes: Any) -> Transaction:
    return replace(kept, state=TRANSITIONS[kept.state][cause], update_ms=max(now_ms, kept.update_ms), **changes)


def _after(identity: Identity, fresh_id: int | None) -> Identity | None:
    """The next identity of a client; None when that takes a new id, and there is none."""
    if identity.epoch < LAST_EPOCH:
        return Identity(identity.producer_id, identity.epoch + 1)
    return None if fresh_id is None else Identity(fresh_id, 0)


# InitProducerId.


def init(kept: Transaction | None, request: InitRequest, now_ms: int, fresh_id: int | None = None) -> Decision:
    """PREPARE_ABORT comes out where a transaction was open: the producer asks again when that one has ended."""
    timeout_ms = NO_TIMEOUT_MS if request.two_phase else request.timeout_ms
    if request.keep_prepared and not request.two_phase:
        return ErrorCode.INVALID_REQUEST
    if kept is None:
        if fresh_id is None:
            return Lack.PRODUCER_ID
        return Transaction(fresh_id, 0, timeout_ms=timeout_ms, update_ms=now_ms, owner=request.owner)
    asked = None if request.producer_id == NO_PRODUCER_ID else Identity(request.producer_id, request.epoch)
    may_repeat = kept.state is not State.ONGOING and asked is not None and asked == kept.last
    if asked is not None and asked != kept.client and not may_repeat:
        return ErrorCode.PRODUCER_FENCED
    if kept.state in PREPARED:
        return ErrorCode.CONCURRENT_TRANSACTIONS
    if kept.state is State.ONGOING:
        return _init_while_open(kept, request, now_ms, fresh_id)
    if may_repeat and kept.client.epoch <= LAST_EPOCH:
        client, last = kept.client, kept.last
    else:
        after = _after(kept.client, fresh_id)
        if after is None:
            return Lack.PRODUCER_ID
        client, last = after, asked
    return _move(
        kept,
        Cause.OPENED,
        now_ms,
        producer_id=client.producer_id,
        epoch=client.epoch,
        previous_producer_id=kept.producer_id if last is None else last.producer_id,
        last_epoch=NO_EPOCH if last is None else last.epoch,
        timeout_ms=timeout_ms,
        start_ms=NO_TIME_MS,
        owner=request.owner,
    )


def _init_while_open(kept: Transaction, request: InitRequest, now_ms: int, fresh_id: int | None) -> Decision:
    """Who says nothing of two phases does not know that a transaction may be waiting for its decision elsewhere."""
    if kept.two_phase and not request.two_phase:
        return ErrorCode.INVALID_TXN_STATE
    if not request.keep_prepared:
        return _fence(kept, now_ms, is_repeatable=request.producer_id != NO_PRODUCER_ID)
    after = _after(kept.client, fresh_id)
    if after is None:
        return Lack.PRODUCER_ID
    return _move(
        kept,
        Cause.KEPT,
        now_ms,
        next_producer_id=after.producer_id,
        next_epoch=after.epoch,
        last_epoch=NO_EPOCH,
        timeout_ms=NO_TIMEOUT_MS,
        owner=request.owner,
    )


def init_reply(kept: Transaction) -> InitReply:
    """For the producer whose request made it so."""
    if kept.state in PREPARED:
        return InitReply(ErrorCode.CONCURRENT_TRANSACTIONS)
    if kept.state is State.ONGOING:
        return InitReply(ErrorCode.NONE, *kept.client, kept.producer_id, kept.epoch)
    return InitReply(ErrorCode.NONE, *kept.client)


def _fence(kept: Transaction, now_ms: int, *, is_repeatable: bool = False) -> Transaction:
    """Take the transaction from its producer. Nobody gets the identity that it then has, only the one after: but for
    its own producer, which asks again and is known by the one before."""
    changes: dict[str, Any] = {"epoch": kept.epoch + 1, "last_epoch": NO_EPOCH, "transaction_version": EPOCHS_BUMPED}
    if is_repeatable:
        changes.update(previous_producer_id=kept.client.producer_id, last_epoch=kept.client.epoch)
    if kept.is_kept:
        changes["next_epoch"] = min(kept.next_epoch + 1, FENCED_EPOCH)
    return _move(kept, Cause.FENCED, now_ms, **changes)


# Partitions.


def add(kept: Transaction | None, request: AddRequest, now_ms: int) -> Decision:
    code = _access_fault(kept, request)
    if code != ErrorCode.NONE or kept is None:
        return code
    if kept.is_kept:
        return ErrorCode.INVALID_TXN_STATE  # its records would be those of another producer, and end without a marker
    if kept.state is State.ONGOING:
        if request.partitions <= kept.partitions:
            return kept
        return _move(kept, Cause.ADDED, now_ms, partitions=kept.partitions | request.partitions)
    if not request.partitions:
        return kept
    return _move(
        kept,
        Cause.ADDED,
        now_ms,
        partitions=request.partitions,
        start_ms=now_ms,
        number=kept.number + 1,
        transaction_version=request.transaction_version,
    )


def verify(kept: Transaction | None, request: AddRequest) -> dict[Place, int]:
    """For a leader that is about to take records: whether each partition is in the open transaction."""
    code = _access_fault(kept, request)
    if code != ErrorCode.NONE or kept is None:
        return dict.fromkeys(request.partitions, code)
    known = kept.partitions if kept.state is State.ONGOING and not kept.is_kept else frozenset()
    return {
        place: ErrorCode.NONE if place in known else ErrorCode.TRANSACTION_ABORTABLE for place in request.partitions
    }


def is_older(kept: Transaction | None, producer_id: int, epoch: int) -> bool:
    """Whether it is an identity that another has followed, whatever a later coordinator may have handed out."""
    return kept is not None and producer_id == kept.client.producer_id and epoch < kept.client.epoch


def _access_fault(kept: Transaction | None, request: AddRequest) -> int:
    if kept is None or request.producer_id != kept.client.producer_id:
        return ErrorCode.INVALID_PRODUCER_ID_MAPPING
    if request.epoch != kept.client.epoch:
        return ErrorCode.PRODUCER_FENCED
    return ErrorCode.CONCURRENT_TRANSACTIONS if kept.state in PREPARED else ErrorCode.NONE


# The end.


def end(kept: Transaction | None, request: EndRequest, now_ms: int, fresh_id: int | None = None) -> Decision:
    if kept is None:
        return ErrorCode.INVALID_PRODUCER_ID_MAPPING
    asked = Identity(request.producer_id, request.epoch)
    bumps = request.transaction_version >= EPOCHS_BUMPED
    has_ended = kept.state in PREPARED or kept.state in COMPLETED
    repeats = bumps and has_ended and asked == kept.last and kept.client.epoch <= LAST_EPOCH
    if asked != kept.client and not repeats:
        is_known = asked.producer_id == kept.client.producer_id
        return ErrorCode.PRODUCER_FENCED if is_known else ErrorCode.INVALID_PRODUCER_ID_MAPPING
    if kept.state is State.ONGOING:
        return _prepare(kept, request, now_ms, fresh_id)
    if has_ended and (repeats or not bumps):
        return kept if request.committed == (kept.state in COMMITTING) else ErrorCode.INVALID_TXN_STATE
    if kept.state in PREPARED:
        return ErrorCode.CONCURRENT_TRANSACTIONS
    if request.committed or not bumps:
        return ErrorCode.INVALID_TXN_STATE
    return _abort_nothing(kept, asked, now_ms, fresh_id)


def _prepare(kept: Transaction, request: EndRequest, now_ms: int, fresh_id: int | None) -> Decision:
    bumps = request.transaction_version >= EPOCHS_BUMPED
    client = _after(kept.client, fresh_id) if bumps else kept.client
    if client is None:
        return Lack.PRODUCER_ID
    is_above = bumps or kept.is_kept
    marker = Identity(kept.producer_id, kept.epoch + 1 if is_above else kept.epoch)
    changes: dict[str, Any] = {"epoch": marker.epoch, "transaction_version": request.transaction_version}
    if is_above:
        changes["transaction_version"] = EPOCHS_BUMPED
    if bumps:
        changes.update(previous_producer_id=request.producer_id, last_epoch=request.epoch)
    same = client == marker
    changes["next_producer_id"] = NO_PRODUCER_ID if same else client.producer_id
    changes["next_epoch"] = NO_EPOCH if same else client.epoch
    return _move(kept, Cause.COMMITTED if request.committed else Cause.ABORTED, now_ms, **changes)


def _abort_nothing(kept: Transaction, asked: Identity, now_ms: int, fresh_id: int | None) -> Decision:
    """A producer of version 2 need not know whether the coordinator has heard of a partition: what it sent may still be
    on its way, and must not come to anything. So its epoch is used up all the same; nothing is there to be marked."""
    client = _after(kept.client, fresh_id)
    if client is None:
        return Lack.PRODUCER_ID
    return _move(
        kept,
        Cause.ABORTED,
        now_ms,
        producer_id=client.producer_id,
        epoch=client.epoch,
        previous_producer_id=asked.producer_id,
        last_epoch=asked.epoch,
        start_ms=now_ms,
        transaction_version=EPOCHS_BUMPED,
    )


def end_reply(kept: Transaction, request: EndRequest) -> EndReply:
    bumps = request.transaction_version >= EPOCHS_BUMPED
    return EndReply(ErrorCode.NONE, *kept.client) if bumps else EndReply(ErrorCode.NONE)


def time_out(kept: Transaction, now_ms: int) -> Transaction | None:
    """None when no transaction is open that a timeout ends. Whoever calls has seen that the time is over."""
    return _fence(kept, now_ms) if kept.state is State.ONGOING and not kept.two_phase else None


def doubt(kept: Transaction) -> Transaction:
    """What came after it in the log may be lost, and with that who was let in since. An epoch that is handed out twice
    would be taken for the first one by partitions that have a transaction of it open: its records would be acknowledged
    there, and never committed. So nobody has this identity any more, and the next producer gets a new id. What is open
    ends as the log has it."""
    if kept.state in OPEN:
        return replace(kept, next_producer_id=kept.client.producer_id, next_epoch=FENCED_EPOCH, last_epoch=NO_EPOCH)
    return replace(kept, epoch=FENCED_EPOCH, last_epoch=NO_EPOCH)


def complete(kept: Transaction, now_ms: int) -> Transaction:
    """Every partition has the marker below its watermark."""
    return _move(
        kept,
        Cause.MARKED,
        now_ms,
        producer_id=kept.client.producer_id,
        epoch=kept.client.epoch,
        next_producer_id=NO_PRODUCER_ID,
        next_epoch=NO_EPOCH,
        partitions=frozenset(),
    )
