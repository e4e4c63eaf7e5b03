"""First writes of transactions: they wait until the transaction's coordinator has said that it is going on there.

A batch that opens a transaction in a partition is taken only then (KIP-890): one that comes late, when its transaction
has ended, would open it again, and nobody would end it. Clients of transaction version 2 leave it to us to add the
partition to the transaction; those before have added it, and it is only asked whether they have. What is asked in one
turn leaves together, in one request to each coordinator (AddPartitionsToTxn); a coordinator on this broker is asked
directly.

Whatever else comes from that producer for the partition waits behind its first write, so that its sequence is kept. The
bytes that wait are bounded: a front end stops reading from who sends more than HELD_BYTES, and beyond HELD_MOST_BYTES
writes are refused, and can be sent again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple

from headrace.cluster.image import NO_LEADER, Image
from headrace.cluster.names import TRANSACTIONS_TOPIC
from headrace.coordinators.peers import Ask
from headrace.coordinators.state_log import partition_of
from headrace.errors import (
    ConcurrentTransactions,
    ErrorCode,
    HeadraceError,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTxnState,
    NotEnoughReplicas,
    NotLeader,
    TransactionAbortable,
)
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.partitions.verification import Verification
from headrace.ports.clock import Clock
from headrace.transactions.coordinator import TransactionCoordinator
from headrace.transactions.messages import EPOCHS_BUMPED, AddRequest, Place
from headrace.wire.api import ADD_PARTITIONS_TO_TXN
from headrace.wire.message import Message

VERSION: Final = 5
"""Of AddPartitionsToTxn."""
TIMEOUT_MS: Final = 5000
TRANSACTIONS_PER_REQUEST: Final = 500
HELD_BYTES: Final = 32 << 20
HELD_MOST_BYTES: Final = 128 << 20
HELD_SECONDS: Final = 0.02
"""How long the coordinator on this broker lets an addition wait for the end of the transaction before."""


class Support(IntEnum):
    """What the client's version of its request knows of transactions."""

    VERIFIED = 0
    """It has added its partitions itself. Whatever is wrong is INVALID_TXN_STATE, which ends the producer."""
    ABORTABLE = 1
    """The same, but it can abort, and go on."""
    ADDED = 2
    """It leaves it to the broker to add them."""


class Transaction(NamedTuple):
    """The transaction of a write, as its request names it."""

    transactional_id: str
    producer_id: int
    epoch: int
    support: Support


GoOn = Callable[[HeadraceError | None], None]
"""Hears that the write may be tried now, or why it may not, in a turn that ends right after it."""


@dataclass(slots=True)
class _Held:
    """The writes of one producer to one partition, the first of which is being verified."""

    partition: Partition
    verification: Verification
    writes: deque[tuple[GoOn, int]]


Key = tuple[Partition, int, int]
"""A partition, the producer's id and its epoch: who was fenced must not take along who has followed it."""


