"""The coordinator of the transactional ids whose partition of `__transaction_state` this broker leads.

`transaction.py` decides; here the decision is appended, and takes effect when the log has it below the watermark: then
memory changes, the reply leaves, and markers are sent where a transaction has been decided. One change of an id is
under way at a time. So a coordinator that takes over by replaying the partition arrives at the same states, and sends
the markers of every transaction that is decided and not known to have ended in all of its partitions. An append that
fails, or times out, has not happened: what it said may still come into the log, and whatever follows it there says
again how things are.

A request that comes while the id is busy, or its transaction is being ended, waits for that a little while before it is
told CONCURRENT_TRANSACTIONS: it spares the client its pause. Partitions that come meanwhile are added by one append.

One deadline heap serves all timeouts, pauses and waits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Final

from headrace import metrics
from headrace.cluster.names import TRANSACTIONS_TOPIC
from headrace.coordinators.alarms import NEVER, Alarms
from headrace.coordinators.record_fields import Record
from headrace.coordinators.shard_load import ShardLoad
from headrace.coordinators.state_log import APPEND_FAULTS, Append, AppendDone, partition_of
from headrace.coordinators.state_partitions import StateTopic
from headrace.coordinators.wall import Wall
from headrace.errors import ErrorCode
from headrace.ports.clock import Clock
from headrace.transactions import descriptions
from headrace.transactions import transaction as table
from headrace.transactions.descriptions import ListFilter
from headrace.transactions.limits import TransactionLimits
from headrace.transactions.messages import (
    AddRequest,
    DescribedTransaction,
    DrawProducerId,
    EndReply,
    EndRequest,
    InitReply,
    InitRequest,
    ListedTransaction,
    MarkerRequest,
    Place,
    SendMarkers,
)
from headrace.transactions.records import encode, encode_key
from headrace.transactions.shard import AddDone, Entry, Shard
from headrace.transactions.transaction import OPEN, PREPARED, Decision, Lack, State, Transaction

log = logging.getLogger(__name__)

HELD_SECONDS: Final = 0.2
"""How long a request waits for another that is under way, before it hears CONCURRENT_TRANSACTIONS."""
HELD_MAX: Final = 1000
"""Requests that wait for one transactional id."""
PAUSE_SECONDS: Final = 0.5
"""Before what could not be appended of our own accord is tried again."""
IDS_PER_TURN: Final = 2000
"""Transactional ids that one turn of the loop looks through for what has expired."""
OPENED_PER_TURN: Final = 500
"""Transactions with which one turn of the loop goes on after a load."""
ID_BYTES_MAX: Final = 4096
PARTITIONS_MAX: Final = 50_000
"""Of one transaction: they have to fit into one record."""

TRANSACTIONS: Final = StateTopic(
    TRANSACTIONS_TOPIC,
    "transactions.loss.accepted",
    "transactional ids",
    "the states of its transactions",
    "transactions may then end otherwise than they were decided, and transactional ids may be handed out anew",
)

DOUBTFUL: Final = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.TRANSACTION_ABORTABLE,
    }
)
"""A producer gives up for these, and a later coordinator may know better."""
FAULTS: Final = {**APPEND_FAULTS, ErrorCode.MESSAGE_TOO_LARGE: ErrorCode.POLICY_VIOLATION}


class TransactionCoordinator:
    def __init__(
        self,
        clock: Clock,
        append: Append,
        partition_count: int,
        draw_producer_id: DrawProducerId,
        send_markers: SendMarkers,
        limits: TransactionLimits,
    ) -> None:
        self._clock = clock
        self._append_records = append
        self.partition_count = partition_count
        """Of the topic; whoever sees the cluster keeps it up to date, and the limits too."""
        self.limits = limits
        self._draw_producer_id = draw_producer_id
        self._send_markers = send_markers
        self._wall = Wall(clock)
        self._alarms = Alarms(clock)
        self._shards: dict[int, Shard] = {}
        self._beginning = 0
        """Transactions whose first record is on its way."""
        self._ongoing = 0
        """Open ones that are not decided, in the partitions that are loaded."""
        self._closed = False
        self._schedule_expiry()

    # Leadership of partitions

    def lead(self, partition: int, epoch: int) -> ShardLoad[Shard]:
        """This broker leads the partition in this epoch: its transactional ids answer COORDINATOR_LOAD_IN_PROGRESS
        until they are loaded."""
        self.resign(partition)
        shard = self._shards[partition] = Shard(partition, epoch)
        return ShardLoad(shard, self._open)

    def resign(self, partition: int) -> None:
        """This broker does not lead the partition any more; everyone who waits looks for the new coordinator."""
        shard = self._shards.pop(partition, None)
        if shard is None:
            return
        shard.gone = True
        self._ongoing -= shard.states[State.ONGOING]
        for entry in list(shard.live.values()):
            self._alarms.keep(entry, NEVER, _nothing)
            self._dismiss(entry, NEVER, ErrorCode.NOT_COORDINATOR)

    def drop_topics(self, ids: Collection[bytes]) -> None:
        """A transaction is not changed by the deletion of a topic: it ends in the others."""

    def close(self) -> None:
        self._closed = True
        self._schedule_expiry()
        for partition in list(self._shards):
            self.resign(partition)

    def _open(self, shard: Shard) -> None:
        names = shard.open()
        self._ongoing += shard.states[State.ONGOING]
        self._go_on_some(shard, names)

    def _go_on_some(self, shard: Shard, names: list[str]) -> None:
        """A slice of what is open in this turn, the rest in later ones: the loop is not held up."""
        for name in names[-OPENED_PER_TURN:]:
            entry = None if shard.gone else shard.entry(name)
            if entry is not None and entry.kept is not None and entry.deadline == NEVER:
                passed_ms = max(0, self._wall.earliest_ms() - entry.kept.start_ms)
                self._set_deadline(entry, entry.kept, max(0, entry.kept.timeout_ms - passed_ms))
                self._go_on(entry)
        del names[-OPENED_PER_TURN:]
        if names and not shard.gone:
            self._clock.call_soon(partial(self._go_on_some, shard, names))

    # Requests

    def init(self, transactional_id: str, request: InitRequest, reply: Callable[[InitReply], None]) -> None:
        def refuse(code: int) -> None:
            reply(InitReply(code))

        fault = self._init_fault(transactional_id, request)
        if fault != ErrorCode.NONE:
            refuse(fault)
            return
        found = self._find(transactional_id)
        if isinstance(found, int):
            refuse(found)
            return
        entry = found.entry(transactional_id)
        if entry is None:
            if sum(len(shard) for shard in self._shards.values()) >= self.limits.ids_max:
                refuse(ErrorCode.POLICY_VIOLATION)
                return
            entry = found.create(transactional_id)
        self._init(entry, request, reply, self._held_until())

    def _init_fault(self, transactional_id: str, request: InitRequest) -> int:
        limits = self.limits
        if not 0 < len(transactional_id.encode()) <= ID_BYTES_MAX:
            return ErrorCode.INVALID_REQUEST
        if request.two_phase:
            return ErrorCode.NONE if limits.two_phase else ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        is_allowed = 0 < request.timeout_ms <= limits.timeout_max_ms
        return ErrorCode.NONE if is_allowed else ErrorCode.INVALID_TRANSACTION_TIMEOUT

    def _init(self, entry: Entry, request: InitRequest, reply: Callable[[InitReply], None], until: float) -> None:
        def decide(now_ms: int, fresh_id: int | None) -> Decision:
            return table.init(entry.kept, request, now_ms, fresh_id)

        def again() -> None:
            self._init(entry, request, reply, until)

        def refuse(code: int) -> None:
            reply(InitReply(code))

        def answer(outcome: Transaction | int) -> None:
            if isinstance(outcome, int):
                self._refuse(entry, request, outcome, refuse)
            elif outcome.state in PREPARED:
                # The open transaction is being aborted; what was asked for can be had when it has ended.
                self._hold(entry, until, again, refuse)
            else:
                reply(table.init_reply(outcome))

        self._change(entry, decide, answer, until, again)

    def add(
        self, transactional_id: str, request: AddRequest, reply: AddDone, held_seconds: float = HELD_SECONDS
    ) -> None:
        """Add the partitions to the producer's transaction; `reply` hears the code for all of them."""
        entry = self._entry(transactional_id)
        if isinstance(entry, int):
            reply(entry)
        elif len(request.partitions) > PARTITIONS_MAX:
            reply(ErrorCode.POLICY_VIOLATION)
            self._rest(entry)
        elif len(entry.adding) >= HELD_MAX:
            reply(ErrorCode.CONCURRENT_TRANSACTIONS)
        else:
            entry.adding.append((self._clock.now() + held_seconds, request, reply))
            self._go_on(entry)

    def verify(self, transactional_id: str, request: AddRequest, reply: Callable[[dict[Place, int]], None]) -> None:
        """Whether each of the partitions is in the producer's open transaction."""

        def refuse(code: int) -> None:
            reply(dict.fromkeys(request.partitions, code))

        shard = self._id_fault(transactional_id) or self._find(transactional_id)
        if isinstance(shard, int):
            refuse(shard)
            return
        codes = table.verify(shard.peek(transactional_id), request)
        worst = next((code for code in codes.values() if code in DOUBTFUL), None)
        if worst is None:
            reply(codes)
            return
        entry = shard.entry(transactional_id) or shard.create(transactional_id)
        self._refuse(entry, request, worst, lambda code: reply(codes) if code == worst else refuse(code))
        self._go_on(entry)

    def end(self, transactional_id: str, request: EndRequest, reply: Callable[[EndReply], None]) -> None:
        entry = self._entry(transactional_id)
        if isinstance(entry, int):
            reply(EndReply(entry))
        else:
            self._end(entry, request, reply, self._held_until())

    def _end(self, entry: Entry, request: EndRequest, reply: Callable[[EndReply], None], until: float) -> None:
        def decide(now_ms: int, fresh_id: int | None) -> Decision:
            return table.end(entry.kept, request, now_ms, fresh_id)

        def answer(outcome: Transaction | int) -> None:
            if isinstance(outcome, int):
                self._refuse(entry, request, outcome, lambda code: reply(EndReply(code)))
            else:
                reply(table.end_reply(outcome, request))

        self._change(entry, decide, answer, until, lambda: self._end(entry, request, reply, until))

    def _refuse(
        self, entry: Entry, request: InitRequest | AddRequest | EndRequest, code: int, refuse: Callable[[int], None]
    ) -> None:
        """Who hears this may give up. What it has may be from a later coordinator, unless that is an epoch before the
        one that is kept: only a broker that can still append is the one that knows better."""
        is_older = table.is_older(entry.kept, request.producer_id, request.epoch)
        if code not in DOUBTFUL or (code == ErrorCode.PRODUCER_FENCED and is_older):
            refuse(code)
        elif entry.busy or entry.confirming or entry.shard.live.get(entry.transactional_id) is not entry:
            refuse(ErrorCode.NOT_COORDINATOR)
        else:
            self._confirm(entry, lambda failed: refuse(failed or code))

    def _confirm(self, entry: Entry, then: Callable[[int], None]) -> None:
        """Append what the log says of the entry already, or that there is none; `then` hears whether that was taken.
        Whatever is changed meanwhile comes behind it in the log: nobody has to wait for one who is refused."""
        entry.confirming = True

        def done(code: int) -> None:
            entry.confirming = False
            then(FAULTS.get(code, code))
            self._go_on(entry)

        self._append(entry.shard, [(encode_key(entry.transactional_id), entry.value)], done)

    # Changes

    def _change(
        self,
        entry: Entry,
        decide: Callable[[int, int | None], Decision],
        answer: Callable[[Transaction | int], None],
        until: float,
        again: Callable[[], None],
        fresh_id: int | None = None,
    ) -> None:
        """Decide, make it durable, answer; `answer` hears what is kept then, or why not."""
        if entry.shard.gone:
            answer(ErrorCode.NOT_COORDINATOR)
            return
        if entry.busy:
            self._hold(entry, until, again, answer)
            return
        decision = decide(self._wall.latest_ms(), fresh_id)
        if isinstance(decision, Lack):
            self._draw(entry, lambda drawn: self._change(entry, decide, answer, until, again, drawn), answer)
        elif decision == ErrorCode.CONCURRENT_TRANSACTIONS:
            self._hold(entry, until, again, answer)
        elif isinstance(decision, int) or decision is entry.kept:
            answer(decision)
            self._go_on(entry)
        else:
            self._store(entry, decision, lambda code: answer(decision if code == ErrorCode.NONE else code))

    def _draw(self, entry: Entry, drawn: Callable[[int], None], refuse: Callable[[int], None]) -> None:
        entry.busy = True

        def done(fresh_id: int | None) -> None:
            entry.busy = False
            if fresh_id is None:
                refuse(ErrorCode.NOT_COORDINATOR if entry.shard.gone else ErrorCode.COORDINATOR_NOT_AVAILABLE)
                self._go_on(entry)
            else:
                drawn(fresh_id)

        self._draw_producer_id(done)

    def _add_waiting(self, entry: Entry, kept: Transaction | None, then: Callable[[int], None] | None = None) -> None:
        """All partitions that wait to be added go into one record; so does the end of the transaction before, if that
        is what `kept` says and the log does not have it yet: `then` hears whether it has."""
        adding, entry.adding = entry.adding, []
        now_ms = self._wall.latest_ms()
        waiting: list[AddDone] = []
        answers: list[tuple[AddDone, int]] = []
        for until, request, reply in adding:
            decision = table.add(kept, request, now_ms)
            assert not isinstance(decision, Lack), "a partition needs no id"
            if decision == ErrorCode.CONCURRENT_TRANSACTIONS and until > self._clock.now():
                entry.adding.append((until, request, reply))
            elif isinstance(decision, int) or decision is entry.kept:
                code = decision if isinstance(decision, int) else ErrorCode.NONE
                answers.append((partial(self._refuse, entry, request, refuse=reply), code))
            elif (fault := self._room_fault(entry, decision)) != ErrorCode.NONE:
                answers.append((reply, fault))
            else:
                kept = decision
                waiting.append(reply)

        def stored(code: int) -> None:
            for reply in waiting:
                reply(code)
            if then is not None:
                then(code)

        if kept is not None and kept is not entry.kept:
            self._store(entry, kept, stored)
        for answer, code in answers:  # who hears may ask again at once
            answer(code)

    def _room_fault(self, entry: Entry, wanted: Transaction) -> int:
        if len(wanted.partitions) > PARTITIONS_MAX:
            return ErrorCode.POLICY_VIOLATION
        begins = entry.kept is None or entry.kept.state is not State.ONGOING
        is_full = begins and self._open_count() >= self.limits.open_max
        return ErrorCode.CONCURRENT_TRANSACTIONS if is_full else ErrorCode.NONE

    def _store(self, entry: Entry, kept: Transaction, then: Callable[[int], None]) -> None:
        """Make it durable; `then` hears the code, with the entry as the log has it."""
        entry.busy = True
        shard, before = entry.shard, entry.kept
        begins = kept.state is State.ONGOING and (before is None or before.state is not State.ONGOING)
        self._beginning += begins

        def stored(code: int) -> None:
            entry.busy = False
            self._beginning -= begins
            if code == ErrorCode.NONE and not shard.gone:
                if before is not None:
                    shard.states[before.state] -= 1
                shard.states[kept.state] += 1
                self._ongoing += (kept.state is State.ONGOING) - (before is not None and before.state is State.ONGOING)
                entry.kept, entry.value = kept, value
                if begins:
                    self._set_deadline(entry, kept, kept.timeout_ms)
            then(FAULTS.get(code, code))
            self._go_on(entry)

        value = encode(kept)
        self._append(shard, [(encode_key(entry.transactional_id), value)], stored)

    def _append(self, shard: Shard, records: list[Record], done: AppendDone) -> None:
        """A shard that was dropped has no say any more: who loads it from the log must not miss anything."""
        if shard.gone:
            done(ErrorCode.NOT_COORDINATOR)
        else:
            self._append_records(shard.partition, shard.epoch, records, done)

    def _go_on(self, entry: Entry) -> None:
        """Do what the state of the entry wants next, and let those go on who waited for it."""
        if entry.shard.gone:
            self._dismiss(entry, NEVER, ErrorCode.NOT_COORDINATOR)
            return
        if entry.busy:
            self._set_alarm(entry)
            return
        kept = entry.kept
        if kept is not None and kept.state in PREPARED:
            if not entry.marking:
                self._mark(entry, kept)
        else:
            entry.marking = False
        if entry.adding and not entry.busy:
            self._add_waiting(entry, kept)
        if entry.held and not entry.busy and (kept is None or kept.state not in PREPARED):
            held, entry.held = entry.held, []
            entry.waking += 1
            for _until, again, _give_up in held:
                again()
            entry.waking -= 1
        self._set_alarm(entry)
        self._rest(entry)

    def _rest(self, entry: Entry) -> None:
        """What nobody asks for and has nothing open is kept as its record has it."""
        shard, kept = entry.shard, entry.kept
        if not entry.at_rest or (kept is not None and kept.state in OPEN):
            return
        if shard.live.get(entry.transactional_id) is entry:
            shard.rest(entry)
            self._alarms.keep(entry, NEVER, _nothing)

    # Markers

    def _mark(self, entry: Entry, kept: Transaction) -> None:
        entry.marking = True
        if not kept.partitions:
            self._complete(entry, kept)
            return
        request = MarkerRequest(
            entry.transactional_id,
            kept.producer_id,
            kept.epoch,
            entry.shard.epoch,
            kept.state is State.PREPARE_COMMIT,
            kept.number,
            kept.transaction_version,
            tuple(sorted(kept.partitions)),
        )
        self._send_markers(
            request,
            lambda: not entry.shard.gone and entry.kept is kept,
            lambda: self._complete(entry, kept),
        )

    def _complete(self, entry: Entry, kept: Transaction, *, alone: bool = False) -> None:
        """Every partition has its marker. Tried until the log has it, or another broker leads. Where the next
        transaction waits to begin, one record says both; after a failure, which may be the fault of what was to be
        added, this goes `alone`."""
        if entry.shard.gone or entry.kept is not kept:
            return

        def stored(code: int) -> None:
            if code != ErrorCode.NONE and not entry.shard.gone:
                self._complete_later(entry, kept, alone=True)

        if entry.busy:
            self._complete_later(entry, kept, alone=alone)
            return
        completed = table.complete(kept, self._wall.latest_ms())
        if alone:
            self._store(entry, completed, stored)
        else:
            self._add_waiting(entry, completed, stored)

    def _complete_later(self, entry: Entry, kept: Transaction, *, alone: bool) -> None:
        again = partial(self._complete, entry, kept, alone=alone)
        self._alarms.keep((entry, kept), self._clock.now() + PAUSE_SECONDS, again)

    # Waits and timeouts

    def _held_until(self) -> float:
        return self._clock.now() + HELD_SECONDS

    def _hold(self, entry: Entry, until: float, again: Callable[[], None], give_up: Callable[[int], None]) -> None:
        if entry.shard.gone:
            give_up(ErrorCode.NOT_COORDINATOR)
        elif until <= self._clock.now() or len(entry.held) >= HELD_MAX:
            give_up(ErrorCode.CONCURRENT_TRANSACTIONS)
        else:
            entry.held.append((until, again, give_up))
            self._set_alarm(entry)

    def _dismiss(self, entry: Entry, now: float, code: int) -> None:
        """Those who wait, and whose time is over, hear the code."""
        adding, entry.adding = entry.adding, [one for one in entry.adding if one[0] > now]
        held, entry.held = entry.held, [one for one in entry.held if one[0] > now]
        for until, _request, reply in adding:
            if until <= now:
                reply(code)
        for until, _again, give_up in held:
            if until <= now:
                give_up(code)

    def _set_deadline(self, entry: Entry, kept: Transaction, left_ms: int) -> None:
        has_one = kept.state is State.ONGOING and not kept.two_phase
        entry.deadline = self._clock.now() + left_ms / 1000 if has_one else NEVER

    def _set_alarm(self, entry: Entry) -> None:
        """At the earliest of what it waits for: the timeout of the transaction, those who wait for it."""
        kept = entry.kept
        is_open = kept is not None and kept.state is State.ONGOING and not kept.two_phase
        at = entry.deadline if is_open else NEVER
        at = min([at, *(one[0] for one in entry.adding), *(one[0] for one in entry.held)])
        self._alarms.keep(entry, at, partial(self._ring, entry))

    def _ring(self, entry: Entry) -> None:
        now = self._clock.now()
        self._dismiss(entry, now, ErrorCode.CONCURRENT_TRANSACTIONS)
        if entry.deadline <= now and not entry.busy and not entry.shard.gone and entry.kept is not None:
            self._time_out(entry, entry.kept)
        elif not entry.shard.gone and not entry.busy:
            self._set_alarm(entry)
            self._rest(entry)

    def _time_out(self, entry: Entry, kept: Transaction) -> None:
        entry.deadline = NEVER
        aborted = table.time_out(kept, self._wall.latest_ms())
        if aborted is None:
            self._set_alarm(entry)
            return
        log.info(
            "transactional id %r of producer %d: aborted, it was open for longer than its timeout of %d ms",
            entry.transactional_id, kept.producer_id, kept.timeout_ms,
        )  # fmt: skip

        def stored(code: int) -> None:
            if code != ErrorCode.NONE:
                entry.deadline = self._clock.now() + PAUSE_SECONDS

        self._store(entry, aborted, stored)

    # Expiry

    def _schedule_expiry(self) -> None:
        at = NEVER if self._closed else self._clock.now() + self.limits.expiry_check_ms / 1000
        self._alarms.keep(self, at, self._begin_expiry)

    def _begin_expiry(self) -> None:
        self._expire_some(_idle_in_slices(list(self._open_shards())))
        self._schedule_expiry()

    def _expire_some(self, slices: Iterator[tuple[Shard, list[str]]]) -> None:
        """A slice of them in this turn, the rest in later ones: the loop is not held up."""
        found = next(slices, None)
        if found is None:
            return
        shard, names = found
        now_ms = self._wall.earliest_ms()
        if not shard.gone:
            unburied = (name for name in names if name not in shard.buried)
            expired = [name for name in unburied if shard.expires(name, now_ms, self.limits)]
            if expired:
                self._bury(shard, expired)
        self._clock.call_soon(partial(self._expire_some, slices))

    def _bury(self, shard: Shard, names: list[str]) -> None:
        """They answer nobody while their tombstones are on their way."""
        shard.buried.update(names)

        def done(code: int) -> None:
            shard.buried.difference_update(names)
            if code == ErrorCode.NONE:
                shard.forget(names)

        self._append(shard, [(encode_key(name), None) for name in names], done)

    # What there is

    def list_transactions(self, wanted: ListFilter) -> Iterator[list[ListedTransaction]] | int:
        """In slices, each for a turn of its own. While one partition loads, the list would have a gap."""
        if any(shard.loading for shard in self._shards.values()):
            return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        return descriptions.listed(self._open_shards(), wanted, self._wall.latest_ms())

    def describe(self, transactional_id: str) -> DescribedTransaction:
        shard = self._find(transactional_id) if transactional_id else ErrorCode.INVALID_REQUEST
        if isinstance(shard, int):
            return DescribedTransaction(shard, transactional_id)
        kept = None if transactional_id in shard.buried else shard.peek(transactional_id)
        if kept is None:
            return DescribedTransaction(ErrorCode.TRANSACTIONAL_ID_NOT_FOUND, transactional_id)
        return descriptions.described(transactional_id, kept)

    def states(self) -> Counter[str]:
        """How many transactional ids are in each state."""
        found: Counter[str] = Counter()
        for shard in self._open_shards():
            for state, count in shard.states.items():
                found[state.value] += count
        return found

    def oldest_two_phase_ms(self) -> int:
        """How long the oldest open two-phase transaction has been open; 0 when there is none."""
        return self._age_ms(kept.start_ms for kept in self._live() if kept.two_phase and kept.state is State.ONGOING)

    def oldest_ending_ms(self) -> int:
        """How long the oldest that is decided has not ended everywhere; 0 when there is none."""
        return self._age_ms(kept.update_ms for kept in self._live() if kept.state in PREPARED)

    def _live(self) -> Iterator[Transaction]:
        return (kept for shard in self._open_shards() for _name, kept in shard.all_live())

    def _age_ms(self, times_ms: Iterable[int]) -> int:
        oldest_ms = min(times_ms, default=None)
        return 0 if oldest_ms is None else max(0, self._wall.latest_ms() - oldest_ms)

    def samples(self) -> Iterator[metrics.Sample]:
        for state, count in self.states().items():
            yield metrics.Sample(metrics.TRANSACTIONS, (state,), count)
        yield metrics.Sample(metrics.TRANSACTION_ENDING_SECONDS, (), self.oldest_ending_ms() / 1000)
        yield metrics.Sample(metrics.TWO_PHASE_AGE_SECONDS, (), self.oldest_two_phase_ms() / 1000)

    def _open_count(self) -> int:
        return self._beginning + self._ongoing

    # Where it is

    def _id_fault(self, transactional_id: str) -> int:
        """Of one that nobody can have."""
        if not transactional_id:
            return ErrorCode.INVALID_REQUEST
        is_long = len(transactional_id.encode()) > ID_BYTES_MAX
        return ErrorCode.INVALID_PRODUCER_ID_MAPPING if is_long else ErrorCode.NONE

    def _entry(self, transactional_id: str) -> Entry | int:
        """With nothing kept if nobody has asked for the id here."""
        shard = self._id_fault(transactional_id) or self._find(transactional_id)
        if isinstance(shard, int):
            return shard
        return shard.entry(transactional_id) or shard.create(transactional_id)

    def _find(self, transactional_id: str) -> Shard | int:
        """The shard of this transactional id, or the code that says why it cannot be asked."""
        count = self.partition_count
        shard = self._shards.get(partition_of(transactional_id, count)) if count else None
        if shard is None:
            return ErrorCode.NOT_COORDINATOR
        if shard.loading:
            return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        return ErrorCode.CONCURRENT_TRANSACTIONS if transactional_id in shard.buried else shard

    def _open_shards(self) -> Iterator[Shard]:
        return (shard for shard in self._shards.values() if not shard.loading)


def _idle_in_slices(shards: list[Shard]) -> Iterator[tuple[Shard, list[str]]]:
    """The ids that are idle when it is their shard's turn, as many as one turn of the loop looks through."""
    for shard in shards:
        names = list(shard.idle)
        for at in range(0, len(names), IDS_PER_TURN):
            yield shard, names[at : at + IDS_PER_TURN]


def _nothing() -> None:
    """An alarm that is called off."""
