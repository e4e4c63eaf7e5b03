"""From the leader of a data partition, or the coordinator of a group, to the share coordinator that keeps the state:
called directly where that is this broker, else asked by Kafka's APIs between brokers.

What is asked of one broker in one turn goes there together, by API and group. Only so many requests are under way to
one; what comes meanwhile goes with the next. Nothing is tried again here: who asked hears the code, and of a write that
has failed nobody knows whether it was done. So it must read again before it writes again, and this is seen to: each
read draws a load id, a write bears that of the last read, and after a failed one there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from headrace.cluster.image import NO_LEADER, Image
from headrace.cluster.names import SHARE_STATE_TOPIC
from headrace.coordinators.peers import Ask
from headrace.coordinators.state_log import partition_of
from headrace.errors import ErrorCode, HeadraceError
from headrace.partitions.partitions import Partitions
from headrace.ports.clock import Clock
from headrace.queues.messages import (
    NO_OFFSET,
    NO_PRODUCER,
    CodeHeard,
    DeliveryState,
    Letter,
    ReadDone,
    Reason,
    SharePartitionKey,
    ShareState,
    ShareSummary,
    StateBatch,
    SummaryDone,
)
from headrace.queues.share_coordinator import ShareCoordinator
from headrace.queues.state_records import NO_EPOCH, coordinator_key
from headrace.wire.api import (
    DELETE_SHARE_GROUP_STATE,
    INITIALIZE_SHARE_GROUP_STATE,
    READ_SHARE_GROUP_STATE,
    READ_SHARE_GROUP_STATE_SUMMARY,
    WRITE_SHARE_GROUP_STATE,
)
from headrace.wire.message import Message

log = logging.getLogger(__name__)

VERSIONS: Final = {
    INITIALIZE_SHARE_GROUP_STATE: 0,
    READ_SHARE_GROUP_STATE: 0,
    WRITE_SHARE_GROUP_STATE: 1,
    DELETE_SHARE_GROUP_STATE: 0,
    READ_SHARE_GROUP_STATE_SUMMARY: 1,
}
TIMEOUT_MS: Final = 10_000
REQUESTS_MAX: Final = 32
"""Of one API, under way to one broker."""
KEYS_PER_REQUEST: Final = 500
READS_PER_REQUEST: Final = 5
"""An answer has at most 10,000 ranges of each, and is to be smaller than what is taken from another broker."""
BATCHES_PER_REQUEST: Final = 20_000
WAITING_MAX: Final = 100_000
"""Of one API, that wait for one broker; or for the topic to be created."""
NO_LETTER: Final = (-1, NO_PRODUCER, 0)
"""In the fields of what waits for no dead letter."""
LOADS_LEAST: Final = 1000
"""So many are kept before anybody looks for those that nobody needs any more."""
LOADS_MAX: Final = 200_000
"""Beyond that the oldest are forgotten, as of groups that are deleted: who still needs one reads again."""

EnsureTopic = Callable[[Callable[[], None]], None]
"""Have the topic created, and call back when it is there, or cannot be."""


@dataclass(frozen=True, slots=True)
class _Operation:
    api_key: int
    key: SharePartitionKey
    row: Message
    """What a request says of it."""
    here: Callable[[], None]
    """Asks the coordinator on this broker."""
    answered: Callable[[Message], None]
    """Hears the answer of another broker: at least its code."""
    batch_count: int = 0

    def fail(self, code: int) -> None:
        self.answered(Message(error_code=code))


class _Route(NamedTuple):
    broker: int
    api_key: int


@dataclass(slots=True)
class _Lane:
    waiting: dict[str, list[_Operation]] = field(default_factory=dict)
    """By group."""
    count: int = 0
    requests: int = 0
    """That are under way."""


class StatePersister:
    """See `messages.Persister`. `done` never runs before the call has returned."""

    def __init__(
        self,
        clock: Clock,
        partitions: Partitions,
        image: Callable[[], Image],
        coordinator: ShareCoordinator,
        ask: Ask,
        ensure_topic: EnsureTopic,
        draw: Callable[[int], bytes],
    ) -> None:
        self._clock = clock
        self._partitions = partitions
        self._image = image
        self._coordinator = coordinator
        self._ask = ask
        self._ensure_topic = ensure_topic
        self._draw = draw
        self._loads: dict[SharePartitionKey, int] = {}
        """Of share partitions that were read here, and have not failed since."""
        self._loads_max = LOADS_LEAST
        self._lanes: dict[_Route, _Lane] = {}
        self._topicless: list[_Operation] = []
        """They wait for the topic to be created."""

    # Operations

    def read(self, key: SharePartitionKey, leader_epoch: int, done: ReadDone) -> None:
        load_id = int.from_bytes(self._draw(8), "big") >> 1

        def read(code: int, state: ShareState | None) -> None:
            if code == ErrorCode.NONE and state is not None:
                self._loads.pop(key, None)
                self._loads[key] = load_id
                self._let_go()
            done(code, state)

        row = Message(partition=key.partition, leader_epoch=leader_epoch, load_id=load_id)
        self._begin(
            _Operation(
                READ_SHARE_GROUP_STATE,
                key,
                row,
                lambda: self._coordinator.read(key, leader_epoch, load_id, read),
                lambda answer: read(*_read_state(answer, leader_epoch)),
            )
        )

    def write(self, key: SharePartitionKey, state: ShareState, done: CodeHeard) -> None:
        """What was not read here, or has failed since, is refused as fenced: read it first."""
        load_id = self._loads.get(key)
        if load_id is None:
            self._clock.call_soon(partial(done, ErrorCode.FENCED_LEADER_EPOCH))
            return

        def written(code: int) -> None:
            if code != ErrorCode.NONE and self._loads.get(key) == load_id:
                del self._loads[key]
            done(code)

        row = Message(
            partition=key.partition,
            state_epoch=state.state_epoch,
            leader_epoch=state.leader_epoch,
            start_offset=state.start_offset,
            delivery_complete_count=-1,
            state_batches=[batch_row(batch) for batch in state.batches],
            load_id=load_id,
        )
        self._begin(
            _Operation(
                WRITE_SHARE_GROUP_STATE,
                key,
                row,
                lambda: self._coordinator.write(key, state, load_id, written),
                lambda answer: written(answer.error_code),
                len(state.batches),
            )
        )

    def initialize(self, key: SharePartitionKey, state_epoch: int, start_offset: int, done: CodeHeard) -> None:
        row = Message(partition=key.partition, state_epoch=state_epoch, start_offset=start_offset)
        self._begin(
            _Operation(
                INITIALIZE_SHARE_GROUP_STATE,
                key,
                row,
                lambda: self._coordinator.initialize(key, state_epoch, start_offset, done),
                lambda answer: done(answer.error_code),
            )
        )

    def delete(self, key: SharePartitionKey, done: CodeHeard) -> None:
        self.forget(key)
        if SHARE_STATE_TOPIC not in self._image().topics:
            self._clock.call_soon(partial(done, ErrorCode.NONE))
            return
        self._begin(
            _Operation(
                DELETE_SHARE_GROUP_STATE,
                key,
                Message(partition=key.partition),
                lambda: self._coordinator.delete(key, done),
                lambda answer: done(answer.error_code),
            )
        )

    def summary(self, key: SharePartitionKey, leader_epoch: int, done: SummaryDone) -> None:
        if SHARE_STATE_TOPIC not in self._image().topics:
            self._clock.call_soon(partial(done, ErrorCode.NONE, ShareSummary(0, 0, NO_OFFSET)))
            return
        self._begin(
            _Operation(
                READ_SHARE_GROUP_STATE_SUMMARY,
                key,
                Message(partition=key.partition, leader_epoch=leader_epoch),
                lambda: self._coordinator.summary(key, leader_epoch, done),
                lambda answer: done(*_read_summary(answer)),
            )
        )

    def forget(self, key: SharePartitionKey) -> None:
        """Nobody here writes to it any more, without reading it first."""
        self._loads.pop(key, None)

    def _let_go(self) -> None:
        """Of loads of partitions that are not led here any more, now and then; and of the oldest."""
        if len(self._loads) > LOADS_MAX:
            del self._loads[next(iter(self._loads))]
        if len(self._loads) <= self._loads_max:
            return
        topics = self._image().topics_by_id
        for key in list(self._loads):
            topic = topics.get(key.topic_id)
            if topic is None or self._partitions.find(topic.name, key.partition) is None:
                del self._loads[key]
        self._loads_max = max(LOADS_LEAST, 2 * len(self._loads))

    # To the coordinator

    def _begin(self, operation: _Operation) -> None:
        topic = self._image().topics.get(SHARE_STATE_TOPIC)
        if topic is None:
            self._wait_for_topic(operation)
            return
        index = partition_of(coordinator_key(operation.key), len(topic.partitions))
        broker = self._leader(index)
        if broker == self._partitions.broker:
            self._clock.call_soon(operation.here)
        elif broker == NO_LEADER:
            self._clock.call_soon(partial(operation.fail, ErrorCode.COORDINATOR_NOT_AVAILABLE))
        else:
            self._queue(_Route(broker, operation.api_key), operation)

    def _leader(self, index: int) -> int:
        if self._partitions.find(SHARE_STATE_TOPIC, index) is not None:
            return self._partitions.broker
        image = self._image()
        state = image.partition(SHARE_STATE_TOPIC, index)
        if state is None or state.leader not in image.brokers or state.leader == self._partitions.broker:
            return NO_LEADER
        return state.leader

    def _wait_for_topic(self, operation: _Operation) -> None:
        if len(self._topicless) >= WAITING_MAX:
            self._clock.call_soon(partial(operation.fail, ErrorCode.COORDINATOR_NOT_AVAILABLE))
            return
        self._topicless.append(operation)
        if len(self._topicless) == 1:
            self._ensure_topic(self._topic_there)

    def _topic_there(self) -> None:
        operations, self._topicless = self._topicless, []
        is_there = SHARE_STATE_TOPIC in self._image().topics
        for operation in operations:
            if is_there:
                self._begin(operation)
            else:
                operation.fail(ErrorCode.COORDINATOR_NOT_AVAILABLE)

    # Another broker

    def _queue(self, route: _Route, operation: _Operation) -> None:
        lane = self._lanes.get(route)
        if lane is None:
            lane = self._lanes[route] = _Lane()
        if lane.count >= WAITING_MAX:
            self._clock.call_soon(partial(operation.fail, ErrorCode.COORDINATOR_NOT_AVAILABLE))
            return
        if not lane.count:
            self._clock.call_soon(partial(self._send, route, lane))
        lane.waiting.setdefault(operation.key.group, []).append(operation)
        lane.count += 1

    def _send(self, route: _Route, lane: _Lane) -> None:
        while lane.waiting and lane.requests < REQUESTS_MAX:
            group = next(iter(lane.waiting))
            some, rest = _split(lane.waiting.pop(group))
            if rest:  # behind the other groups
                lane.waiting[group] = rest
            lane.count -= len(some)
            lane.requests += 1
            self._ask(
                route.broker,
                route.api_key,
                VERSIONS[route.api_key],
                _request(group, some),
                partial(self._answered, route, lane, some),
                TIMEOUT_MS,
                again=False,
            )
        if not lane.waiting and not lane.requests and self._lanes.get(route) is lane:
            del self._lanes[route]

    def _answered(
        self, route: _Route, lane: _Lane, asked: Sequence[_Operation], answer: Message | HeadraceError
    ) -> None:
        lane.requests -= 1
        if isinstance(answer, HeadraceError):
            log.debug("share partitions at broker %d: %s", route.broker, answer)
            for operation in asked:
                operation.fail(ErrorCode.NETWORK_EXCEPTION)
        else:
            rows = {(topic.topic_id, row.partition): row for topic in answer.results for row in topic.partitions}
            for operation in asked:
                row = rows.get((operation.key.topic_id, operation.key.partition))
                if row is None:
                    operation.fail(ErrorCode.UNKNOWN_SERVER_ERROR)
                else:
                    operation.answered(row)
        self._send(route, lane)


def _split(operations: list[_Operation]) -> tuple[list[_Operation], list[_Operation]]:
    """What one request can bear, each share partition once, and the rest."""
    most = READS_PER_REQUEST if operations[0].api_key == READ_SHARE_GROUP_STATE else KEYS_PER_REQUEST
    some: dict[SharePartitionKey, _Operation] = {}
    rest: list[_Operation] = []
    batch_count = 0
    for operation in operations:
        batch_count += operation.batch_count
        has_room = not some or (len(some) < most and batch_count <= BATCHES_PER_REQUEST)
        if rest or not has_room or operation.key in some:
            rest.append(operation)
        else:
            some[operation.key] = operation
    return list(some.values()), rest


def _request(group: str, operations: Sequence[_Operation]) -> Message:
    topics: dict[bytes, list[Message]] = {}
    for operation in operations:
        topics.setdefault(operation.key.topic_id, []).append(operation.row)
    found = [Message(topic_id=topic_id, partitions=rows) for topic_id, rows in topics.items()]
    return Message(group_id=group, topics=found)


def batch_row(batch: StateBatch) -> Message:
    """As WriteShareGroupState says it, and ReadShareGroupState answers it."""
    letter = batch.letter or NO_LETTER
    return Message(
        first_offset=batch.first_offset,
        last_offset=batch.last_offset,
        delivery_state=int(batch.state),
        delivery_count=batch.delivery_count,
        member=batch.member,
        until_ms=batch.until_ms,
        letter_reason=letter[0],
        letter_producer_id=letter[1],
        letter_sequence=letter[2],
    )


def _read_state(answer: Message, leader_epoch: int) -> tuple[int, ShareState | None]:
    if answer.error_code != ErrorCode.NONE:
        return answer.error_code, None
    try:
        batches = tuple([read_batch(row) for row in answer.state_batches])
    except ValueError:  # a state that there is not
        return ErrorCode.UNKNOWN_SERVER_ERROR, None
    written_epoch = leader_epoch if answer.written_epoch == NO_EPOCH else answer.written_epoch
    return ErrorCode.NONE, ShareState(answer.state_epoch, written_epoch, answer.start_offset, batches)


def read_batch(row: Message) -> StateBatch:
    """ValueError: there is no such state."""
    letter = None
    if row.letter_reason != NO_LETTER[0]:
        letter = Letter(Reason(row.letter_reason), row.letter_producer_id, row.letter_sequence)
    return StateBatch(
        row.first_offset,
        row.last_offset,
        DeliveryState(row.delivery_state),
        row.delivery_count,
        row.member,
        row.until_ms,
        letter,
    )


def _read_summary(answer: Message) -> tuple[int, ShareSummary | None]:
    if answer.error_code != ErrorCode.NONE:
        return answer.error_code, None
    return ErrorCode.NONE, ShareSummary(
        answer.state_epoch, answer.leader_epoch, answer.start_offset, answer.delivery_complete_count
    )
