"""Courses (see `courses`) around the moments at which transactions are verified, prepared and ended.

A transaction is *prepared* from the moment at which its coordinator has decided on its end until the markers are in all
its partitions. `TransactionSight` tells of these moments as the brokers' own memory has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.cluster.names import TRANSACTIONS_TOPIC
from headrace.coordinators.state_log import partition_of
from headrace.simulator.courses import Course
from headrace.simulator.harm import ANY, Harm
from headrace.simulator.machine import Machine
from headrace.simulator.transaction_history import Transaction, TransactionHistory
from headrace.storage.log import TopicPartition

PREPARED: Final = frozenset({"PrepareCommit", "PrepareAbort"})
LOOK_BACK: Final = 12
"""Transactions, from the latest on: those before have come to their end."""


class TransactionSight:
    """Which transactions are coming to their end, and where."""

    def __init__(self, judge: TransactionHistory, state_partitions: int) -> None:
        self._judge = judge
        self._state_partitions = state_partitions

    def coordinator(self, harm: Harm, transaction: Transaction) -> Machine | None:
        number = partition_of(transaction.session.transactional_id, self._state_partitions)
        return harm.leader_of(TopicPartition(TRANSACTIONS_TOPIC, number))

    def leader(self, harm: Harm, transaction: Transaction) -> Machine | None:
        """Of one of the partitions that it writes to, and another machine than its coordinator if there is one."""
        leaders = [harm.leader_of(where) for where in transaction.sent]
        coordinator = self.coordinator(harm, transaction)
        found = [each for each in leaders if each is not None and each is not coordinator]
        return harm.random.choice(found) if found else next((each for each in leaders if each is not None), None)

    def written(self, harm: Harm) -> Transaction | None:
        """One that has records in a log, and whose end nobody has asked for."""
        return self._first(lambda each: bool(each.sent) and not each.is_asked_to_end and bool(self.open_in(harm, each)))

    def prepared(self, harm: Harm) -> Transaction | None:
        """One whose end is kept by its coordinator, while a partition does not know of it."""

        def is_prepared(each: Transaction) -> bool:
            coordinator = self.coordinator(harm, each)
            if not each.is_asked_to_end or coordinator is None:
                return False
            state = coordinator.transaction_state(each.session.transactional_id)
            return state in PREPARED and bool(self.open_in(harm, each))

        return self._first(is_prepared)

    def half_ended(self, harm: Harm) -> Transaction | None:
        """One that is ended in a partition, and not in another."""

        def is_half_ended(each: Transaction) -> bool:
            open_in = len(self.open_in(harm, each))
            return each.is_asked_to_end and 0 < open_in < len(each.sent)

        return self._first(is_half_ended)

    def open_in(self, harm: Harm, transaction: Transaction) -> list[TopicPartition]:
        """Where it is not ended, by the account of the leaders."""
        found = []
        for where in transaction.sent:
            leader = harm.leader_of(where)
            partition = None if leader is None else leader.leading(where)
            # Who looks must change nothing: what the log says of its producers is read when a broker needs it.
            if partition is None or not partition.log.producers.loaded:
                continue
            if partition.has_open_transaction(transaction.producer_id, transaction.epoch):
                found.append(where)
        return found

    def _first(self, condition: Callable[[Transaction], bool]) -> Transaction | None:
        return next((each for each in self._judge.last(LOOK_BACK) if condition(each)), None)


TransactionScript = Callable[[Harm, TransactionSight], Course]
Moment = Callable[[Harm], Transaction | None]


def _at(harm: Harm, moment: Moment, found: list[Transaction]) -> Callable[[], bool]:
    """Wait for it, and have it in the list."""

    def has_come() -> bool:
        if (transaction := moment(harm)) is not None:
            found.append(transaction)
        return bool(found)

    return has_come


def _soon(harm: Harm) -> float:
    return harm.random.choice((0.0, 0.0, harm.random.uniform(0, 0.02)))


def kill_coordinator_when_prepared(harm: Harm, sight: TransactionSight) -> Course:
    """It has decided on the end, and has perhaps told nobody."""
    found: list[Transaction] = []
    yield _at(harm, sight.prepared, found)
    coordinator = sight.coordinator(harm, found[0])
    yield _soon(harm)
    if coordinator is not None:
        harm.kill(coordinator, harm.random.uniform(0.3, 3.0))


def kill_coordinator_between_markers(harm: Harm, sight: TransactionSight) -> Course:
    """Some of the partitions know of the end."""
    found: list[Transaction] = []
    yield _at(harm, sight.half_ended, found)
    coordinator = sight.coordinator(harm, found[0])
    yield _soon(harm)
    if coordinator is not None:
        harm.kill(coordinator, harm.random.uniform(0.3, 3.0))


def kill_leader_when_prepared(harm: Harm, sight: TransactionSight) -> Course:
    """A partition gets its marker from the next leader's hand."""
    found: list[Transaction] = []
    yield _at(harm, sight.prepared, found)
    leader = sight.leader(harm, found[0])
    yield _soon(harm)
    if leader is not None:
        harm.kill(leader, harm.random.uniform(0.3, 3.0))


