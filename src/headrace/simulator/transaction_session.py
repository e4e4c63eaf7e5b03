"""One life of a simulated program with a transactional id: it asks for its id and epoch, writes to partitions and sends
offsets of a group in transactions, and ends them.

It speaks either of two protocols. With the older one (v1) it adds partitions and groups to its transaction before it
writes, and its epoch stays the same from one transaction to the next. With KIP-890's (v2) leaders add what is written
to, and every end gives it another epoch.

What is not answered is asked again, of whoever coordinates or leads by then, until it is answered. In the older
protocol nothing tells a request that is still on its way from one of the next transaction, here as in Kafka: when one
was not answered, such a producer asks for another epoch before it goes on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from headrace.errors import ErrorCode
from headrace.records import kernel
from headrace.records.batch import TRANSACTIONAL
from headrace.records.record import NewRecord
from headrace.simulator.connection import VERSIONS, Client, Clients, Decided
from headrace.simulator.contents import content_of, key_of
from headrace.simulator.history import Batch, Violation
from headrace.simulator.leaders import Leaders
from headrace.simulator.machine import Machine
from headrace.simulator.producer import ALL_IN_SYNC, BROKER_TIMEOUT_MS, RETRIABLE
from headrace.simulator.transaction_history import Home, Session, Transaction, TransactionHistory
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

V1: Final = 1
V2: Final = 2
GROUP: Final = 0
TRANSACTION: Final = 1
"""Types of keys of coordinators."""
PAUSE_SECONDS: Final = 0.05
VERSIONS_OF: Final[dict[int, dict[int, int]]] = {
    V1: VERSIONS
    | {
        api.INIT_PRODUCER_ID: 4,
        api.ADD_PARTITIONS_TO_TXN: 3,
        api.ADD_OFFSETS_TO_TXN: 3,
        api.TXN_OFFSET_COMMIT: 3,
        api.END_TXN: 3,
        api.LIST_TRANSACTIONS: 0,
    },
    V2: VERSIONS
    | {
        api.PRODUCE: 12,
        api.INIT_PRODUCER_ID: 6,
        api.TXN_OFFSET_COMMIT: 5,
        api.END_TXN: 5,
        api.LIST_TRANSACTIONS: 1,
    },
}
ELSEWHERE: Final = frozenset(
    {
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.KAFKA_STORAGE_ERROR,
    }
)
"""Look for the coordinator, and ask again; it may have been done."""
NOT_YET: Final = frozenset({ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.CONCURRENT_TRANSACTIONS})
"""Not done; ask again."""
OUT: Final = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.TRANSACTION_ABORTABLE,
    }
)
"""Not done, and nothing more of this session will be."""


NOT_MEMBER: Final = frozenset(
    {
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.REBALANCE_IN_PROGRESS,
        ErrorCode.FENCED_MEMBER_EPOCH,
        ErrorCode.STALE_MEMBER_EPOCH,
    }
)
"""Offsets are not taken: the group has gone on without the member, or with another epoch of it."""


class Fenced(Exception):
    """The session is over."""


class Outdated(Exception):
    """The offsets of a member were not taken, and its transaction is to be aborted."""


class MemberIdentity(NamedTuple):
    """Who commits offsets, as a group knows it."""

    member_id: str
    generation: int
    """Or the member's epoch."""


NOBODY: Final = MemberIdentity("", -1)


@dataclass(slots=True, eq=False)
class Parcel:
    """A batch of a transaction, until it is acknowledged."""

    batch: Batch
    records: int
    built: bytes
    made_ms: int
    tries: int = 0


@dataclass(slots=True)
class Coordinator:
    """Who coordinates something, as far as is known."""

    key: str
    key_type: int
    broker: int = -1


@dataclass(slots=True)
class Lane:
    """What is to be written to one partition: values of records by batch, and where they were copied from."""

    where: TopicPartition
    counts: Sequence[int]
    sources: Sequence[tuple[TopicPartition, int]] = ()
    parcels: list[Parcel] = field(default_factory=list)


