"""The broker that looks after a group, as one member asks it: again where an answer says nothing about the member.

Each member has a connection of its own to it. A join is answered only when all members have joined; whatever stood
behind it on the same connection would wait as long, and two members of one process would wait for each other.
JoinGroup, SyncGroup, Heartbeat, LeaveGroup, OffsetFetch and OffsetCommit are made here from who asks (`Identity`).
"""

from __future__ import annotations

import itertools
import logging
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from headrace.client.connection.broker_connection import OnAnswer
from headrace.client.connection.connections import COORDINATOR_MOVED, ConnectionPool
from headrace.client.connection.reactor import Backoff, Timer
from headrace.client.consumer.assignors import Assignor
from headrace.client.consumer.group_protocol import (
    NO_GENERATION,
    PROTOCOL_TYPE,
    TopicPartition,
    by_topic,
    encode_subscription,
)
from headrace.client.errors import BrokerUnreachable, EngineClosed, NoBroker, Refusal
from headrace.errors import ErrorCode, HeadraceError
from headrace.wire import api as apis
from headrace.wire.message import Message

ASK_TIMEOUT_S: Final = 10.0
CHECK_S: Final = 5.0

PASSING: Final = COORDINATOR_MOVED | frozenset(
    {
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.UNSTABLE_OFFSET_COMMIT,
    }
)

Judge = Callable[[Message], int]
"""The error code of an answer."""

log = logging.getLogger(__name__)
_numbers = itertools.count(1)


class Coordinator:
    """`on_missing` hears, each time, that no broker has ever answered; it is tried again all the same."""

    def __init__(
        self, pool: ConnectionPool, group: str, on_missing: Callable[[HeadraceError], None] = lambda _: None
    ) -> None:
        self.group = group
        self._pool = pool
        self._on_missing = on_missing
        self._hung_up = 0
        self._channel = f"member {next(_numbers)} of {group}"
        self._check_channel = f"{self._channel}, checked"
        self._timers: set[Timer] = set()
        self._closed = False

    def ask(
        self,
        api_key: int,
        body: Message,
        judge: Judge,
        on_answer: OnAnswer,
        *,
        timeout_s: float = ASK_TIMEOUT_S,
        beat: Message | None = None,
    ) -> None:
        """One request, once; an answer that refuses comes as a Refusal. One that may take minutes has a heartbeat with
        it, which is asked beside it now and then: whether the coordinator is still there, and still is one.
        """
        is_open, hung_up = True, self._hung_up

        def answered(answer: Message | HeadraceError) -> None:
            nonlocal is_open
            if not is_open:
                return
            is_open = False
            if isinstance(answer, EngineClosed) and hung_up != self._hung_up and not self._closed:
                # Given up together with another question of this member; what is asked next finds the coordinator.
                answer = BrokerUnreachable(f"the coordinator of group {self.group!r} was given up")
            if isinstance(answer, NoBroker):
                self._on_missing(answer)
            if isinstance(answer, Message) and (code := judge(answer)) != ErrorCode.NONE:
                on_answer(Refusal(code, f"group {self.group!r}"))
            else:
                on_answer(answer)

        def check() -> None:
            if is_open and beat is not None:
                self._pool.ask_coordinator(
                    self.group, apis.HEARTBEAT, beat, checked, timeout_s=CHECK_S, channel=self._check_channel
                )

        def checked(answer: Message | HeadraceError) -> None:
            moved = isinstance(answer, Message) and answer.error_code in COORDINATOR_MOVED
            if is_open and (moved or isinstance(answer, BrokerUnreachable)):
                answered(BrokerUnreachable(f"the coordinator of group {self.group!r} is gone or elsewhere"))
                self.hang_up()
            elif is_open:
                self.later(CHECK_S, check)

        self._pool.ask_coordinator(self.group, api_key, body, answered, timeout_s=timeout_s, channel=self._channel)
        if beat is not None:
            self.later(CHECK_S, check)

    def persist(
        self, api_key: int, body: Callable[[], Message], judge: Judge, on_done: OnAnswer, *, within_s: float
    ) -> None:
        """Ask until the answer says something about the member, or time is up; each time what is to be asked then."""
        reactor = self._pool.reactor
        deadline = reactor.now() + within_s
        backoff = Backoff()

        def answered(answer: Message | HeadraceError) -> None:
            last = self._closed or reactor.now() + backoff.next_s > deadline
            if isinstance(answer, Message) or last or not passes(answer):
                on_done(answer)
                return
            log.debug("group %r: %s; asking again in %g s", self.group, answer, backoff.next_s)
            self.later(backoff.take(), attempt)

        def attempt() -> None:
            timeout_s = min(ASK_TIMEOUT_S, max(0.0, deadline - reactor.now()))
            self.ask(api_key, body(), judge, answered, timeout_s=timeout_s)

        attempt()

    def later(self, pause_s: float, fn: Callable[[], None]) -> None:
        def run() -> None:
            self._timers.discard(timer)
            fn()

        timer = self._pool.reactor.call_at(self._pool.reactor.now() + pause_s, run)
        self._timers.add(timer)

    def hang_up(self) -> None:
        """Whoever waits for an answer hears that none will come; the next question has a new connection."""
        self._hung_up += 1
        for channel in (self._channel, self._check_channel):
            self._pool.close_channel(channel)

    def close(self) -> None:
        """What was to be done later is not done."""
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.hang_up()


