"""The transactional load of a simulated cluster: who writes, copies and reads in transactions, and how it ends.

- writers write to one or more partitions of `ledger` and commit, abort, abort while their writes are on their way, fall
  silent for good, or stand still for longer than their timeout and go on. Each transactional id is started again now
  and then while the one before goes on as if nothing had happened: a zombie;
- copiers read what is committed in a partition of `ledger` and write it to `copied`, with the offset up to which they
  have read in the same transaction. One that is started again goes on from the offset that is committed;
- records of `ledger` are deleted, by who has read them, decided or not, or by retention;
- in some runs those who copy are two members of a group instead, by either protocol: each copies what it owns in one
  transaction, and commits its offsets as the member that it is. They are killed, and stand still for longer than the
  group waits for them;
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
from headrace.simulator.consumer import Consumer, fetched, is_deleted
from headrace.simulator.contents import key_of, parse_content
from headrace.simulator.group_member import SESSION_MS
from headrace.simulator.history import Violation
from headrace.simulator.leaders import Leaders
from headrace.simulator.machine import Machine
from headrace.simulator.scenario import CLASSIC, CONSUMER, TransactionPlan
from headrace.simulator.transaction_courses import TransactionSight
from headrace.simulator.transaction_history import CommittedRecord, Entry, Home, Transaction, TransactionHistory
from headrace.simulator.transaction_members import ClassicMembership, ConsumerMembership, Membership
from headrace.simulator.transaction_operators import PASSING, HangingEnder, Renewer
from headrace.simulator.transaction_session import (
    V2,
    VERSIONS_OF,
    Fenced,
    Lane,
    Outdated,
    TransactionSession,
    look_at,
)
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

GROUP: Final = "copiers"
COPIER: Final = "copier-"
MEMBERS: Final = 2
PAUSE_SECONDS: Final = 0.04
SUCCESSOR_SHARE: Final = 0.15
"""Of transactions, those after which another session of the same id is started."""
ABORT_SHARE: Final = 0.2
ABANDON_SHARE: Final = 0.1
"""Aborts while the last writes are on their way."""
PASSING_SHARE: Final = 0.6
"""Of transactions where one topic more is deleted and made anew: those that write to it."""
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
        self.judge = TransactionHistory(
            clients.history.note, clients.clock.now, self._clocks_differ, self._state_is_doubted
        )
        self.judge.counts = clients.history.counts
        self.plan = plan
        self.clients = clients
        self.ledger = [TopicPartition(LEDGER, index) for index in range(plan.partitions)]
        self.copied = [TopicPartition(COPIED, index) for index in range(plan.copied_partitions)]
        self.stage = "load"
        """How far it is; empty when nothing is left to do."""
        self.offsets: dict[Home, int] = {}
        """What is committed at the end."""
        self._copied_to: dict[TopicPartition, int] = {}
        """As far as members of the group have seen it."""
        self._seed = seed
        self._follower_share = follower_share
        self._random = random.Random(f"{seed} transactions load")
        self._writing: set[asyncio.Task[None]] = set()
        self._copying: set[asyncio.Task[None]] = set()
        self._finishing: set[asyncio.Task[None]] = set()
        self._alive: dict[str, TransactionSession] = {}
        """By transactional id: the latest session."""
        self._prepared: list[Prepared] = []
        self.consumers: dict[TopicPartition, Consumer] = {}
        """Who read everything of the ledger, decided or not."""
        self._readers: dict[TopicPartition, CommittedReader] = {}
        self._views: dict[tuple[TopicPartition, str], list[CommittedRecord]] = {}
        self._renewer = Renewer(clients, "renewer", random.Random(f"{seed} renewer of passing topics"))
        self._stopped = self._ledger_is_final = False

    def start(self) -> None:
        for where in self.partitions():
            chance = random.Random(f"{self._seed} reads {where}")
            reader = CommittedReader(self.clients, self.judge, where, chance, self._follower_share)
            self._readers[where] = reader
            name = f"consumer of {where}"
            consumer = Consumer(self.clients, where, name, PAUSE_SECONDS, self._follower_share)
            if where.topic == LEDGER:
                self.consumers[where] = consumer
        if self.plan.passing:
            self._begin(self._writing, self._renewer.renew())
        for nth in range(self.plan.writers):
            self._begin(self._writing, self._write(f"writer-{nth}"))
        for nth in range(self.plan.owners):
            self._begin(self._writing, self._own(f"owner-{nth}"))
        if self.plan.members:
            for nth in range(MEMBERS):
                self._begin(self._copying, self._copy_as_member(nth))
        elif self.copied:
            for where in self.ledger:
                self._begin(self._copying, self._copy(where))

    def _begin(self, tasks: set[asyncio.Task[None]], what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(what)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(look_at)

    def stop(self) -> None:
        self._stopped = self._renewer.is_stopped = True
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
        if self.plan.passing and self._random.random() < PASSING_SHARE:
            await session.write_perhaps(transaction, PASSING, self._random.choice((1, 2)))
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
            try:
                await session.write(transaction, self._lanes())
            except Fenced:
                await self._give_up(transaction)
                continue
            session.hang_up()
            prepared = Prepared(transaction, session, committed=self._random.random() >= ABORT_SHARE)
            self._prepared.append(prepared)
            if self._random.random() < AWAY_SHARE:
                return
            await asyncio.sleep(self._random.uniform(*BY_OWNER_SECONDS))
            await self._end_prepared(prepared)

    async def _give_up(self, transaction: Transaction) -> None:
        """Its owner was not let go on before it was prepared: another session aborts it."""
        self.judge.asks_to_end(transaction, committed=False)
        await self._session(transaction.session.transactional_id, two_phase=True).start()

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
        transactional_id = f"{COPIER}{where.partition}"
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

    # Copiers that are members of a group.

    async def _copy_as_member(self, nth: int) -> None:
        """One life of a program after the other, with the same transactional id and as another member."""
        session = self._session(f"{COPIER}{nth}")
        membership = self._membership(session.transactional_id)
        client = Client(self.clients, session.transactional_id, VERSIONS_OF[V2])
        leaders = Leaders(self.clients, client, (LEDGER,), self._random)
        positions: dict[TopicPartition, int] = {}
        try:
            await session.start()
            while not self._all_is_copied():
                await self._pause()
                if not membership.is_member:
                    positions.clear()
                    await membership.join()
                owned = membership.take()
                for where in positions.keys() - owned:
                    del positions[where]
                for where in sorted(owned - positions.keys()):
                    positions[where] = max(0, await session.committed_offset((GROUP, where)))
                    self._note_copied(where, positions[where])
                if not await self._copy_owned(session, membership, client, leaders, positions):
                    break
            else:
                for where in self.ledger:
                    self.offsets[GROUP, where] = await session.committed_offset((GROUP, where))
        except Fenced:
            pass
        finally:
            membership.hang_up()
        if not self._all_is_copied():
            await self._pause(3 * PAUSE_SECONDS)
            self._begin(self._copying, self._copy_as_member(nth))

    def _membership(self, name: str) -> Membership:
        chance = random.Random(f"{self._seed} {name} {self._random.random()}")
        if self.plan.members == CLASSIC:
            return ClassicMembership(self.clients, GROUP, name, LEDGER, len(self.ledger), chance)
        return ConsumerMembership(self.clients, GROUP, name, LEDGER, chance)

    async def _copy_owned(
        self,
        session: TransactionSession,
        membership: Membership,
        client: Client,
        leaders: Leaders,
        positions: dict[TopicPartition, int],
    ) -> bool:
        """Copy what is there of all that it owns in one transaction; False if the program ends in it."""
        sources: list[tuple[TopicPartition, int]] = []
        reached: dict[TopicPartition, int] = {}
        for where, offset in list(positions.items()):
            found, after = await self._read(client, leaders, where, offset)
            sources += [(where, at) for at, _, _ in found]
            if after > offset:
                reached[where] = after
        if not reached:
            return True
        kind, member, transaction = self._random.random(), membership.identity, session.begin()
        try:
            if sources:
                target = self._random.choice(self.copied)
                await session.write(transaction, [Lane(target, [len(sources)], sources)])
            if kind < STANDSTILL_SHARE:
                await self._stand_still(session, membership)
            await session.send_offsets(transaction, GROUP, reached, member)
        except Outdated:
            self.clients.history.counts["offsets of outdated members"] += 1
            membership.is_member = membership.is_member and self.plan.members == CONSUMER
            positions.clear()
            await session.end(transaction, committed=False)
            return True
        if kind > 1 - SILENT_SHARE and not self._stopped:
            return False
        if kind > 1 - SILENT_SHARE - STANDSTILL_SHARE:
            await self._stand_still(session, membership)
        committed = self._random.random() >= ABORT_SHARE
        await session.end(transaction, committed=committed)
        if committed:
            positions.update(reached)
            for where, offset in reached.items():
                self._note_copied(where, offset)
        else:
            positions.clear()
        return True

    async def _stand_still(self, session: TransactionSession, membership: Membership) -> None:
        """For about as long as the group, or the coordinator of its transaction, waits for the program."""
        if self._stopped:
            return
        membership.stands_still = True
        await asyncio.sleep(self._random.choice((SESSION_MS, session.timeout_ms)) / 1000 * self._random.uniform(0.5, 2))
        membership.stands_still = False

    def _note_copied(self, where: TopicPartition, offset: int) -> None:
        self._copied_to[where] = max(offset, self._copied_to.get(where, 0))

    def _all_is_copied(self) -> bool:
        if not self._ledger_is_final:
            return False
        return all(self._copied_to.get(where, 0) >= self._end(where) for where in self.ledger)

    async def _read(
        self, client: Client, leaders: Leaders, where: TopicPartition, offset: int
    ) -> tuple[list[CommittedRecord], int]:
        leader = leaders.leader(where)
        if leader is None:
            leaders.refresh()
            return [], offset
        row = await _row(client, leader, where, fetch_committed({where: (offset, leaders.epoch(where))}))
        if row is not None and row.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
            by = self.clients.life(leader)
            return [], row.log_start_offset if is_deleted(self.clients.history, where, offset, row, by) else offset
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
        if self.plan.unclean:
            self.stage = "something hangs"
            chance = random.Random(f"{self._seed} hanging")
            for where in self.ledger:
                await HangingEnder(self.clients, "ender", chance).end(where)
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
        at_work = set() if self._ledger_is_final else {name for name in self._alive if name.startswith(COPIER)}
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

    def _state_is_doubted(self) -> bool:
        images = (machine.participant.view.image for machine in self.clients.machines if machine.participant)
        topics = (image.topics.get(TRANSACTIONS_TOPIC) for image in images)
        return any(state.lost is not None for topic in topics if topic is not None for state in topic.partitions)

    def look(self, machine: Machine, *, followers: bool) -> None:
        """Time and again; at followers as well, unless they may begin anew."""
        for where in self.partitions():
            partition = machine.replica(where)
            stable = _stable(partition)
            if partition is not None and stable is not None and (partition.leading or followers):
                who = self.holder(machine, where, partition)
                start = partition.log.start_offset
                self.judge.stable(where, partition.epoch, who, stable, partition.high_watermark, start)

    def holder(self, machine: Machine, where: TopicPartition, partition: Partition) -> str:
        """Whose watermark and last stable offset do not fall. A replica of a compacted topic cuts its log below them,
        to copy records again of whose transaction it can miss the marker."""
        cuts = partition.log.truncations if self.plan.compacted and where in self.ledger else 0
        return f"{machine.life} after {cuts} cuts" if cuts else machine.life

    def unsettled(self) -> str:
        if self.stage:
            return self.stage
        for where in [*self._readers, PASSING]:
            for machine in self.clients.machines:
                partition = machine.replica(where)
                if partition is not None and (stable := _stable(partition)) != partition.high_watermark:
                    return f"{where}: the last stable offset of {machine.life} is {stable}"
        for where, reader in self._readers.items():
            if reader.offset < self._end(where):
                return f"{reader.name} is at {reader.offset} of {self._end(where)}"
        return ""

    def compare(self, contents: dict[TopicPartition, tuple[int, bytes]]) -> None:
        """With the final logs, and where they begin."""
        if self.plan.compacted:
            self.judge.judge_compacted(self._views, key_of)
            return
        if self.plan.unclean:  # what was told is lost or not: what was read was judged when it was
            return
        starts = {where: start for where, (start, _) in contents.items()}
        logs = {
            where: [entry for entry in entries(data) if entry.offset >= start]
            for where, (start, data) in contents.items()
        }
        copied = self.ledger if self.copied else ()
        self.judge.judge(logs, self.offsets, copied=copied, copies=self.copied, starts=starts)


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
