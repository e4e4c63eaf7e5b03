"""The transactional load of a simulated cluster: who writes, copies and reads in transactions, and how it ends.

- writers write to one or more partitions of `ledger` and commit, abort, abort while their writes are on their way, fall
  silent for good, or stand still for longer than their timeout and go on. Each transactional id is started again now
  and then while the one before goes on as if nothing had happened: a zombie;
- copiers read what is committed in a partition of `ledger` and write it to `copied`, with the offset up to which they
  have read in the same transaction. One that is started again goes on from the offset that is committed;
- owners open transactions that no timeout ends, are gone for a while, and another session ends them, perhaps only when
  everything else is at rest;
- readers read what is committed of every partition, from leaders and followers.

At the end (`finish`) nobody begins anything any more. Then no transaction is open but those of owners who are away,
these are ended, and every record that is committed in `ledger` is in `copied`, once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

from headrace.cluster.names import TRANSACTIONS_TOPIC
from headrace.errors import ErrorCode, HeadraceError
from headrace.partitions.partition import Partition
from headrace.records.batch import batches
from headrace.records.control import read_marker
from headrace.records.kernel import records
from headrace.simulator.broker import COPIED, LEDGER
from headrace.simulator.committed_reader import CommittedReader, committed_records, fetch_committed
from headrace.simulator.connection import Client, Clients
from headrace.simulator.consumer import Consumer, fetched
from headrace.simulator.contents import key_of, parse_content
from headrace.simulator.history import Violation
from headrace.simulator.leaders import Leaders
from headrace.simulator.machine import Machine
from headrace.simulator.scenario import TransactionPlan
from headrace.simulator.transaction_courses import TransactionSight
from headrace.simulator.transaction_history import CommittedRecord, Entry, Home, Transaction, TransactionHistory
from headrace.simulator.transaction_session import V2, VERSIONS_OF, Fenced, Lane, TransactionSession
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

GROUP: Final = "copiers"
PAUSE_SECONDS: Final = 0.04
SUCCESSOR_SHARE: Final = 0.15
"""Of transactions, those after which another session of the same id is started."""
ABORT_SHARE: Final = 0.2
ABANDON_SHARE: Final = 0.1
"""Aborts while the last writes are on their way."""
SILENT_SHARE: Final = 0.08
STANDSTILL_SHARE: Final = 0.12
BY_OWNER_SECONDS: Final = (0.3, 3.0)
AWAY_SHARE: Final = 0.4
"""Of prepared transactions, those whose owner comes back at the end."""
LAST_TIMEOUT_MS: Final = 30_000
"""Of who is to come to an end: where links and disks are slow, a short one is over before."""
OWNED_MAX: Final = 20
LOOK_SECONDS: Final = 0.2
OPEN_STATES: Final = frozenset({"Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence"})


@dataclass(slots=True, eq=False)
class Prepared:
    """A transaction that waits for its owner."""

    transaction: Transaction
    session: TransactionSession
    committed: bool
    """What its owner will have of it."""


class TransactionLoad:
    def __init__(self, clients: Clients, plan: TransactionPlan, seed: int, follower_share: float) -> None:
        self.judge = TransactionHistory(clients.history.note, clients.clock.now, self._clocks_differ)
        self.judge.counts = clients.history.counts
        self.plan = plan
        self.clients = clients
        self.ledger = [TopicPartition(LEDGER, index) for index in range(plan.partitions)]
        self.copied = [TopicPartition(COPIED, index) for index in range(plan.copied_partitions)]
        self.stage = "load"
        """How far it is; empty when nothing is left to do."""
        self.offsets: dict[Home, int] = {}
        """What is committed at the end."""
        self._seed = seed
        self._follower_share = follower_share
        self._random = random.Random(f"{seed} transactions load")
        self._writing: set[asyncio.Task[None]] = set()
        self._copying: set[asyncio.Task[None]] = set()
        self._finishing: set[asyncio.Task[None]] = set()
        self._alive: dict[str, TransactionSession] = {}
        """By transactional id: the latest session."""
        self._prepared: list[Prepared] = []
        self._readers: dict[TopicPartition, CommittedReader] = {}
        self._views: dict[tuple[TopicPartition, str], list[CommittedRecord]] = {}
        self._stopped = self._ledger_is_final = False

    def start(self) -> None:
        for where in self.partitions():
            chance = random.Random(f"{self._seed} reads {where}")
            reader = CommittedReader(self.clients, self.judge, where, chance, self._follower_share)
            self._readers[where] = reader
            Consumer(self.clients, where, f"consumer of {where}", PAUSE_SECONDS, self._follower_share)
        for nth in range(self.plan.writers):
            self._begin(self._writing, self._write(f"writer-{nth}"))
        for nth in range(self.plan.owners):
            self._begin(self._writing, self._own(f"owner-{nth}"))
        for where in self.ledger if self.copied else ():
            self._begin(self._copying, self._copy(where))

    def _begin(self, tasks: set[asyncio.Task[None]], what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(what)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(_look_at)

    def stop(self) -> None:
        self._stopped = True
        self._begin(self._finishing, self._finish())

    def _session(self, transactional_id: str, *, two_phase: bool = False) -> TransactionSession:
        version = V2 if two_phase else self._random.choice(self.plan.versions)
        made = self._alive[transactional_id] = TransactionSession(
            self.clients,
            self.judge,
            (LEDGER, COPIED) if self.copied else (LEDGER,),
            transactional_id,
            version,
            LAST_TIMEOUT_MS if self._stopped else self._random.choice(self.plan.timeouts_ms),
            random.Random(f"{self._seed} {transactional_id} {self._random.random()}"),
            two_phase=two_phase,
        )
        return made

    def _is_latest(self, session: TransactionSession) -> bool:
        return self._alive[session.transactional_id] is session

    async def _pause(self, seconds: float = PAUSE_SECONDS) -> None:
        await asyncio.sleep(seconds * self._random.uniform(0.2, 1.8))

    # Writers.

    async def _write(self, transactional_id: str) -> None:
        """A session after the other, as long as the load lasts."""
        session = self._session(transactional_id)
        try:
            await session.start()
            while not self._stopped:
                await self._pause()
                if not await self._write_once(session):
                    break
                if self._is_latest(session) and self._random.random() < SUCCESSOR_SHARE:
                    self._begin(self._writing, self._write(transactional_id))
        except Fenced:
            pass
        if self._is_latest(session) and not self._stopped:
            await self._pause(self._random.choice((3 * PAUSE_SECONDS, session.timeout_ms / 1000)))
            if self._is_latest(session) and not self._stopped:
                self._begin(self._writing, self._write(transactional_id))

    async def _write_once(self, session: TransactionSession) -> bool:
        """One transaction; False if the program ends in it."""
        kind, transaction = self._random.random(), session.begin()
        await session.write(transaction, self._lanes())
        if self._random.random() < 0.3:
            await self._pause()
            await session.write(transaction, self._lanes())
        if kind < SILENT_SHARE and not self._stopped:
            return False
        kind -= SILENT_SHARE
        if 0 <= kind < STANDSTILL_SHARE:
            await asyncio.sleep(session.timeout_ms / 1000 * self._random.uniform(0.5, 2.0))
            if kind < STANDSTILL_SHARE / 2:
                await session.write(transaction, self._lanes())
        kind -= STANDSTILL_SHARE
        if 0 <= kind < ABANDON_SHARE:
            await session.write(transaction, self._lanes(), wait=False)
            await session.end(transaction, committed=False)
        else:
            await session.end(transaction, committed=self._random.random() >= ABORT_SHARE)
        return True

    def _lanes(self) -> list[Lane]:
        partitions = self._random.sample(self.ledger, self._random.randint(1, len(self.ledger)))
        return [
            Lane(where, [self._random.choice((1, 2, 4)) for _ in range(self._random.choice((1, 1, 2, 3)))])
            for where in partitions
        ]

    # Owners.

    async def _own(self, owner: str) -> None:
        """Opens transactions, is gone, and comes back to end them. A request of its own for an epoch that is late on
        its way would end what it has prepared: each transaction has an id of its own."""
        for nth in range(OWNED_MAX):
            session = self._session(f"{owner}-{nth}", two_phase=True)
            await session.start()
            if self._stopped:
                return
            if not session.is_alone:
                continue
            transaction = session.begin()
            await session.write(transaction, self._lanes())
            session.hang_up()
            prepared = Prepared(transaction, session, committed=self._random.random() >= ABORT_SHARE)
            self._prepared.append(prepared)
            if self._random.random() < AWAY_SHARE:
                return
            await asyncio.sleep(self._random.uniform(*BY_OWNER_SECONDS))
            await self._end_prepared(prepared)

    async def _end_prepared(self, prepared: Prepared) -> None:
        """Another session of the same id ends it; again if an earlier request of it came in between."""
        before, transaction, fenced = prepared.session, prepared.transaction, True
        while fenced:
            session = self._session(before.transactional_id, two_phase=True)
            answer = await session.start(keep_prepared=True)
            ongoing = answer.ongoing_txn_producer_id, answer.ongoing_txn_producer_epoch
            if ongoing == (-1, -1) and (transaction.commit_asked or transaction.abort_asked):
                break
            if ongoing != (before.producer_id, before.epoch):
                raise Violation(f"{transaction} is prepared, and its owner is told that {ongoing} is open")
            try:
                await session.end_kept(transaction, committed=prepared.committed)
                fenced = False
            except Fenced:
                fenced = True
        self._prepared.remove(prepared)
        self.clients.history.counts["prepared transactions"] += 1

    # Copiers.

    async def _copy(self, where: TopicPartition) -> None:
        transactional_id = _copier(where)
        session = self._session(transactional_id)
        client = Client(self.clients, transactional_id, VERSIONS_OF[V2])
        leaders = Leaders(self.clients, client, (LEDGER,), self._random)
        try:
            await session.start()
            offset = await session.committed_offset((GROUP, where))
            while not (self._ledger_is_final and max(0, offset) >= self._end(where)):
                await self._pause()
                if self._stopped and not self._is_latest(session):
                    return
                offset = await self._copy_once(session, client, leaders, where, max(0, offset))
                if not self._stopped and self._is_latest(session) and self._random.random() < SUCCESSOR_SHARE:
                    self._begin(self._copying, self._copy(where))
            self.offsets[GROUP, where] = await session.committed_offset((GROUP, where))
        except Fenced:
            if self._is_latest(session):
                self._begin(self._copying, self._copy(where))

    async def _copy_once(
        self, session: TransactionSession, client: Client, leaders: Leaders, where: TopicPartition, offset: int
    ) -> int:
        """Copy what is there; answers where to go on."""
        found, after = await self._read(client, leaders, where, offset)
        if after == offset:
            return offset
        transaction = session.begin()
        if found:
            target = self._random.choice(self.copied)
            sources = [(where, at) for at, _, _ in found]
            await session.write(transaction, [Lane(target, [len(sources)], sources)])
        await session.send_offsets(transaction, GROUP, {where: after})
        if self._random.random() < SILENT_SHARE and not self._stopped:
            await asyncio.sleep(session.timeout_ms / 1000 * self._random.uniform(0.5, 2.0))
        await session.end(transaction, committed=self._random.random() >= ABORT_SHARE)
        return await session.committed_offset((GROUP, where))

    async def _read(
        self, client: Client, leaders: Leaders, where: TopicPartition, offset: int
    ) -> tuple[list[CommittedRecord], int]:
        leader = leaders.leader(where)
        if leader is None:
            leaders.refresh()
            return [], offset
        row = await _row(client, leader, where, fetch_committed({where: (offset, leaders.epoch(where))}))
        if row is None or row.error_code != ErrorCode.NONE:
            leaders.refresh()
            return [], offset
        return committed_records(row, offset)

    def _end(self, where: TopicPartition) -> int:
        """Where the partition ends, for all that any broker knows."""
        replicas = [machine.replica(where) for machine in self.clients.machines]
        return max((each.high_watermark for each in replicas if each is not None), default=0)

    # The end.

    async def _finish(self) -> None:
        self.stage = "writers have not come to their end"
        await self._none_left(self._writing)
        await self._only_open({each.session.transactional_id for each in self._prepared})
        self.stage = "prepared transactions are to be ended"
        for each in list(self._prepared):
            await self._end_prepared(each)
        await self._only_open(set())
        self._ledger_is_final = True
        self.stage = "copiers have not come to their end"
        await self._none_left(self._copying)
        await self._only_open(set())
        self.stage = "what is committed is read again"
        for where in self.ledger if self.plan.compacted else ():
            for machine in self.clients.machines:
                if machine.replica(where) is not None:
                    self._views[where, machine.name] = await self._read_again(where, machine)
        self.stage = ""

    async def _read_again(self, where: TopicPartition, machine: Machine) -> list[CommittedRecord]:
        """What that replica gives, from its start to its end."""
        client, offset, found = Client(self.clients, "reader again"), 0, []
        while offset < self._end(where):
            message = fetch_committed({where: (offset, -1)})
            row = await _row(client, machine.id, where, message)
            if row is None or row.error_code != ErrorCode.NONE:
                await asyncio.sleep(LOOK_SECONDS)
                continue
            records, after = committed_records(row, offset)
            found += records
            if after == offset:
                await asyncio.sleep(LOOK_SECONDS)
            offset = after
        return found

    async def _none_left(self, tasks: set[asyncio.Task[None]]) -> None:
        """Those that go on may begin others."""
        while tasks:
            await asyncio.wait(tasks)

    async def _only_open(self, wanted: set[str]) -> None:
        """Wait until no transaction is listed as open but these, and those of copiers while they go on."""
        at_work = set() if self._ledger_is_final else {_copier(where) for where in self.ledger}
        client = Client(self.clients, "lister", VERSIONS_OF[V2])
        while True:
            found = await self._open(client)
            if found is not None:
                if missing := wanted - found:
                    raise Violation(f"{sorted(missing)} are prepared, and not listed as open")
                if not found - wanted - at_work:
                    return
                self.stage = f"open are {sorted(found)}, prepared {sorted(wanted)}"
            await asyncio.sleep(LOOK_SECONDS)

    async def _open(self, client: Client) -> set[str] | None:
        """As all brokers list them; None if one does not answer."""
        found: set[str] = set()
        for machine in self.clients.machines:
            answer: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
            message = Message(state_filters=[], producer_id_filters=[], duration_filter=-1)
            client.call(machine.id, api.LIST_TRANSACTIONS, message, answer.set_result)
            told = await answer
            if told is None or told.error_code:
                return None
            found |= {row.transactional_id for row in told.transaction_states if row.transaction_state in OPEN_STATES}
        return found

    # What can be seen of it.

    def partitions(self) -> list[TopicPartition]:
        """That are written to in transactions."""
        return [*self.ledger, *self.copied]

    def all_partitions(self) -> list[TopicPartition]:
        """With those in which the coordinators keep their state."""
        state = [TopicPartition(TRANSACTIONS_TOPIC, index) for index in range(self.plan.state_partitions)]
        return [*self.partitions(), *state]

    def sight(self) -> TransactionSight:
        return TransactionSight(self.judge, self.plan.state_partitions)

    def _clocks_differ(self) -> bool:
        return any(machine.wall_offset_ms for machine in self.clients.machines)

    def look(self, machine: Machine, *, followers: bool) -> None:
        """Time and again; at followers as well, unless they may begin anew."""
        for where in self.partitions():
            partition = machine.replica(where)
            stable = _stable(partition)
            if partition is not None and stable is not None and (partition.leading or followers):
                self.judge.stable(where, partition.epoch, machine.life, stable, partition.high_watermark)

    def unsettled(self) -> str:
        if self.stage:
            return self.stage
        for where, reader in self._readers.items():
            for machine in self.clients.machines:
                partition = machine.replica(where)
                if partition is not None and (stable := _stable(partition)) != partition.high_watermark:
                    return f"{where}: the last stable offset of {machine.life} is {stable}"
            if reader.offset < self._end(where):
                return f"{reader.name} is at {reader.offset} of {self._end(where)}"
        return ""

    def compare(self, contents: dict[TopicPartition, bytes]) -> None:
        """With the final logs."""
        if self.plan.compacted:
            self.judge.judge_compacted(self._views, key_of)
            return
        logs = {where: entries(data) for where, data in contents.items()}
        self.judge.judge(logs, self.offsets, copied=self.ledger if self.copied else (), copies=self.copied)


def entries(data: bytes) -> list[Entry]:
    """Of a whole log."""
    found: list[Entry] = []
    for header, view in batches(memoryview(data)):
        producer = header.producer_id, header.producer_epoch
        marker = read_marker(view, header)
        if marker is not None:
            found.append(Entry(header.base_offset, *producer, None, committed=marker.committed))
            continue
        for record in records(view):
            batch, nth = parse_content(record.value or b"")
            found.append(Entry(record.offset, *producer, batch, nth))
    return found


async def _row(client: Client, broker: int, where: TopicPartition, message: Message) -> Message | None:
    """What a broker answers to a fetch of one partition; None if it does not."""
    answer: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
    client.call(broker, api.FETCH, message, answer.set_result)
    told = await answer
    return None if told is None else fetched(told)[where]


def _stable(partition: Partition | None) -> int | None:
    """Its last stable offset, if it can tell."""
    try:
        return None if partition is None else partition.last_stable_offset
    except HeadraceError:
        return None


def _copier(where: TopicPartition) -> str:
    return f"copier-{where.partition}"


def _look_at(task: asyncio.Task[None]) -> None:
    """What it raised by mistake, or as a finding, is one."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
