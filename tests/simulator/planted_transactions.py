"""Bugs of transactions: see `planted`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from headrace.cluster.image import NO_LEADER
from headrace.errors import ErrorCode
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.shard import ShardLoad as GroupLoad
from headrace.groups.transactional_offsets import TransactionalOffsets
from headrace.kafka.first_writes import FirstWrites
from headrace.partitions.partition import Partition
from headrace.partitions.verification import Verifications
from headrace.records.control import NO_NUMBER
from headrace.storage.aborted import AbortedTransactions
from headrace.storage.local_log import LocalLog
from headrace.storage.producers import ProducerTable
from headrace.storage.transactions import Transactions
from headrace.transactions import transaction as table
from headrace.transactions.coordinator import TransactionCoordinator
from headrace.transactions.markers import Markers
from headrace.transactions.messages import InitRequest, MarkerRequest
from headrace.transactions.shard import Entry, Shard
from headrace.transactions.transaction import Decision, State, Transaction
from simulator.planted import found_by, plant, swap

# Coordinators.


@plant
def markers_before_the_decision_is_kept(stack: ExitStack) -> None:
    """Markers leave as soon as a producer asks for the end; the decision may never come into the log."""
    store = TransactionCoordinator._store

    def marked(self: TransactionCoordinator, entry: Any, kept: Transaction, then: Any) -> None:
        if kept.state in table.PREPARED and kept.partitions:
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
            self._send_markers(request, lambda: False, lambda: None)
        store(self, entry, kept, then)

    swap(stack, TransactionCoordinator, "_store", marked)


@plant
def complete_with_the_first_marker(stack: ExitStack) -> None:
    """A transaction has ended when one partition has acknowledged its marker."""
    acknowledged = Markers._acknowledged

    def done(self: Markers, sending: Any, places: Any) -> None:
        places = list(places)
        acknowledged(self, sending, list(sending.left) if places else places)

    swap(stack, Markers, "_acknowledged", done)


@plant
def decided_transactions_are_forgotten_by_the_next_coordinator(stack: ExitStack) -> None:
    """Who takes over sends no markers of what the one before has decided."""
    opened = Shard.open

    def without(self: Shard) -> list[str]:
        kept = {name: self.peek(name) for name in opened(self)}
        return [name for name, each in kept.items() if each is not None and each.state not in table.PREPARED]

    swap(stack, Shard, "open", without)


@found_by("tests/transactions/test_transaction_coordinator.py")
@plant
def take_over_without_an_abort(stack: ExitStack) -> None:
    """A new producer of a transactional id gets the next epoch, and what was open stays open. Its next write
    aborts that where it comes, so few seeds see it."""
    init = table.init

    def let_in(kept: Transaction | None, request: InitRequest, now_ms: int, fresh_id: int | None = None) -> Decision:
        if kept is not None and kept.state is State.ONGOING and not request.keep_prepared:
            kept = replace(kept, state=State.COMPLETE_ABORT)
        return init(kept, request, now_ms, fresh_id)

    swap(stack, table, "init", let_in)


@plant
def timeouts_end_two_phase_transactions(stack: ExitStack) -> None:
    """A transaction whose owner is away is aborted after some seconds."""

    def left(self: TransactionCoordinator, entry: Any, kept: Transaction, left_ms: int) -> None:
        is_open = kept.state is State.ONGOING
        entry.deadline = self._clock.now() + min(left_ms, 2000) / 1000 if is_open else float("inf")

    def aborted(kept: Transaction, now_ms: int) -> Transaction | None:
        return table._fence(kept, now_ms) if kept.state is State.ONGOING else None

    swap(stack, Transaction, "two_phase", property(lambda _: False))
    swap(stack, TransactionCoordinator, "_set_deadline", left)
    swap(stack, table, "time_out", aborted)


@plant
def timeouts_leave_the_epoch(stack: ExitStack) -> None:
    """A transaction that took too long is aborted, and its producer may go on as if nothing had happened."""

    def aborted(kept: Transaction, now_ms: int) -> Transaction | None:
        if kept.state is not State.ONGOING or kept.two_phase:
            return None
        return replace(kept, state=State.PREPARE_ABORT, update_ms=now_ms)

    swap(stack, table, "time_out", aborted)


@plant
def nobody_times_out(stack: ExitStack) -> None:
    """What a silent producer left stays open."""
    swap(stack, table, "time_out", lambda *_: None)


@found_by("tests/transactions/test_transaction_table.py")
@plant
def any_epoch_may_end_a_transaction(stack: ExitStack) -> None:
    """Who asks for the end is taken for the producer of the transaction."""
    end = table.end

    def ended(kept: Transaction | None, request: Any, now_ms: int, fresh_id: int | None = None) -> Decision:
        if kept is not None and kept.state is State.ONGOING:
            request = replace(request, producer_id=kept.client.producer_id, epoch=kept.client.epoch)
        return end(kept, request, now_ms, fresh_id)

    swap(stack, table, "end", ended)


@found_by("tests/transactions/test_transaction_coordinator.py")
@plant
def rest_while_others_wait(stack: ExitStack) -> None:
    """What is kept of a transactional id is put aside when one of those who waited for it is refused: what the next one
    stores is forgotten. It was so once."""

    def at_rest(self: Entry) -> bool:
        return not (self.busy or self.marking or self.adding or self.held)

    swap(stack, Entry, "at_rest", property(at_rest))


# Markers in partitions.


@plant
def markers_of_any_transaction(stack: ExitStack) -> None:
    """A marker that comes late, or again, ends what is open then."""
    append, check = Partition.append_marker, Partition._check_marker

    def appended(self: Partition, *args: Any, **named: Any) -> Any:
        return append(self, *args, **{**named, "number": NO_NUMBER, "transaction_version": 0})

    def checked(self: Partition, header: Any, coordinator_epoch: int, state: Any, version: int) -> None:
        check(self, header, max(coordinator_epoch, state.coordinator_epoch), state, version)

    swap(stack, Partition, "append_marker", appended)
    swap(stack, Partition, "_check_marker", checked)


@plant
def first_writes_whatever_the_coordinator_says(stack: ExitStack) -> None:
    """A leader takes the first write of a transaction that has ended: it is opened again."""
    answered = FirstWrites._answered

    def passed(self: FirstWrites, transaction: Any, places: Any, codes: Any, otherwise: int = 0) -> None:
        answered(self, transaction, places, {}, ErrorCode.NONE)

    swap(stack, FirstWrites, "_answered", passed)


@plant
def a_zombie_takes_along_its_successor(stack: ExitStack) -> None:
    """Writes of two epochs of a producer wait for one answer. It was so once."""

    class ByProducer(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return super().get(key[:2], default)

        def pop(self, key: Any, *default: Any) -> Any:
            return super().pop(key[:2], *default)

        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key[:2], value)

        def __contains__(self, key: Any) -> bool:
            return super().__contains__(key[:2])

    init = FirstWrites.__init__

    def built(self: FirstWrites, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        self.waiting = ByProducer()

    swap(stack, FirstWrites, "__init__", built)


@found_by("tests/partitions/test_partition_transactions.py")
@plant
def a_marker_leaves_verifications(stack: ExitStack) -> None:
    """What was verified before the marker may open the transaction behind it."""
    swap(stack, Verifications, "void", lambda *_: None)


@found_by("tests/partitions/test_partition_transactions.py")
@plant
def lost_markers_are_not_missed(stack: ExitStack) -> None:
    """A transaction whose marker an election has cost ends as its producer's next one does. It was so once."""
    swap(stack, Partition, "_end_unmarked", lambda *_: None)


