"""A simulated member of a share group (KIP-932), as Kafka's clients are: it heartbeats, has a share session with each
broker that leads something, acquires records there, and says of each sooner or later what became of it.

What it does with records is drawn: it accepts them, releases, rejects, renews and accepts later, holds them for about
as long as they are locked, or says nothing. Acknowledgements go to whoever leads the partition by then, with a fetch or
by themselves; one that was not answered, or may be tried again, is sent again. A `Stranger` acknowledges what others
have acquired, and never acquires anything.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.errors import CorruptBatch, ErrorCode
from headrace.queues.messages import AcknowledgeType
from headrace.records import kernel
from headrace.records.batch import batches, check
from headrace.simulator.connection import VERSIONS, Client, Clients
from headrace.simulator.history import Violation
from headrace.simulator.leaders import Leaders
from headrace.simulator.machine import Machine
from headrace.simulator.scenario import SharePlan
from headrace.simulator.share_history import Claim, MemberLife, ShareHistory
from headrace.simulator.transaction_members import JOINING, Asking
from headrace.simulator.transaction_session import NOT_MEMBER, look_at
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

LEAVING: Final = -1
OPENING: Final = 0
CLOSING: Final = -1
WAIT_MS: Final = 150
MAX_BYTES: Final = 1 << 16
PAUSE_SECONDS: Final = 0.04
TRIES_MAX: Final = 8
LATE: Final = 0.8
"""Of a lock: from then on it may be over when the acknowledgement arrives."""
RECORD_LIMIT: Final = 1
VERSIONS_OF_SHARES: Final = VERSIONS | {api.SHARE_FETCH: 2, api.SHARE_ACKNOWLEDGE: 2}
FORGERIES: Final = (AcknowledgeType.ACCEPT, AcknowledgeType.RELEASE, AcknowledgeType.REJECT)
RECENT: Final = 10
ENDS: Final = (AcknowledgeType.ACCEPT, AcknowledgeType.RELEASE, AcknowledgeType.REJECT, AcknowledgeType.RENEW, None)
"""What it may say of a record; None: nothing, until the lock is over. `SharePlan.shares` says how often."""

Types = dict[int, int]
"""What is said of which offset."""


@dataclass(slots=True, eq=False)
class Held:
    """A record that the member was given, until it needs to say nothing more of it."""

    asked_at: float
    type: int
    due_at: float
    sent: bool = False
    tries: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """With one broker."""

    epoch: int = OPENING
    partitions: set[TopicPartition] = field(default_factory=set)


class ShareMembership(Asking):
    """`assigned`: the partitions that it shares with others; `topic_id` once it is known."""

    counted_as = "joins of share groups"

    def __init__(self, clients: Clients, group: str, member_id: str, topic: str, chance: random.Random) -> None:
        super().__init__(clients, group, member_id, topic, chance)
        self.assigned: frozenset[int] = frozenset()
        self.topic_id = b""
        self._member_id = member_id
        self._epoch = JOINING
        self._missed = False

    async def join(self) -> None:
        self._epoch = JOINING
        while not self._is_over and not self.is_member:
            answer = await self._tell(whole=True)
            if answer is not None and not answer.error_code and not self._is_over:
                self._go_on()
            else:
                await self._pause()

    @property
    def _is_over(self) -> bool:
        return self._gone or self._epoch == LEAVING

    async def leave(self) -> None:
        self.is_member = False
        self._epoch = LEAVING
        await self._tell(whole=False)

    async def _tell(self, *, whole: bool) -> Any:
        message = Message(
            group_id=self._group,
            member_id=self._member_id,
            member_epoch=self._epoch,
            rack_id=None,
            subscribed_topic_names=[self._topic] if whole else None,
        )
        answer = await self._ask(api.SHARE_GROUP_HEARTBEAT, message)
        if answer is not None and not answer.error_code and not self._is_over:
            self._epoch = answer.member_epoch
            if answer.assignment is not None:
                given = {bytes(row.topic_id): frozenset(row.partitions) for row in answer.assignment.topic_partitions}
                self.topic_id = next(iter(given), self.topic_id)
                self.assigned = frozenset().union(*given.values())
        return answer

    async def _heartbeat(self) -> None:
        answer = await self._tell(whole=self._missed)
        self._missed = answer is None or bool(answer.error_code)
        if answer is not None and answer.error_code in NOT_MEMBER and self.is_member:
            self.is_member = False
            await self.join()


class ShareMember:
    """One life of it. `is_diligent`: it accepts everything at once."""

    def __init__(
        self,
        clients: Clients,
        judge: ShareHistory,
        plan: SharePlan,
        group: str,
        topic: str,
        member_id: str,
        chance: random.Random,
    ) -> None:
        self.is_diligent = False
        self.judged: MemberLife = judge.member(member_id)
        self._clients = clients
        self._judge = judge
        self._plan = plan
        self._group = group
        self._topic = topic
        self._random = chance
        self._client = Client(clients, member_id, VERSIONS_OF_SHARES, self._connection_ended)
        self._leaders = Leaders(clients, self._client, (topic,), chance)
        self._membership = ShareMembership(clients, group, member_id, topic, chance)
        self._sessions: dict[int, Session] = {}
        self._held: dict[tuple[TopicPartition, int], Held] = {}
        self._gone = False
        self._tasks = [asyncio.get_running_loop().create_task(self._membership.join())]
        for machine in clients.machines:
            self._tasks.append(asyncio.get_running_loop().create_task(self._serve(machine.id)))
        for task in self._tasks:
            task.add_done_callback(look_at)

    @property
    def topic_id(self) -> bytes:
        """Empty until it is known."""
        return self._membership.topic_id

    # The end of it.

    def die(self) -> None:
        """Without a word."""
        self._gone = True
        self.judged.has_ended = True
        self._membership.hang_up()
        self._client.hang_up()

    async def close(self) -> None:
        """As a client does that is closed: what is done with is said, sessions end, and it leaves."""
        self._gone = True
        for task in self._tasks[1:]:
            if not task.done():
                await asyncio.wait([task])
        self.judged.has_ended = True
        for broker, session in list(self._sessions.items()):
            if session.epoch != OPENING:
                await self._close_session(broker)
        await self._membership.leave()
        self._membership.hang_up()
        self._client.hang_up()

    async def _close_session(self, broker: int) -> None:
        claims = self._claims(broker)
        if _renew(claims) or self._random.random() < 0.5:
            answer = await self._ask(broker, api.SHARE_ACKNOWLEDGE, self._acknowledgement(CLOSING, claims), claims)
        else:
            answer = await self._ask(broker, api.SHARE_FETCH, self._fetch(CLOSING, claims, ()), claims)
        if answer is not None and not answer.error_code and len(self._sessions) == 1:
            self.judged.closed_at = self._clients.clock.now()

    def _connection_ended(self, broker: int, life: str) -> None:
        """Where its broker died nobody has given up what it holds."""
        self._sessions.pop(broker, None)
        machine = self._clients.machines[broker - 1]
        if machine.process is not None and machine.life == life:
            self.judged.has_ended = True

    # Requests.

    async def _serve(self, broker: int) -> None:
        while not self._gone:
            await self._pause()
            session = self._sessions.setdefault(broker, Session())
            places = {each for each in self._assigned() if self._leaders.leader(each) == broker}
            is_due = bool(self._due(broker))
            if self._gone or not self._membership.topic_id or not (places or is_due or session.partitions):
                continue
            claims = self._claims(broker) if session.epoch != OPENING else []
            if claims and (_renew(claims) or self._random.random() < 0.4):
                await self._acknowledge(broker, session, claims)
            else:
                await self._go_on(broker, session, places, claims)

    def _assigned(self) -> list[TopicPartition]:
        return [TopicPartition(self._topic, index) for index in sorted(self._membership.assigned)]

    async def _go_on(self, broker: int, session: Session, places: set[TopicPartition], claims: list[Claim]) -> None:
        added, forgotten = places - session.partitions, session.partitions - places
        message = self._fetch(session.epoch, claims, added, forgotten)
        answer = await self._ask(broker, api.SHARE_FETCH, message, claims)
        if answer is None or answer.error_code:
            self._refused(broker)
            return
        session.epoch += 1
        session.partitions = places
        if any(row.error_code for topic in answer.responses for row in topic.partitions):
            self._leaders.refresh()

    async def _acknowledge(self, broker: int, session: Session, claims: list[Claim]) -> None:
        answer = await self._ask(broker, api.SHARE_ACKNOWLEDGE, self._acknowledgement(session.epoch, claims), claims)
        if answer is None or answer.error_code:
            self._refused(broker)
        else:
            session.epoch += 1

    def _refused(self, broker: int) -> None:
        """Its next request begins a session."""
        self._sessions.pop(broker, None)
        self._leaders.refresh()

    async def _ask(self, broker: int, api_key: int, message: Message, claims: list[Claim]) -> Any:
        asked_at = self._clients.clock.now()
        self.judged.brokers.add(self._clients.life(broker))
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def decided(answer: Message, machine: Machine) -> None:
            self._decided(answer, machine, api_key, claims, asked_at)

        self._client.call(broker, api_key, message, done.set_result, decided=decided)
        answer = await done
        self._settle(answer, api_key, claims)
        if answer is not None and not answer.error_code and api_key == api.SHARE_FETCH:
            self._take(answer, asked_at)
        return answer

    def _fetch(
        self,
        epoch: int,
        claims: Iterable[Claim],
        added: Iterable[TopicPartition],
        forgotten: Iterable[TopicPartition] = (),
    ) -> Message:
        rows: dict[int, list[Message]] = {each.partition: [] for each in sorted(added)}
        rows |= _rows(claims)
        chance = self._random
        fetches = epoch != CLOSING
        return Message(
            group_id=self._group,
            member_id=self.judged.member_id,
            share_session_epoch=epoch,
            max_wait_ms=WAIT_MS if fetches else 0,
            min_bytes=1 if fetches else 0,
            max_bytes=MAX_BYTES if fetches else 0,
            max_records=chance.choice((1, 3, 10)) if fetches else 0,
            batch_size=10,
            share_acquire_mode=RECORD_LIMIT if chance.random() < self._plan.record_limits else 0,
            is_renew_ack=False,
            topics=self._topics(rows),
            forgotten_topics_data=[
                Message(topic_id=self._membership.topic_id, partitions=[each.partition]) for each in sorted(forgotten)
            ],
        )

    def _acknowledgement(self, epoch: int, claims: list[Claim]) -> Message:
        return Message(
            group_id=self._group,
            member_id=self.judged.member_id,
            share_session_epoch=epoch,
            is_renew_ack=_renew(claims),
            topics=self._topics(_rows(claims)),
        )

    def _topics(self, rows: dict[int, list[Message]]) -> list[Message]:
        partitions = [
            Message(partition_index=index, acknowledgement_batches=batches) for index, batches in rows.items()
        ]
        return [Message(topic_id=self._membership.topic_id, partitions=partitions)] if partitions else []

    async def _pause(self, seconds: float = PAUSE_SECONDS) -> None:
        await asyncio.sleep(seconds * self._random.uniform(0.2, 1.8))

    # What it was given.

    def _decided(self, answer: Message, machine: Machine, api_key: int, claims: list[Claim], asked_at: float) -> None:
        """A broker answers; it is bound by that from now on."""
        if answer.error_code:
            return
        rows = _answered(answer)
        is_fetch = api_key == api.SHARE_FETCH
        for claim in claims:
            row = rows.get(claim.where.partition)
            if row is not None:
                self._judge.told(claim, row.acknowledge_error_code if is_fetch else row.error_code, machine.life)
        for index, row in rows.items() if is_fetch else ():
            where = TopicPartition(self._topic, index)
            for acquired in row.acquired_records:
                for offset in range(acquired.first_offset, acquired.last_offset + 1):
                    count = acquired.delivery_count
                    self._judge.delivered(where, offset, count, self.judged, asked_at, machine.life)

    def _take(self, answer: Message, asked_at: float) -> None:
        history = self._clients.history
        for index, row in _answered(answer).items():
            where = TopicPartition(self._topic, index)
            given = [
                offset
                for acquired in row.acquired_records
                for offset in range(acquired.first_offset, acquired.last_offset + 1)
            ]
            if not given:
                continue
            contents = self._contents(row)
            for offset in given:
                content = contents.get(offset)
                if content is None:  # compaction took it, or the batch is damaged
                    self._hold(where, [offset], asked_at, AcknowledgeType.GAP if contents else None)
                else:
                    history.consumed(where, offset, content, "a share fetch")
            self._plan_for(where, [offset for offset in given if offset in contents], asked_at)

    def _contents(self, row: Message) -> dict[int, bytes]:
        """Of records in whole batches. Nothing else may be acquired than what is in one of them."""
        found: dict[int, bytes] = {}
        between: set[int] = set()
        for header, view in batches(memoryview(row.records or b"")):
            between.update(range(header.base_offset, header.next_offset))
            try:
                check(view)
            except CorruptBatch:
                self._clients.history.counts["rejected"] += 1
                return {}
            found |= {record.offset: record.value or b"" for record in kernel.records(view)}
        stray = [each for each in row.acquired_records if not {each.first_offset, each.last_offset} <= between]
        if stray:
            raise Violation(f"{self._topic}-{row.partition_index}: {stray} were acquired, and none of their batches")
        return found

    def _plan_for(self, where: TopicPartition, offsets: list[int], asked_at: float) -> None:
        while offsets:
            count = self._random.randint(1, len(offsets))
            some, offsets = offsets[:count], offsets[count:]
            self._hold(where, some, asked_at, AcknowledgeType.ACCEPT if self.is_diligent else self._draw_type())

    def _draw_type(self) -> int | None:
        return self._random.choices(ENDS, self._plan.shares)[0]

    def _hold(self, where: TopicPartition, offsets: list[int], asked_at: float, type: int | None) -> None:
        """None: it never says anything of them."""
        if type is None:
            for offset in offsets:
                self._held.pop((where, offset), None)
            return
        lock = self._plan.lock_ms / 1000
        draw = self._random
        wait = draw.choice(
            (0.0, 0.0, draw.uniform(0, 0.1), draw.uniform(0.1, 0.9) * lock, draw.uniform(0.9, 1.3) * lock)
        )
        due_at = self._clients.clock.now() + (0.0 if self.is_diligent else wait)
        for offset in offsets:
            self._held[where, offset] = Held(asked_at, type, due_at)

    # What it says of it.

    def _due(self, broker: int) -> dict[TopicPartition, Types]:
        """Of partitions that this broker leads. What may be another's by now goes by itself: one record that is refused
        refuses all of its partition."""
        now, lock = self._clients.clock.now(), self._plan.lock_ms / 1000
        due: dict[TopicPartition, Types] = {}
        late: dict[TopicPartition, Types] = {}
        for (where, offset), held in self._held.items():
            if held.sent or (held.due_at > now and not self.is_diligent) or self._leaders.leader(where) != broker:
                continue
            is_late = now - held.asked_at > LATE * lock
            (late if is_late else due).setdefault(where, {})[offset] = held.type
        return late | due

    def _claims(self, broker: int) -> list[Claim]:
        """What is said now."""
        return [self._claim(where, types) for where, types in self._due(broker).items()]

    def _claim(self, where: TopicPartition, types: Types) -> Claim:
        for offset in types:
            self._held[where, offset].sent = True
            self._held[where, offset].tries += 1
        return self._judge.asks(where, self.judged, dict(sorted(types.items())))

    def _settle(self, answer: Any, api_key: int, claims: list[Claim]) -> None:
        """What was taken or refused needs nothing more, a renewed one an end; the rest is sent again."""
        rows = {} if answer is None or answer.error_code else _answered(answer)
        now = self._clients.clock.now()
        for claim in claims:
            row = rows.get(claim.where.partition)
            code = None
            if row is not None:
                code = row.acknowledge_error_code if api_key == api.SHARE_FETCH else row.error_code
            for offset, type in claim.types.items():
                held = self._held.get((claim.where, offset))
                if held is None or not held.sent:
                    continue
                if code == ErrorCode.NONE and type == AcknowledgeType.RENEW:
                    self._hold(claim.where, [offset], claim.asked_at, AcknowledgeType.ACCEPT)
                elif code in (ErrorCode.NONE, ErrorCode.INVALID_RECORD_STATE) or held.tries >= TRIES_MAX:
                    del self._held[claim.where, offset]
                else:
                    held.sent, held.due_at = False, now + PAUSE_SECONDS
            if code not in (None, ErrorCode.NONE):
                self._leaders.refresh()


class Stranger:
    """Has a session without partitions, and says something of what members have."""

    def __init__(self, clients: Clients, judge: ShareHistory, group: str, topic: str, chance: random.Random) -> None:
        self._clients = clients
        self._judge = judge
        self._group = group
        self._random = chance
        self._client = Client(clients, "stranger", VERSIONS_OF_SHARES)
        self._leaders = Leaders(clients, self._client, (topic,), chance)

    async def forge(self, where: TopicPartition, topic_id: bytes) -> None:
        """Of a record that was delivered not long ago."""
        given, leader = self._judge.given(where)[-RECENT:], self._leaders.leader(where)
        if not given or leader is None:
            self._leaders.refresh()
            return
        member_id = f"stranger-{self._random.randrange(1 << 30)}"
        begins = Message(
            group_id=self._group,
            member_id=member_id,
            share_session_epoch=OPENING,
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=0,
            max_records=0,
            batch_size=0,
            share_acquire_mode=0,
            is_renew_ack=False,
            topics=[],
            forgotten_topics_data=[],
        )
        answer = await self._ask(leader, api.SHARE_FETCH, begins)
        if answer is None or answer.error_code:
            self._leaders.refresh()
            return
        types = {self._random.choice(given): int(self._random.choice(FORGERIES))}
        claim = self._judge.asks(where, self._judge.member(member_id), types)
        self._clients.history.counts["forged acknowledgements"] += 1
        partition = Message(partition_index=where.partition, acknowledgement_batches=_rows([claim])[where.partition])
        says = Message(
            group_id=self._group,
            member_id=member_id,
            share_session_epoch=CLOSING,
            is_renew_ack=False,
            topics=[Message(topic_id=topic_id, partitions=[partition])],
        )
        await self._ask(leader, api.SHARE_ACKNOWLEDGE, says, claim)

    async def _ask(self, broker: int, api_key: int, message: Message, claim: Claim | None = None) -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def decided(answer: Message, machine: Machine) -> None:
            if claim is not None and not answer.error_code:
                for row in _answered(answer).values():
                    self._judge.told(claim, row.error_code, machine.life)

        self._client.call(broker, api_key, message, done.set_result, decided=decided)
        return await done


def _answered(answer: Any) -> dict[int, Any]:
    """By partition: there is one topic."""
    return {row.partition_index: row for topic in answer.responses for row in topic.partitions}


def _renew(claims: Iterable[Claim]) -> bool:
    return any(AcknowledgeType.RENEW in claim.types.values() for claim in claims)


def _rows(claims: Iterable[Claim]) -> dict[int, list[Message]]:
    """Neighbours as one batch, with one type for all or one for each."""
    rows: dict[int, list[Message]] = {}
    for claim in claims:
        runs: list[tuple[int, list[int]]] = []
        for offset, type in sorted(claim.types.items()):
            if runs and runs[-1][0] + len(runs[-1][1]) == offset:
                runs[-1][1].append(type)
            else:
                runs.append((offset, [type]))
        rows[claim.where.partition] = [
            Message(
                first_offset=first,
                last_offset=first + len(types) - 1,
                acknowledge_types=types[:1] if len(set(types)) == 1 else types,
            )
            for first, types in runs
        ]
    return rows
