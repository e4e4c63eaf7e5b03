"""A simulated member of a consumer group, with the classic protocol: it finds its coordinator, joins, takes the
partitions that the group's leader gives it, reads on from the committed offsets, and commits as it goes.

Commits are checked as a register of each group and partition: see `registers`. Every commit carries its number as
metadata, so an answer tells which of them it is. Assignments are checked as well: one owner in a generation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from headrace.client.consumer.group_protocol import (
    assign_ranges,
    decode_assignment,
    encode_assignment,
    encode_subscription,
)
from headrace.cluster.names import OFFSETS_TOPIC
from headrace.coordinators.state_log import partition_of
from headrace.errors import ErrorCode
from headrace.simulator.connection import PATIENCE_SECONDS, Client, Clients
from headrace.simulator.consumer import fetch, fetched, is_deleted, take
from headrace.simulator.history import Violation
from headrace.simulator.leaders import Leaders
from headrace.simulator.machine import Machine
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

SESSION_MS: Final = 1000
REBALANCE_MS: Final = 1500
REBALANCE_PATIENCE_SECONDS: Final = PATIENCE_SECONDS + REBALANCE_MS / 1000
HEARTBEAT_SECONDS: Final = 0.3
COMMIT_SECONDS: Final = 0.3
RESTART_SECONDS: Final = 3.0
"""On average a member is replaced by another, or stands still, after so long, as long as the load lasts."""
STALL_SECONDS: Final = (0.5, 2.5)
STALL_LOOK_SECONDS: Final = 0.1
"""Nobody stands still when the load has ended."""
PROTOCOL: Final = "range"
NO_OFFSET: Final = -1


class GroupMember:
    def __init__(
        self, clients: Clients, group: str, name: str, topics: dict[str, int], offsets_partitions: int, pause: float
    ) -> None:
        self._clients = clients
        self._group = group
        self._name = name
        self._topics = topics
        self._pause_seconds = pause
        self._home = TopicPartition(OFFSETS_TOPIC, partition_of(group, offsets_partitions))
        """The partition whose leader coordinates the group."""
        self._random = random.Random(clients.random.random())
        self._fetcher = Client(clients, name)
        self._client = Client(clients, name)
        self._leaders = Leaders(clients, self._fetcher, topics, self._random)
        self._turn = 0
        """Answers to what was asked in an earlier one are passed over."""
        self._coordinator = -1
        self._member_id = ""
        self._generation = -1
        self._positions: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._committing = False
        self._stopped = False
        self._stalled_until = 0.0
        self._find()
        self._restart_later()

    def stop(self) -> None:
        """Stay, as long as there is something to read."""
        self._stopped = True

    # Its life.

    def _restart_later(self) -> None:
        self._clients.clock.call_later(self._random.expovariate(1 / RESTART_SECONDS), self._restart)

    def _restart(self) -> None:
        """The program is killed, or ends in order, and is started again; or it stands still and then goes on as if
        nothing had happened."""
        if self._stopped:
            return
        if self._random.random() < 0.4:
            self._stalled_until = self._clients.clock.now() + self._random.uniform(*STALL_SECONDS)
            self._restart_later()
            return
        client = self._client
        self._begin(self._find)
        self._fetcher.hang_up()
        if self._random.random() < 0.5 and self._member_id:
            leaver = Message(member_id=self._member_id, group_instance_id=None)
            message = Message(group_id=self._group, members=[leaver])
            client.call(self._coordinator, api.LEAVE_GROUP, message, lambda _: client.hang_up())
        else:
            client.hang_up()
        self._client = Client(self._clients, self._name)
        self._member_id = ""
        self._restart_later()

    def _begin(self, what: Callable[[], None]) -> None:
        """Give up what it has, and go on with that after a while."""
        self._turn += 1
        self._positions, self._committed, self._committing = {}, {}, False
        self._wait(self._pause_seconds, what)

    def _wait(self, seconds: float, what: Callable[[], None]) -> None:
        turn, clock = self._turn, self._clients.clock

        def due() -> None:
            if turn != self._turn:
                return
            if clock.now() < self._stalled_until and not self._stopped:
                clock.call_at(min(self._stalled_until, clock.now() + STALL_LOOK_SECONDS), due)
            else:
                what()

        clock.call_later(seconds * self._random.uniform(0.5, 1.5), due)

    def _ask(self, api_key: int, message: Message, took: Callable[[Any], None], **named: Any) -> None:
        """Of the coordinator; if it does not answer, look for another."""
        turn = self._turn

        def answered(answer: Message | None) -> None:
            if turn != self._turn:
                return
            if answer is None:
                self._begin(self._find)
            else:
                took(answer)

        self._client.call(self._coordinator, api_key, message, answered, **named)

    def _failed(self, code: int) -> None:
        """As clients take the codes of a coordinator."""
        if code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID):
            self._member_id = ""
        if code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION, ErrorCode.REBALANCE_IN_PROGRESS):
            self._begin(self._join)
        else:
            self._begin(self._find)

    # Joining.

    def _find(self) -> None:
        turn = self._turn

        def found(answer: Message | None) -> None:
            if turn != self._turn:
                return
            if answer is None or answer.error_code:
                self._wait(self._pause_seconds, self._find)
            else:
                self._coordinator = answer.node_id
                self._join()

        broker = self._clients.some_broker(self._random)
        self._client.call(broker, api.FIND_COORDINATOR, Message(key=self._group, key_type=0), found)

    def _join(self) -> None:
        subscription = encode_subscription(tuple(self._topics))
        message = Message(
            group_id=self._group,
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
            member_id=self._member_id,
            group_instance_id=None,
            protocol_type="consumer",
            protocols=[Message(name=PROTOCOL, metadata=subscription)],
        )
        self._ask(api.JOIN_GROUP, message, self._joined, patience_seconds=REBALANCE_PATIENCE_SECONDS)

    def _joined(self, answer: Message) -> None:
        if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            self._member_id = answer.member_id
            self._join()
        elif answer.error_code:
            self._failed(answer.error_code)
        else:
            self._member_id, self._generation = answer.member_id, answer.generation_id
            leads = answer.leader == answer.member_id
            self._sync([member.member_id for member in answer.members] if leads else ())

    def _sync(self, members: Sequence[str]) -> None:
        given = assign_ranges({member: tuple(self._topics) for member in members}, self._topics)
        message = Message(
            group_id=self._group,
            generation_id=self._generation,
            member_id=self._member_id,
            group_instance_id=None,
            assignments=[Message(member_id=one, assignment=encode_assignment(each)) for one, each in given.items()],
        )
        self._ask(api.SYNC_GROUP, message, self._synced, patience_seconds=REBALANCE_PATIENCE_SECONDS)

    def _synced(self, answer: Message) -> None:
        if answer.error_code:
            self._failed(answer.error_code)
            return
        assignment = decode_assignment(bytes(answer.assignment))
        owned = [TopicPartition(topic, index) for topic, indexes in assignment.items() for index in indexes]
        history = self._clients.history
        for where in owned:
            history.assigned(self._group, self._generation, where, self._member_id)
        history.note(f"{self._name} has {len(owned)} partitions in generation {self._generation} of {self._group}")
        self._wait(HEARTBEAT_SECONDS, self._heartbeat)
        if owned:
            self._ask_committed(owned)

    def _heartbeat(self) -> None:
        message = Message(
            group_id=self._group,
            generation_id=self._generation,
            member_id=self._member_id,
            group_instance_id=None,
        )

        def answered(answer: Message) -> None:
            if answer.error_code == ErrorCode.REBALANCE_IN_PROGRESS:
                self._commit(then=lambda: self._begin(self._join))
            elif answer.error_code:
                self._failed(answer.error_code)
            else:
                self._wait(HEARTBEAT_SECONDS, self._heartbeat)

        self._ask(api.HEARTBEAT, message, answered)

    # Offsets.

    def _ask_committed(self, owned: list[TopicPartition]) -> None:
        register = self._clients.history.commits
        asked = {where: register(self._group, where).ask() for where in owned}
        topics: dict[str, list[int]] = {}
        for where in owned:
            topics.setdefault(where.topic, []).append(where.partition)
        message = Message(
            group_id=self._group,
            topics=[Message(name=topic, partition_indexes=indexes) for topic, indexes in topics.items()],
            require_stable=False,
        )

        def decided(answer: Message, machine: Machine) -> None:
            epoch = self._clients.known_epoch(machine, self._home)
            for where, row in {} if answer.error_code else _rows(answer).items():
                number = None if row.committed_offset == NO_OFFSET else int(row.metadata)
                self._clients.history.committed_told(self._group, where, asked[where], number, epoch, machine.life)

        self._ask(api.OFFSET_FETCH, message, self._took_committed, decided=decided)

    def _took_committed(self, answer: Message) -> None:
        if answer.error_code:
            self._failed(answer.error_code)
            return
        for where, row in _rows(answer).items():
            self._leaders.learn(where, row.committed_leader_epoch)
            self._positions[where] = max(0, row.committed_offset)
            self._committed[where] = row.committed_offset
        self._fetch()
        self._wait(COMMIT_SECONDS, self._commit_sometimes)

    def _commit_sometimes(self) -> None:
        self._wait(COMMIT_SECONDS, self._commit_sometimes)
        self._commit()

    def _commit(self, then: Callable[[], None] = lambda: None) -> None:
        changed = {where: at for where, at in self._positions.items() if self._committed.get(where) != at}
        if not changed or self._committing:
            then()
            return
        self._committing = True
        history, group = self._clients.history, self._group
        numbers = {where: history.commits(group, where).begin(at) for where, at in changed.items()}
        generation = self._generation
        fenced = {where for where in changed if history.is_given_on(group, generation, where)}
        topics: dict[str, list[Message]] = {}
        for where, at in changed.items():
            topics.setdefault(where.topic, []).append(
                Message(
                    partition_index=where.partition,
                    committed_offset=at,
                    committed_leader_epoch=self._leaders.epoch(where),
                    committed_metadata=str(numbers[where]),
                )
            )
        message = Message(
            group_id=group,
            generation_id_or_member_epoch=self._generation,
            member_id=self._member_id,
            group_instance_id=None,
            topics=[Message(name=topic, partitions=rows) for topic, rows in topics.items()],
        )

        def decided(answer: Message, machine: Machine) -> None:
            epoch = self._clients.known_epoch(machine, self._home)
            for where, row in _rows(answer).items():
                if where in fenced and not row.error_code:
                    raise Violation(f"{group}: {machine.life} takes a commit of generation {generation} for {where}")
                if not row.error_code:
                    history.committed(group, where, numbers[where], epoch, machine.life)

        def answered(answer: Message) -> None:
            self._committing = False
            failed = [row.error_code for row in _rows(answer).values() if row.error_code]
            if failed and failed[0] != ErrorCode.REBALANCE_IN_PROGRESS:
                self._failed(failed[0])
                return
            if not failed:
                self._committed.update(changed)
            then()

        self._ask(api.OFFSET_COMMIT, message, answered, decided=decided)

    # Reading.

    def _fetch(self) -> None:
        """From one of the leaders of what it has, in turn."""
        asked: dict[int, dict[TopicPartition, tuple[int, int]]] = {}
        for where, offset in self._positions.items():
            leader = self._leaders.leader(where)
            if leader is None:
                self._leaders.refresh()
            else:
                asked.setdefault(leader, {})[where] = offset, self._leaders.epoch(where)
        if not asked:
            self._wait(self._pause_seconds, self._fetch)
            return
        broker = self._random.choice(list(asked))
        turn = self._turn

        def answered(answer: Message | None) -> None:
            if turn == self._turn:
                self._fetched(broker, asked[broker], answer)

        self._fetcher.call(broker, api.FETCH, fetch(asked[broker]), answered)

    def _fetched(self, broker: int, asked: dict[TopicPartition, tuple[int, int]], answer: Message | None) -> None:
        history, by = self._clients.history, self._clients.life(broker)
        rows = {} if answer is None else fetched(answer)
        for where in asked:
            row, offset = rows.get(where), self._positions[where]
            if row is not None and row.error_code == ErrorCode.NONE:
                self._positions[where] = take(history, where, offset, row, by)
                continue
            if row is not None and row.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
                gone = is_deleted(history, where, offset, row, by)
                self._positions[where] = row.log_start_offset if gone else 0
            self._leaders.refresh()
        if self._stopped:  # nothing is left to happen but that everything is read and committed
            self._commit()
        self._wait(self._pause_seconds, self._fetch)


def _rows(answer: Message) -> dict[TopicPartition, Message]:
    return {TopicPartition(topic.name, row.partition_index): row for topic in answer.topics for row in topic.partitions}