@plant
def markers_wait_for_topics_that_are_deleted(stack: ExitStack) -> None:
    """A transaction does not end before a topic is there again that was deleted."""
    leader = Markers._leader

    def found(self: Markers, place: Any) -> int | None:
        known = leader(self, place)
        return NO_LEADER if known is None else known

    swap(stack, Markers, "_leader", found)


# What is decided.


@plant
def aborted_transactions_begin_with_the_log(stack: ExitStack) -> None:
    """Of an aborted transaction whose first records are deleted nobody hears any more."""
    aborted = LocalLog.aborted

    def told(self: LocalLog, offset: int, limit: int) -> Any:
        return [each for each in aborted(self, offset, limit) if each[1] >= self.start_offset]

    swap(stack, LocalLog, "aborted", told)


@plant
def what_is_open_goes_with_its_first_record(stack: ExitStack) -> None:
    """A transaction whose first record is deleted does not hold up readers any more."""

    def stable(self: Partition) -> int:
        undecided = self.log.producers.first_undecided(self.high_watermark)
        is_there = undecided is not None and undecided >= self.log.start_offset
        return min(self.high_watermark, undecided) if undecided is not None and is_there else self.high_watermark

    swap(stack, Partition, "last_stable_offset", property(stable))


@plant
def markers_count_when_they_are_written(stack: ExitStack) -> None:
    """Readers of what is committed do not wait until the marker is below the watermark."""
    first = Transactions.first_undecided

    def undecided(self: Transactions, watermark: int) -> int | None:
        return first(self, 1 << 62)

    def table_first(self: ProducerTable, watermark: int) -> int | None:
        self.load()
        return self.known.transactions.first_undecided(watermark)

    swap(stack, Transactions, "first_undecided", undecided)
    swap(stack, Transactions, "advance", lambda self, _: _advance(self, 1 << 62))
    swap(stack, ProducerTable, "first_undecided", table_first)


