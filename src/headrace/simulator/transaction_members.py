"""Membership of simulated programs that share the partitions of a topic as a group and commit their offsets in
transactions (KIP-447): by the classic protocol, or by the consumer protocol (KIP-848).

A program asks here what it may read, and in which generation, or member epoch, it does. Heartbeats go on beside what it
does, unless the program stands still. It gives up a partition only between two transactions.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any, Final, Protocol

from headrace.client.consumer.group_protocol import (
    assign_ranges,
    decode_assignment,
    encode_assignment,
    encode_subscription,
)
from headrace.errors import ErrorCode
from headrace.simulator.connection import VERSIONS, Client, Clients
from headrace.simulator.group_member import (
    HEARTBEAT_SECONDS,
    PROTOCOL,
    REBALANCE_MS,
    REBALANCE_PATIENCE_SECONDS,
    SESSION_MS,
)
from headrace.simulator.transaction_session import NOT_MEMBER, MemberIdentity, look_at
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

PAUSE_SECONDS: Final = 0.05
JOINING: Final = 0
UNCHANGED: Final = -1
VERSIONS_OF_MEMBERS: Final = VERSIONS | {api.CONSUMER_GROUP_HEARTBEAT: 1, api.SHARE_GROUP_HEARTBEAT: 1}


class Membership(Protocol):
    is_member: bool
    """Whether it has joined, as far as it knows."""
    stands_still: bool

    @property
    def identity(self) -> MemberIdentity: ...

    async def join(self) -> None: ...

    def take(self) -> frozenset[TopicPartition]:
        """What it may read from now on; asked between two transactions."""
        ...

    def hang_up(self) -> None:
        """The program is gone, without a word."""
        ...


class Asking:
    """Who asks the coordinator of the group."""

    counted_as = "generations of copiers"

    def __init__(self, clients: Clients, group: str, name: str, topic: str, chance: random.Random) -> None:
        self.is_member = self.stands_still = False
        self._clients = clients
        self._group = group
        self._topic = topic
        self._random = chance
        self._client = Client(clients, name, VERSIONS_OF_MEMBERS)
        self._coordinator = -1
        self._gone = False
        self._beating: asyncio.Task[None] | None = None

    def hang_up(self) -> None:
        self._gone, self.is_member = True, False
        self._client.hang_up()

    async def _ask(self, api_key: int, message: Message) -> Any:
        """The answer; None if there is none, then another broker is asked the next time."""
        while self._coordinator < 0:
            broker = self._clients.some_broker(self._random)
            found = await self._call(broker, api.FIND_COORDINATOR, Message(key=self._group, key_type=0))
            if found is not None and not found.error_code:
                self._coordinator = found.node_id
            else:
                await self._pause()
        answer = await self._call(self._coordinator, api_key, message)
        if answer is None or answer.error_code in (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE):
            self._coordinator = -1
        return answer

    async def _call(self, broker: int, api_key: int, message: Message) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._client.call(broker, api_key, message, answer.set_result, patience_seconds=REBALANCE_PATIENCE_SECONDS)
        return await answer

    async def _pause(self, seconds: float = PAUSE_SECONDS) -> None:
        await asyncio.sleep(seconds * self._random.uniform(0.5, 1.5))

    def _go_on(self) -> None:
        self.is_member = True
        self._clients.history.counts[self.counted_as] += 1
        self._beating = asyncio.get_running_loop().create_task(self._beat())
        self._beating.add_done_callback(look_at)

    async def _beat(self) -> None:
        """Until it is a member no more; while the program stands still nothing is heard of it."""
        while self.is_member and self._beating is asyncio.current_task():
            if not self.stands_still:
                await self._heartbeat()
            await self._pause(HEARTBEAT_SECONDS)

    async def _heartbeat(self) -> None:
        raise NotImplementedError


class ClassicMembership(Asking):
    """Each generation has its own assignment."""

    def __init__(
        self, clients: Clients, group: str, name: str, topic: str, partitions: int, chance: random.Random
    ) -> None:
        super().__init__(clients, group, name, topic, chance)
        self._partitions = partitions
        self._member_id = ""
        self._generation = -1
        self._owned: frozenset[TopicPartition] = frozenset()

    @property
    def identity(self) -> MemberIdentity:
        return MemberIdentity(self._member_id, self._generation)

    def take(self) -> frozenset[TopicPartition]:
        return self._owned

    async def join(self) -> None:
        self._owned = frozenset()
        while not self._gone:
            joined = await self._ask(api.JOIN_GROUP, self._join_request())
            if joined is not None and joined.error_code == ErrorCode.MEMBER_ID_REQUIRED:
                self._member_id = joined.member_id
                continue
            synced = None
            if joined is not None and not joined.error_code:
                self._member_id, self._generation = joined.member_id, joined.generation_id
                leads = joined.leader == joined.member_id
                members = [member.member_id for member in joined.members] if leads else []
                synced = await self._ask(api.SYNC_GROUP, self._sync_request(members))
            if synced is not None and not synced.error_code:
                self._joined(bytes(synced.assignment))
                return
            if ErrorCode.UNKNOWN_MEMBER_ID in (getattr(joined, "error_code", 0), getattr(synced, "error_code", 0)):
                self._member_id = ""
            await self._pause()

    def _join_request(self) -> Message:
        return Message(
            group_id=self._group,
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
            member_id=self._member_id,
            group_instance_id=None,
            protocol_type="consumer",
            protocols=[Message(name=PROTOCOL, metadata=encode_subscription((self._topic,)))],
        )

    def _sync_request(self, members: Iterable[str]) -> Message:
        given = assign_ranges(dict.fromkeys(members, (self._topic,)), {self._topic: self._partitions})
        return Message(
            group_id=self._group,
            generation_id=self._generation,
            member_id=self._member_id,
            group_instance_id=None,
            assignments=[Message(member_id=one, assignment=encode_assignment(each)) for one, each in given.items()],
        )

    def _joined(self, assignment: bytes) -> None:
        given = decode_assignment(assignment) if assignment else {}
        self._owned = frozenset(TopicPartition(topic, index) for topic, indexes in given.items() for index in indexes)
        history = self._clients.history
        for where in sorted(self._owned):
            history.assigned(self._group, self._generation, where, self._member_id)
        history.note(f"{self._client.name} has {sorted(map(str, self._owned))} in generation {self._generation}")
        self._go_on()

    async def _heartbeat(self) -> None:
        generation = self._generation
        message = Message(
            group_id=self._group, generation_id=generation, member_id=self._member_id, group_instance_id=None
        )
        answer = await self._ask(api.HEARTBEAT, message)
        if answer is None or generation != self._generation:
            return
        if answer.error_code == ErrorCode.UNKNOWN_MEMBER_ID:
            self._member_id = ""
        if answer.error_code in NOT_MEMBER:
            self.is_member = False


class ConsumerMembership(Asking):
    """The broker makes the assignment, and a member goes there step by step."""

    def __init__(self, clients: Clients, group: str, name: str, topic: str, chance: random.Random) -> None:
        super().__init__(clients, group, name, topic, chance)
        self._member_id = chance.randbytes(16).hex()
        self._epoch = JOINING
        self._topic_id = b""
        self._missed = False
        """Whether an answer is missing that may have told what to have."""
        self._target: frozenset[int] = frozenset()
        self._owned: frozenset[int] = frozenset()

    @property
    def identity(self) -> MemberIdentity:
        return MemberIdentity(self._member_id, self._epoch)

    def take(self) -> frozenset[TopicPartition]:
        self._owned = self._target
        return frozenset(TopicPartition(self._topic, index) for index in self._owned)

    async def join(self) -> None:
        self._owned = self._target = frozenset()
        self._epoch = JOINING
        while not self._gone and not self.is_member:
            answer = await self._tell(whole=True)
            if answer is not None and not answer.error_code:
                self._go_on()
            else:
                await self._pause()

    async def _tell(self, *, whole: bool) -> Any:
        """A heartbeat; `whole`: with everything, as after one that was not answered."""
        rows = [Message(topic_id=self._topic_id, partitions=sorted(self._owned))] if self._owned else []
        message = Message(
            group_id=self._group,
            member_id=self._member_id,
            member_epoch=self._epoch,
            instance_id=None,
            rack_id=None,
            rebalance_timeout_ms=REBALANCE_MS if whole else UNCHANGED,
            subscribed_topic_names=[self._topic] if whole else None,
            subscribed_topic_regex=None,
            server_assignor=None,
            topic_partitions=rows,
        )
        answer = await self._ask(api.CONSUMER_GROUP_HEARTBEAT, message)
        if answer is not None and not answer.error_code and not self._gone:
            self._epoch = answer.member_epoch
            if answer.assignment is not None:
                given = {bytes(row.topic_id): frozenset(row.partitions) for row in answer.assignment.topic_partitions}
                self._topic_id = next(iter(given), self._topic_id)
                self._target = frozenset().union(*given.values())
                self._clients.history.note(f"{self._client.name} is to have {sorted(self._target)} in {self._epoch}")
        return answer

    async def _heartbeat(self) -> None:
        answer = await self._tell(whole=self._missed)
        self._missed = answer is None or bool(answer.error_code)
        if answer is not None and answer.error_code in NOT_MEMBER:
            self.is_member = False
