"""A member of a share group: joins, is told its partitions, stays by heartbeats, leaves.

    OUT -> JOINING -> STABLE -> LEAVING -> ENDED
      \\ fenced, or unknown to the coordinator: JOINING again, with the same id

The coordinator assigns (KIP-932), and nothing has to be given up before another member gets it. Partitions that are
assigned no more are not fetched; what was acquired of them stays with this member until it is acknowledged or its lock
runs out. A member whose application does not poll for `max_poll_interval_ms` leaves, so that others get its share, and
joins again at the next poll.

Every answer belongs to an attempt; the next join, or leaving, begins a new one, and what comes late is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final
from uuid import uuid4

from headrace.client.connection.connections import ConnectionPool
from headrace.client.connection.reactor import Backoff
from headrace.client.consumer.coordinator import ASK_TIMEOUT_S, Coordinator, passes
from headrace.client.share.share_session import TopicIdPartition
from headrace.errors import ErrorCode, HeadraceError
from headrace.wire import api as apis
from headrace.wire.message import Message

JOINING_EPOCH: Final = 0
LEAVING_EPOCH: Final = -1
LEAVE_WITHIN_S: Final = 5.0
FENCED: Final = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH})

log = logging.getLogger(__name__)


class State(Enum):
    OUT = "out"
    JOINING = "joining"
    STABLE = "stable"
    LEAVING = "leaving"
    ENDED = "ended"


class ShareMembership:
    """Everything is called under the reactor's lock, the callbacks too. `on_assigned` hears all partitions that are
    this member's now."""

    def __init__(
        self,
        pool: ConnectionPool,
        group: str,
        *,
        rack: str,
        max_poll_interval_ms: int,
        on_assigned: Callable[[frozenset[TopicIdPartition]], None],
        on_error: Callable[[HeadraceError], None],
    ) -> None:
        self.group = group
        self.member_id = str(uuid4())
        self.epoch = JOINING_EPOCH
        self.state = State.OUT
        self._reactor = pool.reactor
        self._rack = rack
        self._idle_s = max_poll_interval_ms / 1000
        self._on_assigned = on_assigned
        self._on_error = on_error
        self._coordinator = Coordinator(pool, group, on_error)
        self._topics: frozenset[str] = frozenset()
        self._told: frozenset[str] | None = None
        """The topics that the coordinator knows of; None while that is not known."""
        self._attempt = 0
        self._asking = False
        self._backoff = Backoff()
        self._polling = False
        self._busy_since = self._reactor.now()

    def subscribe(self, topics: Iterable[str]) -> None:
        """These from now on; none: leave the group, until there are some again."""
        self._topics = frozenset(topics)
        if self.state in (State.LEAVING, State.ENDED):
            return
        if not self._topics:
            self._step_out()
        elif self.state is State.OUT:
            self._join()
        elif not self._asking:
            self._begin(self.state)
            self._beat()

    def on_poll(self) -> None:
        self._polling = True
        if self.state is State.OUT and self._topics:
            self._join()

    def on_poll_end(self) -> None:
        self._polling = False
        self._busy_since = self._reactor.now()

    def leave(self, on_done: Callable[[], None]) -> None:
        """Let the others have everything now."""
        if self.state in (State.LEAVING, State.ENDED):
            self._reactor.call_soon(on_done)
            return
        was_out = self.state is State.OUT
        self._begin(State.LEAVING)

        def left(_: object = None) -> None:
            self._begin(State.ENDED)
            self._coordinator.close()
            on_done()

        if was_out:
            self._reactor.call_soon(left)
        else:
            self._say_goodbye(left)

    def close(self) -> None:
        """End it without a word, or after all was said."""
        self._begin(State.ENDED)
        self._coordinator.close()

    def _begin(self, state: State) -> None:
        self._attempt += 1
        self._asking = False
        self.state = state

    def _after(self, pause_s: float, fn: Callable[[], None]) -> None:
        attempt = self._attempt
        self._coordinator.later(pause_s, lambda: fn() if attempt == self._attempt else None)

    def _join(self) -> None:
        self._begin(State.JOINING)
        self.epoch, self._told = JOINING_EPOCH, None
        self._beat()

    def _beat(self) -> None:
        idle_s = self._reactor.now() - self._busy_since
        if not self._polling and idle_s > self._idle_s:
            log.warning(
                "share group %r: nothing was asked for in %g s, so others get the partitions; poll more often, or "
                "raise max_poll_interval_ms", self.group, idle_s,
            )  # fmt: skip
            self._step_out()
            return
        attempt, topics = self._attempt, self._topics
        self._asking = True
        joins = self.epoch == JOINING_EPOCH
        body = Message(
            group_id=self.group,
            member_id=self.member_id,
            member_epoch=self.epoch,
            rack_id=self._rack or None if joins else None,
            subscribed_topic_names=sorted(topics) if topics != self._told else None,
        )

        def answered(answer: Message | HeadraceError) -> None:
            if attempt != self._attempt:
                return
            self._asking = False
            if isinstance(answer, HeadraceError):
                self._refused(answer)
            else:
                self._told = topics
                self._accepted(answer)

        self._coordinator.ask(apis.SHARE_GROUP_HEARTBEAT, body, _code, answered, timeout_s=ASK_TIMEOUT_S)

    def _accepted(self, answer: Message) -> None:
        self._backoff.reset()
        self.state, self.epoch = State.STABLE, answer.member_epoch
        if self._topics != self._told:
            self._beat()
        else:
            self._after(answer.heartbeat_interval_ms / 1000, self._beat)
        if answer.assignment is not None:
            topics = answer.assignment.topic_partitions
            self._on_assigned(frozenset((bytes(one.topic_id), index) for one in topics for index in one.partitions))

    def _refused(self, error: HeadraceError) -> None:
        self._told = None  # whether it was heard is not known
        if error.kafka_code in FENCED:
            log.warning("share group %r has gone on without this member, which joins again: %s", self.group, error)
            self._on_assigned(frozenset())
            self._begin(State.JOINING)
            self.epoch = JOINING_EPOCH
            self._after(self._backoff.take(), self._beat)
        elif passes(error):
            log.info("share group %r: %s; asking again in %g s", self.group, error, self._backoff.next_s)
            self._after(self._backoff.take(), self._beat)
        else:
            self._begin(State.ENDED)
            self._coordinator.close()
            self._on_assigned(frozenset())
            self._on_error(error)

    def _step_out(self) -> None:
        was_out = self.state is State.OUT
        self._begin(State.OUT)
        self._on_assigned(frozenset())
        if not was_out:
            self._say_goodbye(lambda _: None)

    def _say_goodbye(self, then: Callable[[object], None]) -> None:
        body = Message(group_id=self.group, member_id=self.member_id, member_epoch=LEAVING_EPOCH)
        self.epoch = JOINING_EPOCH
        self._coordinator.persist(apis.SHARE_GROUP_HEARTBEAT, lambda: body, _code, then, within_s=LEAVE_WITHIN_S)


def _code(answer: Message) -> int:
    return int(answer.error_code)