def kill_coordinator_and_leader(harm: Harm, sight: TransactionSight) -> Course:
    """Both at once."""
    found: list[Transaction] = []
    yield _at(harm, harm.random.choice((sight.prepared, sight.half_ended)), found)
    struck = {sight.coordinator(harm, found[0]): None, sight.leader(harm, found[0]): None}
    yield _soon(harm)
    for machine in struck:
        if machine is not None:
            harm.kill(machine, harm.random.uniform(0.2, 1.5))


def pause_coordinator_when_prepared(harm: Harm, sight: TransactionSight) -> Course:
    """Another one ends the transaction; the first goes on with its markers when the next transaction is open."""
    found: list[Transaction] = []
    yield _at(harm, harm.random.choice((sight.prepared, sight.half_ended)), found)
    coordinator = sight.coordinator(harm, found[0])
    if coordinator is not None:
        harm.pause(coordinator, harm.random.uniform(1.2, 3.0) * harm.lease_seconds)
    yield 3 * harm.lease_seconds


def hold_markers(harm: Harm, sight: TransactionSight) -> Course:
    """Markers are long on their way. Their coordinator is gone meanwhile, and another has ended the transaction."""
    found: list[Transaction] = []
    yield _at(harm, sight.written, found)
    coordinator, leader = sight.coordinator(harm, found[0]), sight.leader(harm, found[0])
    if coordinator is None or leader is None or coordinator is leader:
        return
    harm.cut_one_way(coordinator, leader, 3 * harm.lease_seconds + harm.random.uniform(0.2, 1.0))
    found.clear()
    yield _at(harm, sight.prepared, found)
    yield harm.random.uniform(0, 0.05)
    if harm.random.random() < 0.5:
        harm.kill(coordinator, harm.random.uniform(0.2, 1.0))
    else:
        harm.pause(coordinator, 2 * harm.lease_seconds)
    yield 3 * harm.lease_seconds


def slow_verification(harm: Harm, sight: TransactionSight) -> Course:
    """A leader asks long whether a transaction is open; meanwhile that one ends, or the leader does."""
    found: list[Transaction] = []
    yield _at(harm, sight.written, found)
    coordinator, leader = sight.coordinator(harm, found[0]), sight.leader(harm, found[0])
    if coordinator is None or leader is None or coordinator is leader:
        return
    harm.slow(coordinator, leader, harm.random.uniform(0.1, 0.6), 3.0)
    yield harm.random.uniform(0.2, 1.5)
    if harm.random.random() < 0.5:
        harm.kill(leader, harm.random.uniform(0.1, 1.0))
    yield harm.random.uniform(0.2, 1.0)


def lose_power_when_prepared(harm: Harm, sight: TransactionSight) -> Course:
    """All of them where that may be, or else the coordinator alone loses what it may."""
    found: list[Transaction] = []
    yield _at(harm, harm.random.choice((sight.prepared, sight.half_ended)), found)
    coordinator = sight.coordinator(harm, found[0])
    yield _soon(harm)
    if harm.regime == ANY:
        for machine in harm.machines:
            harm.cut_power(machine, harm.random.uniform(0.05, 1.0))
        yield 2 * harm.lease_seconds
    elif coordinator is not None:
        harm.lose_what_may_be(coordinator, harm.random.uniform(0.1, 1.0))


def elect_uncleanly(harm: Harm, sight: TransactionSight) -> Course:
    """One replica hears nothing for a while of what is written and ended; then all others are gone, and it leads."""
    found: list[Transaction] = []
    yield _at(harm, sight.written, found)
    where = harm.random.choice(sorted(found[0].sent))
    state, leader = harm.state_of(where), harm.leader_of(where)
    others = [each for each in harm.machines if state is not None and each.id in state.isr and each is not leader]
    if len(others) < 2:
        return
    behind = harm.random.choice(others)
    harm.isolate(behind, 2 * harm.lag_seconds + 1.0, from_clients=False)

    def is_out() -> bool:
        now = harm.state_of(where)
        return now is not None and behind.id not in now.isr

    yield is_out
    yield harm.random.uniform(0.0, 0.6)
    for machine in harm.machines:
        if machine is not behind:
            harm.kill(machine, harm.random.uniform(2.0, 3.0) * harm.lease_seconds)
    yield 4 * harm.lease_seconds


UNCLEAN_COURSES: Final[dict[str, TransactionScript]] = {"elect uncleanly": elect_uncleanly}
"""Where a topic allows it."""
TRANSACTION_COURSES: Final[dict[str, TransactionScript]] = {
    "kill coordinator when prepared": kill_coordinator_when_prepared,
    "kill coordinator between markers": kill_coordinator_between_markers,
    "kill leader when prepared": kill_leader_when_prepared,
    "kill coordinator and leader": kill_coordinator_and_leader,
    "pause coordinator when prepared": pause_coordinator_when_prepared,
    "hold markers": hold_markers,
    "slow verification": slow_verification,
    "lose power when prepared": lose_power_when_prepared,
}
