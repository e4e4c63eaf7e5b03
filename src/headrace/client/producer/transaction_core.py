"""The core of a transactional producer: where its transaction stands, and what its coordinator is asked. No waiting.

    NEW ----------> READY -> OPEN -> ENDING -> READY          EndTxn was answered
      InitProducerId          |  \\-> PREPARED -> ENDING       left for anybody to end who knows its id and epoch
                              |\\-> FAILED -> ENDING (abort)   a batch was given up, or a request refused
                              \\-> CLOSING -> ENDING          to be committed when the last of it is written
                                                 \\-> NEW      the epoch has to be raised first (KIP-360)
    any -> FENCED: another producer has the transactional id; or refused for good. There is no way out.

A transaction begins with the first partition, or group, that is added to it. Of version 2 (KIP-890), which brokers that
all know it have agreed on, partitions are added by the produce request itself, and every transaction has an epoch of
its own, which the answer to EndTxn brings: what an old connection still carries cannot land in a later one. Of version
1 each partition is added by AddPartitionsToTxn before its first batch leaves, the epoch stays, and after a failure it
is raised by InitProducerId, with the id and epoch that this producer has, so that it takes over from nobody.

The next one may begin while one is CLOSING, or ENDING after that: it *follows*. It takes records, which stay until the
one before is committed. If that one is not, the one that follows comes to nothing with it, whatever the reason: what is
sent in order is never committed but for a part in the middle.

Requests that nobody answered, or that the coordinator is not ready for, are asked again until time is up; all of them
may be done twice. Whatever goes wrong with a batch fails the transaction: nothing of it leaves any more, and what it
held fails too, before the next one begins.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Final

from headrace.client.connection.broker_connection import LATEST_VERSION, Body
from headrace.client.connection.connections import COORDINATOR_MOVED, TRANSACTION_KEY_TYPE, CoordinatorKey
from headrace.client.connection.reactor import Backoff
from headrace.client.errors import (
    BrokerUnreachable,
    NoBroker,
    NotDelivered,
    NoTransaction,
    Refusal,
    TransactionError,
    TransactionFailed,
    TransactionFenced,
    TransactionInDoubt,
    TransactionRefused,
    TransactionTimedOut,
)
from headrace.client.producer.transaction_requests import (
    GroupMember,
    Offsets,
    PreparedTransaction,
    ProducerIdentity,
    add_offsets_request,
    add_partitions_request,
    added_code,
    begin_request,
    committed_code,
    end_request,
    error_code,
    offsets_commit_request,
)
from headrace.errors import ErrorCode, HeadraceError
from headrace.wire import api as apis
from headrace.wire.message import Message

if TYPE_CHECKING:
    from headrace.client.producer.accumulator import PartitionBuffer, ProducerBatch
    from headrace.client.producer.lane import Lane
    from headrace.client.producer.sender import Sender

log = logging.getLogger(__name__)

NO_LAST: Final = sys.maxsize
FEATURE: Final = "transaction.version"
EPOCHS_BUMPED: Final = 2
ASK_TIMEOUT_S: Final = 30.0
MOST_PAUSE_S: Final = 0.5
# The last versions of requests in which a client says that it does not know version 2 of transactions.
FIRST_PRODUCE: Final = 11
FIRST_END: Final = 4
FIRST_OFFSETS: Final = 4

PASSING: Final = COORDINATOR_MOVED | frozenset(
    {
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.KAFKA_STORAGE_ERROR,
    }
)
FENCED: Final = frozenset({ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH})
_FATAL: Final = frozenset(
    {
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.INVALID_TRANSACTION_TIMEOUT,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.INVALID_REQUEST,
    }
)
_ABORTED: Final = frozenset({"PrepareAbort", "CompleteAbort"})


class Phase(Enum):
    NEW = auto()
    """A producer id and epoch have to be had before a transaction can begin."""
    READY = auto()
    OPEN = auto()
    FAILED = auto()
    """It can only be aborted."""
    CLOSING = auto()
    """It takes no record any more, and is committed when the last of it is written."""
    PREPARED = auto()
    """All of it is written, and whoever knows its id and epoch may end it."""
    ENDING = auto()
    IN_DOUBT = auto()
    """It was to be committed, and nobody has answered: it can only be committed again."""
    FENCED = auto()
    """Nothing can be done any more."""


class Step:
    """Something that is under way; done with or without an error."""

    __slots__ = ("done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: HeadraceError | None = None


@dataclass(frozen=True, slots=True)
class _Question:
    """What a coordinator is asked until it says something, or time is up."""

    of: CoordinatorKey | str
    api_key: int
    body: Body
    code: Callable[[Message], int]
    deadline: float
    max_version: int = LATEST_VERSION


class TransactionCore:
    """All is called with the reactor's lock held. Stands in for the sender's producer ids, too."""

    failure: HeadraceError | None = None
    """Why there is no producer id: never asked, as no record is taken before there is one."""

    def __init__(self, sender: Sender, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.phase = Phase.NEW
        self.error: TransactionError | None = None
        """Why it cannot be committed, or, for good, why there can be none."""
        self.identity = ProducerIdentity()
        self.two_phase = False
        self.began_at = 0.0
        self._sender = sender
        self._reactor = sender.reactor
        self.lock = sender.reactor.lock
        self._options = sender.options
        self._key = CoordinatorKey(TRANSACTION_KEY_TYPE, transactional_id)
        self._channel = f"transactions {transactional_id} {id(self):x}"
        self._version = 1
        self._in_use = False
        """The coordinator may know of this transaction: it has to be told of its end."""
        self._dirty = False
        """A sequence may be used up that the log does not have: the epoch has to be raised."""
        self._added: set[tuple[str, int]] = set()
        self._adding: set[tuple[str, int]] = set()
        self._waiting: dict[tuple[str, int], PartitionBuffer] = {}
        """Partitions with batches that wait until they are added."""
        self._groups: set[str] = set()
        self.last_number = NO_LAST
        """Batches with higher numbers are of the transaction that follows, and stay."""
        self._commit: Step | None = None
        """Of a transaction that is committed while nobody waits."""
        self._follows = False
        """The next one has begun, and takes records."""
        self._follower_error: HeadraceError | None = None
        """Records of the one that follows were given up."""
        self._closed = False

    # What is open

    @property
    def is_open(self) -> bool:
        """It can be aborted."""
        return self.phase in (Phase.OPEN, Phase.FAILED)

    @property
    def gate(self) -> HeadraceError | None:
        """What a record hears that is sent now."""
        if self.phase is Phase.OPEN or self._follows:
            return None
        if self.phase is Phase.FAILED or self.phase is Phase.FENCED:
            return self.error
        if self.phase is Phase.IN_DOUBT:
            return NoTransaction("whether the transaction is committed is not known: call its commit() again first")
        if self.phase is Phase.PREPARED:
            return NoTransaction("the transaction is prepared and takes no record any more: commit or abort it")
        return NoTransaction(
            f"a producer with a transactional id ({self.transactional_id!r}) sends in transactions only: "
            "`with producer.transaction() as t:`, and send inside"
        )

    @property
    def is_closing(self) -> bool:
        """Some batches are of the transaction that is to be committed, and others may be of the next."""
        return self.phase is Phase.CLOSING

    @property
    def dropped_for(self) -> HeadraceError | None:
        """Why nothing that waits may leave any more, if so."""
        return None if self.phase is Phase.CLOSING else self.gate

    def begin(self, *, two_phase: bool) -> Step:
        """Open a transaction, with a producer id if there is none yet. One that is to follow takes records at once."""
        step = Step()
        under_way = self._commit is not None and self.phase in (Phase.CLOSING, Phase.ENDING)
        if under_way and not self._follows and not two_phase and not self.two_phase:
            self._follows, self._follower_error = True, None
            self._set_gate()
            self._finish(step)
            return step
        if self._commit is not None and self.phase is Phase.FAILED:
            assert self.error is not None
            raise self.error.with_traceback(None)
        if self.phase is Phase.FENCED:
            assert self.error is not None
            raise self.error.with_traceback(None)
        if self.phase is Phase.IN_DOUBT:
            raise self.gate or AssertionError
        if self.phase in (Phase.OPEN, Phase.FAILED, Phase.CLOSING, Phase.ENDING):
            raise NoTransaction(
                "a transaction of this producer is open already: it has one at a time; end it first, or make another "
                "Producer with a transactional id of its own"
            )
        if self.phase is Phase.READY and self.two_phase == two_phase:
            self._open(step)
            return step
        if self.phase is Phase.PREPARED:
            self._look_at_prepared(step, two_phase)
        else:
            self._ask_identity(step, two_phase)
        return step

    def _look_at_prepared(self, step: Step, two_phase: bool) -> None:
        """Begin if the transaction before is ended by now. Just looked at: to ask for it would take it away from
        whoever is to end it."""

        def looked(answer: Message | HeadraceError) -> None:
            if isinstance(answer, HeadraceError):
                self._finish(step, answer)
                return
            (found,) = answer.transaction_states
            if (found.producer_id, found.producer_epoch) == self.identity and found.transaction_state == "Ongoing":
                words = f"the transaction that {self.transactional_id!r} has prepared is not ended yet: commit or "
                self._finish(step, NoTransaction(words + "abort it, then begin the next"))
                return
            self._ask_identity(step, two_phase)

        self._describe(looked)

    def _describe(self, on_done: Callable[[Message | HeadraceError], None]) -> None:
        """What the coordinator has of the transactional id."""
        request = Message(transactional_ids=[self.transactional_id])

        def code(answer: Message) -> int:
            return next((int(each.error_code) for each in answer.transaction_states), ErrorCode.NONE)

        self._ask(_Question(self._key, apis.DESCRIBE_TRANSACTIONS, request, code, self._deadline()), on_done)

    def _ask_identity(self, step: Step, two_phase: bool) -> None:
        request = begin_request(
            self.transactional_id, self.identity, int(self._options.transaction_timeout_ms), two_phase=two_phase
        )
        self._ask(
            _Question(self._key, apis.INIT_PRODUCER_ID, request, error_code, self._deadline()),
            partial(self._on_identity, step, two_phase),
        )

    def _on_identity(self, step: Step, two_phase: bool, answer: Message | HeadraceError) -> None:
        if isinstance(answer, HeadraceError):
            if answer.kafka_code in FENCED:
                self._end_for_good(self._fenced(answer))
            elif answer.kafka_code in _FATAL:
                words = f"no transaction can be had as {self.transactional_id!r}: {answer}"
                self._end_for_good(TransactionRefused(words, answer))
            self._finish(step, self.error if self.phase is Phase.FENCED else answer)
            return
        self.identity = ProducerIdentity(answer.producer_id, answer.producer_epoch)
        self.two_phase = two_phase
        self._open(step)

    def _open(self, step: Step) -> None:
        self._version = EPOCHS_BUMPED if self._sender.pool.feature(FEATURE) >= EPOCHS_BUMPED else 1
        self.phase, self.error = Phase.OPEN, None
        self.began_at = self._reactor.now()
        self._in_use = self._dirty = False
        self.last_number = NO_LAST
        self._added.clear()
        self._groups.clear()
        self._set_gate()
        self._finish(step)

    # For the sender

    def give(self, lane: Lane[ProducerBatch]) -> bool:
        """Let the lane write under the identity of this transaction."""
        if self.phase is not Phase.OPEN and self.phase is not Phase.CLOSING:
            return False
        if (lane.producer_id, lane.epoch) != self.identity:
            lane.rebase(*self.identity)
        return True

    def ask(self) -> None:
        """An identity comes with the next transaction, and not before."""

    @property
    def produce_version(self) -> int:
        """The last version of Produce that may be spoken."""
        return LATEST_VERSION if self._version >= EPOCHS_BUMPED else FIRST_PRODUCE

    def admits(self, buffer: PartitionBuffer) -> bool:
        """Whether batches of this partition may leave; if not yet, the sender looks at it again when they may."""
        if self.phase is not Phase.OPEN and self.phase is not Phase.CLOSING:
            return False
        place = buffer.topic, buffer.partition
        if self._version >= EPOCHS_BUMPED or place in self._added:
            self._in_use = True
            return self.give(buffer.lane)
        self._waiting[place] = buffer
        if not self._adding:
            self._reactor.call_soon(self._add_partitions)
        return False

    def _add_partitions(self) -> None:
        places = self._waiting.keys() - self._added
        if self._adding or not places or self.phase not in (Phase.OPEN, Phase.CLOSING):
            return
        self._adding, self._in_use = set(places), True
        request = add_partitions_request(self.transactional_id, self.identity, places)
        question = _Question(
            self._key, apis.ADD_PARTITIONS_TO_TXN, request, added_code, self._deadline(), LATEST_VERSION
        )
        self._ask(question, partial(self._on_added, self.identity))

    def _on_added(self, identity: ProducerIdentity, answer: Message | HeadraceError) -> None:
        adding, self._adding = self._adding, set()
        if self.phase not in (Phase.OPEN, Phase.CLOSING) or identity != self.identity:
            self._waiting.clear()
            return
        if isinstance(answer, HeadraceError):
            self.fail(answer, "partitions could not be added to it")
            return
        self._added |= adding
        for place in adding:
            self._sender.make_ready(self._waiting.pop(place))
        if self._waiting:
            self._add_partitions()

    def batch_failed(self, number: int, error: HeadraceError) -> None:
        """Records were given up, in the batch of that number."""
        if number > self.last_number:
            self._follower_error = self._follower_error or error
            return
        self._dirty = True
        self.fail(error, "records of it were not written")

    def batch_settled(self) -> None:
        """One may have been the last of a transaction that is to be committed. Whether it has failed is told later in
        this turn."""
        if self.phase is Phase.CLOSING and self._sender.flushed(self.last_number):
            self._reactor.call_soon(self._end_closed)

    def fail(self, reason: HeadraceError, what: str) -> None:
        """It cannot be committed any more, and nothing of it leaves."""
        if self.phase is not Phase.OPEN and self.phase is not Phase.CLOSING:
            return
        hint = "abort it, as the end of its block does, and begin again"
        if reason.kafka_code in FENCED:
            hint += "; if another producer has the transactional id now, that is told then"
        self.phase = Phase.FAILED
        self.error = TransactionFailed(f"the transaction cannot be committed: {what}: {reason}; {hint}", reason)
        self._drop_follower(self.error)
        self._set_gate()
        if self._commit is not None:
            self._finish(self._commit, self.error)
        self._sender.driver.changed()

    # Its end

    def prepare(self) -> PreparedTransaction:
        """Everything is written: from now on it can be ended by whoever has what this gives."""
        self._check_open("prepare")
        if not self.two_phase:
            raise NoTransaction("only a transaction that was begun with two_phase=True can be prepared")
        self.phase = Phase.PREPARED
        self._set_gate()
        return PreparedTransaction(self.transactional_id, *self.identity)

    def begin_abort(self) -> None:
        """Let nothing more of it leave. What is on its way is waited for; then comes `end`."""
        if self.phase is Phase.PREPARED:
            return
        self._check_not_over()
        if self.phase is Phase.OPEN:
            self.phase = Phase.FAILED
            self.error = TransactionFailed("the transaction is being aborted: begin another one")
        self._set_gate()
        if self._drop_unsent(NotDelivered("their transaction was aborted")):
            self._dirty = True

    def commit_when_written(self) -> Step:
        """Commit it as soon as all of it is written. The next one may begin meanwhile."""
        self._check_open("commit")
        self.last_number = self._sender.close_batches()
        self.phase = Phase.CLOSING
        self._set_gate()
        self._commit = step = Step()
        self.batch_settled()
        return step

    def _end_closed(self) -> None:
        if self.phase is Phase.CLOSING and self._sender.flushed(self.last_number):
            assert self._commit is not None
            self._end(self._commit, commit=True)

    def _drop_follower(self, error: HeadraceError) -> None:
        """The transaction before it was not committed."""
        self._follows = False
        self._drop_unsent(error)
        self.last_number, self._follower_error = NO_LAST, None

    def _open_follower(self) -> None:
        """The transaction before it is committed: what it has taken may leave."""
        assert self.phase is Phase.READY
        self._follows = False
        reason, self._follower_error = self._follower_error, None
        self._open(Step())
        if reason is None:
            self._sender.make_all_ready()
        else:
            self.fail(reason, "records of it were not written")

    def end(self, *, commit: bool) -> Step:
        """Commit or abort it; everything of it is written, or has failed."""
        step = Step()
        if self.phase is Phase.FENCED or (commit and self.phase is Phase.FAILED):
            assert self.error is not None
            raise self.error.with_traceback(None)
        if self.phase is Phase.IN_DOUBT and not commit:
            raise self.gate or AssertionError
        if self.phase not in (Phase.OPEN, Phase.FAILED, Phase.PREPARED, Phase.IN_DOUBT):
            raise NoTransaction("there is no open transaction to end: begin one with `producer.transaction()`")
        self._commit = None
        self._end(step, commit=commit)
        return step

    def _end(self, step: Step, *, commit: bool) -> None:
        before, self.phase = self.phase, Phase.ENDING
        self._set_gate()
        if not self._in_use and before is not Phase.PREPARED:
            self._ended(step, self.identity)
            return
        request = end_request(self.transactional_id, self.identity, commit=commit)
        latest = LATEST_VERSION if self._version >= EPOCHS_BUMPED else FIRST_END
        self._ask(
            _Question(self._key, apis.END_TXN, request, error_code, self._deadline(), latest),
            partial(self._on_ended, step, commit, before),
        )

    def _on_ended(self, step: Step, commit: bool, before: Phase, answer: Message | HeadraceError) -> None:
        if not isinstance(answer, HeadraceError):
            bumped = answer.producer_id is not None and answer.producer_id >= 0
            self._ended(
                step, ProducerIdentity(answer.producer_id, answer.producer_epoch) if bumped else self.identity, bumped
            )
        elif answer.kafka_code in FENCED:
            self._on_fenced(step, answer)
        elif _passes(answer) and not self._closed:
            self.phase = Phase.IN_DOUBT if commit else before
            words = f"whether the transaction is committed is not known: {answer}; call commit() again"
            if self._follows:
                self._drop_follower(NotDelivered(f"the transaction before theirs is in doubt: {answer}", answer))
            self._set_gate()
            self._finish(step, TransactionInDoubt(words, answer) if commit else answer)
        elif commit and answer.kafka_code not in _FATAL:
            self.phase = Phase.OPEN
            self.fail(answer, "its coordinator refuses")
            self._finish(step, self.error)
        elif answer.kafka_code in (ErrorCode.INVALID_PRODUCER_ID_MAPPING, ErrorCode.UNKNOWN_PRODUCER_ID):
            # The coordinator has forgotten it, and with it the transaction.
            self._dirty = True
            self.identity = ProducerIdentity()
            self._ended(step, self.identity)
        else:
            words = f"the transaction could not be ended: {answer}; make a new Producer of this transactional id"
            self._end_for_good(TransactionRefused(words, answer))
            self._finish(step, self.error)

    def _ended(
        self, step: Step, identity: ProducerIdentity, bumped: bool = False, error: TransactionError | None = None
    ) -> None:
        self.identity = identity
        self.phase = Phase.NEW if (self._dirty and not bumped) or not identity.is_known else Phase.READY
        self.error = self._commit = None
        if self._follows and error is not None:
            self._drop_follower(error)
        elif self._follows:
            self._open_follower()
        self._set_gate()
        self._finish(step, error)

    def _on_fenced(self, step: Step, refusal: HeadraceError) -> None:
        """By another producer, or by the coordinator itself when the transaction was open for too long. Then it was
        aborted under the next epoch, which nobody has: this producer goes on as who has that one, and so takes over
        from nobody who came in between."""
        open_ms = (self._reactor.now() - self.began_at) * 1000
        timeout_ms = self._options.transaction_timeout_ms
        if self.two_phase or open_ms < timeout_ms:
            self._end_for_good(self._fenced(refusal))
            self._finish(step, self.error)
            return

        def looked(answer: Message | HeadraceError) -> None:
            found = None if isinstance(answer, HeadraceError) else answer.transaction_states[0]
            aborted = ProducerIdentity(self.identity.producer_id, self.identity.epoch + 1)
            timed_out = found is not None and found.transaction_state in _ABORTED
            if found is None or not timed_out or ProducerIdentity(found.producer_id, found.producer_epoch) != aborted:
                self._end_for_good(self._fenced(refusal))
                self._finish(step, self.error)
                return
            request = begin_request(self.transactional_id, aborted, int(timeout_ms), two_phase=False)
            self._ask(_Question(self._key, apis.INIT_PRODUCER_ID, request, error_code, self._deadline()), heard)

        def heard(answer: Message | HeadraceError) -> None:
            if isinstance(answer, HeadraceError):
                self._end_for_good(self._fenced(refusal))
                self._finish(step, self.error)
                return
            timed_out = TransactionTimedOut(
                f"the transaction was open for {open_ms / 1000:.1f} s, and the broker has aborted it after "
                f"{timeout_ms / 1000:g} s (transaction_timeout_ms): do less in one, or raise it; begin again",
                refusal,
            )
            self._ended(step, ProducerIdentity(answer.producer_id, answer.producer_epoch), True, timed_out)

        self._describe(looked)

    def _fenced(self, reason: HeadraceError) -> TransactionFenced:
        timeout_s = self._options.transaction_timeout_ms / 1000
        late = ""
        if not self.two_phase and self._reactor.now() - self.began_at >= timeout_s:
            late = f", or the transaction was open for longer than {timeout_s:g} s (transaction_timeout_ms)"
        return TransactionFenced(
            f"another producer has taken over the transactional id {self.transactional_id!r}{late}: nothing of what "
            "this one did since its last commit counts, and it can write no more; if it is this one that is to go on, "
            "make a new Producer, and see that each instance has a transactional id of its own",
            reason,
        )

    # Offsets of a group

    def send_offsets(self, offsets: Offsets, member: GroupMember) -> Step:
        """The group goes on from these offsets, if the transaction is committed."""
        self._check_open("send_offsets")
        step = Step()
        if not offsets:
            self._finish(step)
            return step
        self._in_use = True
        commit = partial(self._commit_offsets, step, dict(offsets), member)
        if self._version >= EPOCHS_BUMPED or member.group in self._groups:
            commit()
            return step
        request = add_offsets_request(self.transactional_id, self.identity, member.group)

        def added(answer: Message | HeadraceError) -> None:
            if isinstance(answer, HeadraceError):
                self._on_offsets_refused(step, member, answer)
                return
            self._groups.add(member.group)
            commit()

        self._ask(_Question(self._key, apis.ADD_OFFSETS_TO_TXN, request, error_code, self._deadline()), added)
        return step

    def _commit_offsets(self, step: Step, offsets: Mapping[tuple[str, int], int], member: GroupMember) -> None:
        request = offsets_commit_request(self.transactional_id, self.identity, offsets, member)
        latest = LATEST_VERSION if self._version >= EPOCHS_BUMPED else FIRST_OFFSETS

        def answered(answer: Message | HeadraceError) -> None:
            if isinstance(answer, HeadraceError):
                self._on_offsets_refused(step, member, answer)
            else:
                self._finish(step)

        self._ask(
            _Question(member.group, apis.TXN_OFFSET_COMMIT, request, committed_code, self._deadline(), latest),
            answered,
        )

    def _on_offsets_refused(self, step: Step, member: GroupMember, error: HeadraceError) -> None:
        gone = (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION, ErrorCode.FENCED_INSTANCE_ID)
        what = f"offsets of group {member.group!r} were not taken"
        if error.kafka_code in gone:
            what += ", as the group has gone on without this member, and its partitions may be another's"
        self.fail(error, what)
        self._finish(step, self.error or error)

    # The end of the producer

    def close(self) -> None:
        """Nothing is asked any more, and who waits hears so."""
        self._closed = True
        self._sender.pool.close_channel(self._channel)

    # Asking

    def _ask(self, question: _Question, on_done: Callable[[Message | HeadraceError], None]) -> None:
        backoff = Backoff(most_s=MOST_PAUSE_S)
        reactor = self._reactor

        def answered(answer: Message | HeadraceError) -> None:
            if isinstance(answer, Message) and (code := question.code(answer)) != ErrorCode.NONE:
                answer = Refusal(code, str(self._key))
            again = isinstance(answer, HeadraceError) and _passes(answer)
            if again and not self._closed and reactor.now() + backoff.next_s < question.deadline:
                log.debug("%s: %s; asking again in %g s", self._key, answer, backoff.next_s)
                reactor.call_at(reactor.now() + backoff.take(), attempt)
            else:
                on_done(answer)

        def attempt() -> None:
            timeout_s = min(ASK_TIMEOUT_S, max(0.0, question.deadline - reactor.now()))
            self._sender.pool.ask_coordinator(
                question.of,
                question.api_key,
                question.body,
                answered,
                timeout_s=timeout_s,
                channel=self._channel,
                max_version=question.max_version,
            )

        attempt()

    def _deadline(self) -> float:
        return self._reactor.now() + self._options.delivery_timeout_ms / 1000

    def _finish(self, step: Step, error: HeadraceError | None = None) -> None:
        step.done, step.error = True, error
        self._sender.driver.changed()

    def _end_for_good(self, error: TransactionError) -> None:
        self.phase, self.error, self._follows = Phase.FENCED, error, False
        self._set_gate()
        self._drop_unsent(error)

    def _drop_unsent(self, error: HeadraceError) -> bool:
        self._waiting.clear()
        return self._sender.drop_unsent(error)

    def _set_gate(self) -> None:
        self._sender.set_gate(self.gate)

    def _check_open(self, what: str) -> None:
        if self.phase in (Phase.FAILED, Phase.FENCED):
            assert self.error is not None
            raise self.error.with_traceback(None)
        if self.phase is not Phase.OPEN:
            raise NoTransaction(f"{what} needs an open transaction: `with producer.transaction() as t:`")

    def _check_not_over(self) -> None:
        if self.phase not in (Phase.OPEN, Phase.FAILED):
            raise self.gate or NoTransaction("there is no open transaction to end")


def _passes(error: HeadraceError) -> bool:
    """Whether the same question may get a better answer a moment later."""
    return isinstance(error, BrokerUnreachable | NoBroker) or error.kafka_code in PASSING