def passes(error: HeadraceError) -> bool:
    """Whether the same question may get a better answer a moment later."""
    return isinstance(error, BrokerUnreachable | NoBroker) or error.kafka_code in PASSING


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks: a member of a generation, or nobody in particular."""

    member_id: str = ""
    generation: int = NO_GENERATION
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class Timeouts:
    session_ms: int
    rebalance_ms: int


def join_request(
    group: str,
    who: Identity,
    topics: Iterable[str],
    assignor: Assignor,
    held: Iterable[TopicPartition],
    rack: str,
    timeouts: Timeouts,
) -> Message:
    # Clients that do not know version 2 of the subscription look for the generation in the user data.
    user_data = struct.pack(">i", who.generation) if assignor.step_by_step else None
    metadata = encode_subscription(topics, owned=held, generation=who.generation, rack=rack, user_data=user_data)
    return Message(
        group_id=group,
        session_timeout_ms=timeouts.session_ms,
        rebalance_timeout_ms=timeouts.rebalance_ms,
        member_id=who.member_id,
        group_instance_id=who.instance_id,
        protocol_type=PROTOCOL_TYPE,
        protocols=[Message(name=name, metadata=metadata) for name in assignor.protocols],
    )


def sync_request(group: str, who: Identity, protocol: str, assignments: list[Message]) -> Message:
    return Message(
        group_id=group,
        generation_id=who.generation,
        member_id=who.member_id,
        group_instance_id=who.instance_id,
        protocol_type=PROTOCOL_TYPE,
        protocol_name=protocol,
        assignments=assignments,
    )


def heartbeat_request(group: str, who: Identity) -> Message:
    return Message(
        group_id=group, generation_id=who.generation, member_id=who.member_id, group_instance_id=who.instance_id
    )


def leave_request(group: str, member_id: str, reason: str) -> Message:
    return Message(group_id=group, members=[Message(member_id=member_id, reason=reason)])


def offset_fetch_request(group: str, places: Iterable[TopicPartition] | None) -> Message:
    """What is committed of these partitions, or of all; not while a transaction may still change it."""
    topics = None
    if places is not None:
        topics = [Message(name=topic, partition_indexes=list(numbers)) for topic, numbers in by_topic(places).items()]
    return Message(groups=[Message(group_id=group, topics=topics)], require_stable=True)


def offset_commit_request(
    group: str, who: Identity, offsets: Mapping[TopicPartition, int], metadata: str = ""
) -> Message:
    topics = [
        Message(
            name=topic,
            partitions=[
                Message(partition_index=number, committed_offset=offsets[topic, number], committed_metadata=metadata)
                for number in numbers
            ],
        )
        for topic, numbers in by_topic(offsets).items()
    ]
    return Message(
        group_id=group,
        generation_id_or_member_epoch=who.generation,
        member_id=who.member_id,
        group_instance_id=who.instance_id,
        topics=topics,
    )