_advance = Transactions.advance


@plant
def stable_up_to_the_watermark(stack: ExitStack) -> None:
    """What is open is read as if it were committed."""
    swap(stack, Partition, "last_stable_offset", property(lambda self: self.high_watermark))


@plant
def aborted_transactions_are_not_told(stack: ExitStack) -> None:
    """A reader hears of those whose first record it reads, and of no others."""
    between = AbortedTransactions.between

    def some(self: AbortedTransactions, from_offset: int, to_offset: int) -> Any:
        return (each for each in between(self, from_offset, to_offset) if each.first_offset >= from_offset)

    swap(stack, AbortedTransactions, "between", some)


# Offsets.


@plant
def offsets_of_aborted_transactions_count(stack: ExitStack) -> None:
    """The marker of a transaction makes its offsets count, whatever it says."""
    end = TransactionalOffsets.end

    def ended(self: TransactionalOffsets, producer_id: int, *, committed: bool) -> Any:
        return end(self, producer_id, committed=True)

    swap(stack, TransactionalOffsets, "end", ended)


@plant
def offsets_of_transactions_are_forgotten_by_the_next_coordinator(stack: ExitStack) -> None:
    """Who loads a group does not know what its marker will decide on."""
    replay = GroupLoad.replay

    def replayed(self: GroupLoad, records: Any, producer: Any = None) -> None:
        if producer is None:
            replay(self, records)

    swap(stack, GroupLoad, "replay", replayed)


@plant
def offsets_that_may_change_count_as_stable(stack: ExitStack) -> None:
    """Who asks for stable offsets is told what a transaction is about to replace."""
    swap(stack, TransactionalOffsets, "of", lambda *_: ())


@plant
def offsets_in_transactions_of_any_member(stack: ExitStack) -> None:
    """A member commits offsets in its transaction though the group has given its partitions to another."""
    fault = GroupCoordinator._commit_fault

    def passed(self: Any, shard: Any, group_id: str, request: Any, now: Any, in_transaction: bool = False) -> int:
        return ErrorCode.NONE if in_transaction else fault(self, shard, group_id, request, now)

    swap(stack, GroupCoordinator, "_commit_fault", passed)