class FirstWrites:
    def __init__(
        self,
        clock: Clock,
        partitions: Partitions,
        image: Callable[[], Image],
        transactions: TransactionCoordinator,
        ask: Ask,
    ) -> None:
        self._clock = clock
        self._partitions = partitions
        self._image = image
        self._transactions = transactions
        self._ask_peer = ask
        self.waiting: dict[Key, _Held] = {}
        self._asked: dict[Transaction, dict[Place, list[Key]]] = {}
        """What is to be asked at the end of this turn."""
        self._rooms: list[Callable[[], None]] = []
        self.held_bytes = 0

    @property
    def is_full(self) -> bool:
        return self.held_bytes > HELD_BYTES

    def when_room(self, call: Callable[[], None]) -> None:
        """Run once when half of what may wait has gone."""
        self._rooms.append(call)

    def must_wait(self, partition: Partition, transaction: Transaction) -> bool:
        """Whether a write is the first of its transaction in the partition, or comes behind one that waits."""
        if self.waiting and (partition, transaction.producer_id, transaction.epoch) in self.waiting:
            return True
        return not partition.has_open_transaction(transaction.producer_id, transaction.epoch)

    def hold(self, partition: Partition, transaction: Transaction, size_bytes: int, go_on: GoOn) -> None:
        """Keep a write until the transaction is known to be going on in the partition. HeadraceError if it cannot be
        kept. Not answered before the end of this turn."""
        if self.held_bytes + size_bytes > HELD_MOST_BYTES:
            raise NotEnoughReplicas(
                f"{partition.topic_partition}: {self.held_bytes} bytes wait for the coordinators of their "
                "transactions; send it again"
            )
        key = partition, transaction.producer_id, transaction.epoch
        held = self.waiting.get(key)
        if held is None:
            verification = partition.verification(transaction.producer_id, transaction.epoch)
            held = self.waiting[key] = _Held(partition, verification, deque())
            if not self._asked:
                self._clock.call_soon(self._ask)
            where = partition.topic_partition
            places = self._asked.setdefault(transaction, {})
            # Two of them where the partition has changed its role within this turn.
            places.setdefault((where.topic, where.partition), []).append(key)
        held.writes.append((go_on, size_bytes))
        self.held_bytes += size_bytes

    # Asking.

    def _ask(self) -> None:
        asked, self._asked = self._asked, {}
        by_broker: defaultdict[int, list[Transaction]] = defaultdict(list)
        for transaction in asked:
            by_broker[self._coordinator(transaction.transactional_id)].append(transaction)
        for broker, transactions in by_broker.items():
            if broker == NO_LEADER:
                for transaction in transactions:
                    self._answered(transaction, asked[transaction], {}, ErrorCode.COORDINATOR_NOT_AVAILABLE)
            elif broker == self._partitions.broker:
                for transaction in transactions:
                    self._ask_here(transaction, asked[transaction])
            else:
                for at in range(0, len(transactions), TRANSACTIONS_PER_REQUEST):
                    some = transactions[at : at + TRANSACTIONS_PER_REQUEST]
                    self._ask_broker(broker, {transaction: asked[transaction] for transaction in some})
        self._partitions.end_turn()

    def _coordinator(self, transactional_id: str) -> int:
        count = self._transactions.partition_count
        index = partition_of(transactional_id, count) if count else 0
        if self._partitions.find(TRANSACTIONS_TOPIC, index) is not None:
            return self._partitions.broker
        image = self._image()
        state = image.partition(TRANSACTIONS_TOPIC, index)
        if state is None or state.leader not in image.brokers or state.leader == self._partitions.broker:
            return NO_LEADER
        return state.leader

    def _ask_here(self, transaction: Transaction, places: dict[Place, list[Key]]) -> None:
        request = AddRequest(transaction.producer_id, transaction.epoch, frozenset(places), EPOCHS_BUMPED)

        def answered(codes: Mapping[Place, int], otherwise: int = 0) -> None:
            self._answered(transaction, places, codes, otherwise)
            self._clock.call_soon(self._partitions.end_turn)

        if transaction.support < Support.ADDED:
            self._transactions.verify(transaction.transactional_id, request, answered)
        else:
            added = partial(answered, {})
            self._transactions.add(transaction.transactional_id, request, added, HELD_SECONDS)

    def _ask_broker(self, broker: int, asked: dict[Transaction, dict[Place, list[Key]]]) -> None:
        def reply(answer: Message | HeadraceError) -> None:
            codes: dict[tuple[str, Place], int] = {}
            missing: int = ErrorCode.NETWORK_EXCEPTION
            if isinstance(answer, Message):
                missing = answer.error_code or ErrorCode.UNKNOWN_SERVER_ERROR
                codes = _codes(answer)
            for transaction, places in asked.items():
                name = transaction.transactional_id
                found = {place: codes[name, place] for place in places if (name, place) in codes}
                self._answered(transaction, places, found, missing)
            self._partitions.end_turn()

        message = Message(transactions=[_question(transaction, places) for transaction, places in asked.items()])
        self._ask_peer(broker, ADD_PARTITIONS_TO_TXN, VERSION, message, reply, TIMEOUT_MS, again=False)

    # Answers.

    def _answered(
        self, transaction: Transaction, places: dict[Place, list[Key]], codes: Mapping[Place, int], otherwise: int = 0
    ) -> None:
        for place, keys in places.items():
            code = codes.get(place, otherwise)
            error = None if code == ErrorCode.NONE else refusal(code, transaction, f"{place[0]}-{place[1]}")
            for key in keys:
                self._let_go(self.waiting.pop(key), transaction, error)
        if self._rooms and self.held_bytes <= HELD_BYTES // 2:
            rooms, self._rooms = self._rooms, []
            for call in rooms:
                call()

    def _let_go(self, held: _Held, transaction: Transaction, error: HeadraceError | None) -> None:
        if error is None and not held.partition.verified(held.verification):
            error = _void(held.partition, transaction)
        for go_on, size_bytes in held.writes:
            self.held_bytes -= size_bytes
            go_on(error)