class TransactionSession:
    def __init__(
        self,
        clients: Clients,
        judge: TransactionHistory,
        topics: Iterable[str],
        transactional_id: str,
        version: int,
        timeout_ms: int,
        chance: random.Random,
        *,
        two_phase: bool = False,
    ) -> None:
        self.judged: Session = judge.session(transactional_id, float("inf") if two_phase else timeout_ms / 1000)
        self.producer_id = self.epoch = -1
        """As this session was told: a later answer may never have reached it."""
        self.timeout_ms = timeout_ms
        self.version = version
        self._clients = clients
        self._judge = judge
        self._random = chance
        self._two_phase = two_phase
        self._client = Client(clients, str(self.judged), VERSIONS_OF[version])
        self._leaders = Leaders(clients, self._client, topics, chance)
        self._coordinator = Coordinator(transactional_id, TRANSACTION)
        self._groups: dict[str, Coordinator] = {}
        self._sequences: dict[TopicPartition, int] = {}
        self._made = 0
        self._unanswered = False
        """Whether something of this epoch may still be on its way."""
        self._begun = False
        """Whether the coordinator may have the transaction."""

    @property
    def transactional_id(self) -> str:
        return self.judged.transactional_id

    # Ids.

    async def start(self, *, keep_prepared: bool = False) -> Message:
        """Take over from whoever had the transactional id."""
        return await self._init(-1, -1, keep_prepared=keep_prepared)

    async def _init(self, producer_id: int, epoch: int, *, keep_prepared: bool = False) -> Message:
        judged, judge, again = self.judged, self._judge, producer_id >= 0
        message = Message(
            transactional_id=self.transactional_id,
            transaction_timeout_ms=self.timeout_ms,
            producer_id=producer_id,
            producer_epoch=epoch,
            enable2_pc=self._two_phase,
            keep_prepared_txn=keep_prepared,
        )

        def decided(answer: Message, _: Machine) -> None:
            if not answer.error_code:
                judge.initialized(judged, answer.producer_id, answer.producer_epoch, again=again)

        answer = await self._coordinated(
            self._coordinator,
            api.INIT_PRODUCER_ID,
            message,
            _code,
            decided,
            before=lambda: judge.asks_to_init(judged),
        )
        self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
        self._sequences.clear()
        self._unanswered = False
        return answer

    # A transaction.

    def begin(self) -> Transaction:
        self._begun = False
        return self._judge.begin(self.judged, two_phase=self._two_phase, producer_id=self.producer_id, epoch=self.epoch)

    async def write(self, transaction: Transaction, lanes: Sequence[Lane], *, wait: bool = True) -> None:
        """Batches to several partitions at once. Without `wait` nobody looks for answers: some may never come."""
        if self.version == V1:
            await self._add_partitions(transaction, [lane.where for lane in lanes])
        for lane in lanes:
            lane.parcels = self._build(transaction, lane)
        self._begun = True
        if wait:
            ends = await asyncio.gather(*(self._deliver(transaction, lane) for lane in lanes), return_exceptions=True)
            for raised in sorted((end for end in ends if end is not None), key=lambda end: isinstance(end, Fenced)):
                raise raised
            return
        self._unanswered = True
        for lane in lanes:
            leader = self._leaders.leader(lane.where)
            if leader is not None:
                for parcel in lane.parcels:
                    self._produce(leader, lane.where, parcel)

    def _add_request(self, partitions: Sequence[TopicPartition]) -> Message:
        topics: dict[str, list[int]] = {}
        for where in partitions:
            topics.setdefault(where.topic, []).append(where.partition)
        return Message(
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=[Message(name=name, partitions=rows) for name, rows in topics.items()],
        )

    async def _add_partitions(self, transaction: Transaction, partitions: Sequence[TopicPartition]) -> None:
        message = self._add_request(partitions)

        def code_of(answer: Message) -> int:
            rows = [row for topic in answer.results_by_topic_v3_and_below for row in topic.results_by_partition]
            return next((row.partition_error_code for row in rows if row.partition_error_code), ErrorCode.NONE)

        self._begun = True
        await self._coordinated(self._coordinator, api.ADD_PARTITIONS_TO_TXN, message, code_of, transaction=transaction)

    def _build(self, transaction: Transaction, lane: Lane) -> list[Parcel]:
        judged, where, parcels, taken = self.judged, lane.where, [], 0
        for count in lane.counts:
            self._made += 1
            batch = judged.number, self._made
            now_ms = self._clients.clock.wall_ms()
            built = self._batch(where, batch, count, now_ms)
            self._judge.sends(transaction, where, batch, lane.sources[taken : taken + count])
            taken += count
            parcels.append(Parcel(batch, count, built, now_ms))
        return parcels

    def _batch(self, where: TopicPartition, batch: Batch, count: int, now_ms: int) -> bytes:
        records: list[NewRecord] = [
            (now_ms, key_of(batch, nth), content_of(batch, nth, self._random.randrange(60)), []) for nth in range(count)
        ]
        sequence = self._sequences.get(where, 0)
        self._sequences[where] = sequence + count
        built = kernel.build(
            records,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=sequence,
            attributes=TRANSACTIONAL,
        )
        return bytes(built)

    async def _deliver(self, transaction: Transaction, lane: Lane) -> None:
        """All at once, and what failed one after the other."""
        waiting, first = list(lane.parcels), True
        while waiting:
            leader = self._leaders.leader(lane.where)
            if leader is None:
                self._leaders.refresh()
                await self._pause()
                continue
            sent = waiting if first else waiting[:1]
            answers = [self._produce(leader, lane.where, parcel) for parcel in sent]
            first, done = False, []
            for parcel, answer in zip(sent, answers, strict=True):
                code = _produced(await answer)
                was_first, alone = parcel is sent[0], len(lane.parcels) == 1
                if self._is_done(transaction, lane.where, parcel, code, was_first=was_first, alone=alone):
                    done.append(parcel)
            waiting = [parcel for parcel in waiting if parcel not in done]
            if waiting:
                self._leaders.refresh()
                await self._pause()

    def _is_done(
        self,
        transaction: Transaction,
        where: TopicPartition,
        parcel: Parcel,
        code: int | None,
        *,
        was_first: bool,
        alone: bool,
    ) -> bool:
        if code is None:
            self._unanswered = True
            return False
        if code == ErrorCode.NONE:
            return True
        if code == ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            if parcel.tries == 1:
                raise Violation(f"{where}: batch {parcel.batch} was sent once and is told to be a duplicate")
            return True
        if code in OUT:
            self._judge.told_fenced(self.judged, transaction, code)
            raise Fenced
        if code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and not was_first:
            return False
        if code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and self._clients.history.may_lose(where):
            raise Fenced  # what came before is lost: clients abort then
        if code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and parcel.tries > 1 and not alone:
            # A leader that does not know the producer begins with what comes first: where the first batch found no
            # leader, the second may have found the next one. Clients abort then, as nothing was acknowledged.
            raise Fenced
        if code not in RETRIABLE and code not in NOT_YET and code not in ELSEWHERE:
            raise Violation(f"{where}: batch {parcel.batch} of {transaction} is refused for good: {code}")
        return False

    def _produce_request(self, where: TopicPartition, built: bytes) -> Message:
        row = Message(index=where.partition, records=built)
        return Message(
            transactional_id=self.transactional_id,
            acks=ALL_IN_SYNC,
            timeout_ms=BROKER_TIMEOUT_MS,
            topic_data=[Message(name=where.topic, partition_data=[row])],
        )

    def _produce(self, leader: int, where: TopicPartition, parcel: Parcel) -> asyncio.Future[Message | None]:
        parcel.tries += 1
        message = self._produce_request(where, parcel.built)
        clients, sent_at = self._clients, self._clients.clock.now()

        def decided(answer: Message, machine: Machine) -> None:
            told = answer.responses[0].partition_responses[0]
            if told.error_code:
                return
            self._judge.acknowledged(parcel.batch, machine.life)
            epoch, synced = clients.epoch(machine, where), clients.is_synced(machine, where, sent_at)
            placed = parcel.records, told.base_offset, epoch
            clients.history.acknowledged(where, parcel.batch, *placed, machine.life, parcel.made_ms, synced=synced)

        return self._ask(leader, api.PRODUCE, message, decided)

    async def write_perhaps(self, transaction: Transaction, where: TopicPartition, count: int) -> None:
        """Write once to a partition that may not be there any more, whatever comes of it."""
        asked = Message(
            topics=[Message(name=where.topic)],
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )
        known = await self._ask(self._clients.some_broker(self._random), api.METADATA, asked)
        rows = [] if known is None else [row for topic in known.topics for row in topic.partitions]
        leader = rows[where.partition].leader_id if rows else -1
        if leader < 0 or (self.version == V1 and not await self._add_perhaps(where)):
            return
        self._begun = True
        built = self._batch(where, (self.judged.number, 0), count, self._clients.clock.wall_ms())
        self._clients.history.counts["written to passing topics"] += 1
        answer = await self._ask(leader, api.PRODUCE, self._produce_request(where, built))
        self._unanswered = self._unanswered or answer is None

    async def _add_perhaps(self, where: TopicPartition) -> bool:
        await self._find(self._coordinator)
        message = self._add_request([where])
        self._begun = True
        answer = await self._ask(self._coordinator.broker, api.ADD_PARTITIONS_TO_TXN, message)
        if answer is None:
            self._unanswered = True
            return False
        return not answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code

    async def send_offsets(
        self,
        transaction: Transaction,
        group: str,
        offsets: Mapping[TopicPartition, int],
        member: MemberIdentity = NOBODY,
    ) -> None:
        """Outdated if the group does not take them of that member."""
        home = self._groups.setdefault(group, Coordinator(group, GROUP))
        named = {
            "transactional_id": self.transactional_id,
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
            "group_id": group,
        }
        self._begun = True
        if self.version == V1:
            message = Message(**named)
            await self._coordinated(self._coordinator, api.ADD_OFFSETS_TO_TXN, message, _code, transaction=transaction)
        topics: dict[str, list[Message]] = {}
        for where, offset in offsets.items():
            row = Message(
                partition_index=where.partition,
                committed_offset=offset,
                committed_leader_epoch=-1,
                committed_metadata="",
            )
            topics.setdefault(where.topic, []).append(row)
        self._judge.sends_offsets(transaction, {(group, where): at for where, at in offsets.items()})
        message = Message(
            **named,
            generation_id=member.generation,
            member_id=member.member_id,
            group_instance_id=None,
            topics=[Message(name=name, partitions=rows) for name, rows in topics.items()],
        )

        def code_of(answer: Message) -> int:
            rows = [row for topic in answer.topics for row in topic.partitions]
            return next((row.error_code for row in rows if row.error_code), ErrorCode.NONE)

        history = self._clients.history
        is_member = member is not NOBODY
        given_on = [where for where in offsets if is_member and history.is_given_on(group, member.generation, where)]

        def decided(answer: Message, machine: Machine) -> None:
            if given_on and not code_of(answer):
                raise Violation(f"{group}: {machine.life} takes offsets of {member} for {given_on[0]} in a transaction")

        await self._coordinated(
            home, api.TXN_OFFSET_COMMIT, message, code_of, decided, transaction=transaction, outdated=NOT_MEMBER
        )

    async def end(self, transaction: Transaction, *, committed: bool) -> None:
        """And have another epoch if something may still be on its way."""
        judged, judge = self.judged, self._judge
        if not self._begun:
            return
        message = Message(
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            committed=committed,
        )

        def decided(answer: Message, machine: Machine) -> None:
            if answer.error_code in NOT_YET or answer.error_code in OUT:
                judge.end_refused(transaction, committed=committed)
            elif not answer.error_code:
                judge.ended(transaction, machine.life, committed=committed)

        answer = await self._coordinated(
            self._coordinator,
            api.END_TXN,
            message,
            _code,
            decided,
            before=lambda: judge.asks_to_end(transaction, committed=committed),
            transaction=transaction,
        )
        if self.version == V2:
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
            judge.bumped(judged, self.producer_id, self.epoch)
            self._sequences.clear()
        elif self._unanswered:
            transaction.may_linger = True
            await self._init(self.producer_id, self.epoch)

    async def end_kept(self, transaction: Transaction, *, committed: bool) -> None:
        """End a transaction that another session has prepared."""
        self._begun = True
        await self.end(transaction, committed=committed)

    # Questions outside of transactions.

    async def committed_offset(self, home: Home) -> int:
        """What the group has committed of the partition, once nothing is pending; -1 for nothing."""
        group, where = home
        coordinator = self._groups.setdefault(group, Coordinator(group, GROUP))
        rows = [Message(name=where.topic, partition_indexes=[where.partition])]
        message = Message(group_id=group, topics=rows, require_stable=True)

        def code_of(answer: Message) -> int:
            code = answer.error_code or answer.topics[0].partitions[0].error_code
            return ErrorCode.CONCURRENT_TRANSACTIONS if code == ErrorCode.UNSTABLE_OFFSET_COMMIT else code

        def decided(answer: Message, machine: Machine) -> None:
            if not code_of(answer) and answer.topics[0].partitions[0].committed_offset >= 0:
                self._judge.offset_told(home, answer.topics[0].partitions[0].committed_offset, machine.life)

        answer = await self._coordinated(coordinator, api.OFFSET_FETCH, message, code_of, decided)
        return int(answer.topics[0].partitions[0].committed_offset)

    @property
    def is_alone(self) -> bool:
        """Whether no request for an epoch is on its way that nobody has answered: it would fence this session."""
        return self.judged.asked_inits == self.judged.answered_inits

    def hang_up(self) -> None:
        self._client.hang_up()

    # Asking.

    async def _coordinated(
        self,
        coordinator: Coordinator,
        api_key: int,
        message: Message,
        code_of: Callable[[Message], int],
        decided: Decided | None = None,
        before: Callable[[], object] = lambda: None,
        transaction: Transaction | None = None,
        outdated: frozenset[int] = frozenset(),
    ) -> Message:
        """The answer of the coordinator that has done it. Outdated after one of those codes."""
        while True:
            await self._find(coordinator)
            before()
            answer: Message | None = await self._ask(coordinator.broker, api_key, message, decided)
            code = ErrorCode.NOT_COORDINATOR if answer is None else code_of(answer)
            if answer is None:
                self._unanswered = True
            elif code == ErrorCode.NONE:
                return answer
            elif code in OUT:
                self._judge.told_fenced(self.judged, transaction, code)
                raise Fenced
            elif code in outdated:
                raise Outdated
            elif code not in ELSEWHERE and code not in NOT_YET:
                raise Violation(f"{self.judged}: API {api_key} is refused for good: {code}")
            if code not in NOT_YET:
                coordinator.broker = -1
            await self._pause()

    async def _find(self, coordinator: Coordinator) -> None:
        while coordinator.broker < 0:
            message = Message(key=coordinator.key, key_type=coordinator.key_type)
            broker = self._clients.some_broker(self._random)
            answer = await self._ask(broker, api.FIND_COORDINATOR, message)
            if answer is not None and not answer.error_code:
                coordinator.broker = answer.node_id
            else:
                await self._pause()

    def _ask(self, broker: int, api_key: int, message: Message, decided: Decided | None = None) -> asyncio.Future[Any]:
        """The answer, or None if there will be none."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def answered(told: Message | None) -> None:
            if not answer.done():
                answer.set_result(told)

        self._client.call(broker, api_key, message, answered, decided=decided)
        return answer

    async def _pause(self) -> None:
        await asyncio.sleep(PAUSE_SECONDS * self._random.uniform(0.5, 1.5))


def look_at(task: asyncio.Task[None]) -> None:
    """What it raised by mistake, or as a finding, is one."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


def _code(answer: Message) -> int:
    return int(answer.error_code)


def _produced(answer: Message | None) -> int | None:
    return None if answer is None else int(answer.responses[0].partition_responses[0].error_code)