def _void(partition: Partition, transaction: Transaction) -> HeadraceError:
    """Why nothing comes of a verification. A marker came meanwhile, perhaps that of the transaction before, for whose
    end the coordinator let us wait: whether this one goes on is to be asked again. Or this broker has led in another
    role since, or leads no more."""
    if partition.leading:
        return refusal(ErrorCode.CONCURRENT_TRANSACTIONS, transaction, str(partition.topic_partition))
    return NotLeader(f"{partition.topic_partition}: the leader has changed while a transaction was verified")


def support_of(version: int, abortable_from: int) -> Support:
    """Of a request that knows TRANSACTION_ABORTABLE from this version on, and leaves additions to us from the next."""
    if version < abortable_from:
        return Support.VERIFIED
    return Support.ABORTABLE if version == abortable_from else Support.ADDED


def refusal(code: int, transaction: Transaction, where: str) -> HeadraceError:
    """What the client of a write hears when the coordinator has answered with this code, as Kafka has it: who cannot be
    asked now can be asked again, which clients do when there are too few replicas."""
    text = f"{where}: transaction {transaction.transactional_id!r} of producer {transaction.producer_id}"
    if code in (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH):
        return InvalidProducerEpoch(f"{text}: epoch {transaction.epoch} is not the newest one")
    if code == ErrorCode.INVALID_PRODUCER_ID_MAPPING:
        return InvalidProducerIdMapping(f"{text}: the transactional id has another producer id")
    if code == ErrorCode.CONCURRENT_TRANSACTIONS and transaction.support == Support.ADDED:
        return ConcurrentTransactions(f"{text}: the one before it is being ended")
    if code in RETRIED:
        return NotEnoughReplicas(f"{text}: its coordinator could not be asked (error {code})")
    reason = f"{text} is not going on there (error {code})"
    return InvalidTxnState(reason) if transaction.support == Support.VERIFIED else TransactionAbortable(reason)


RETRIED: Final = frozenset(
    {
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.OPERATION_NOT_ATTEMPTED,
        ErrorCode.UNKNOWN_SERVER_ERROR,
    }
)
"""Codes of a coordinator after which it can be asked again. It may not have heard of a new topic yet."""


def _question(transaction: Transaction, places: Iterable[Place]) -> Message:
    topics: dict[str, list[int]] = {}
    for topic, index in places:
        topics.setdefault(topic, []).append(index)
    return Message(
        transactional_id=transaction.transactional_id,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.epoch,
        verify_only=transaction.support < Support.ADDED,
        topics=[Message(name=name, partitions=indexes) for name, indexes in topics.items()],
    )


def _codes(answer: Message) -> dict[tuple[str, Place], int]:
    return {
        (result.transactional_id, (topic.name, one.partition_index)): one.partition_error_code
        for result in answer.results_by_transaction
        for topic in result.topic_results
        for one in topic.results_by_partition
    }
