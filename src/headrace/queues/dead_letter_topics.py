"""Where dead letters are written: whether their topic may be used, and a batch of them to its leader, on this broker or
another one, acknowledged by all replicas in sync.

As in Kafka, a topic takes dead letters if its name has the prefix that the cluster wants, and it says itself that it
does (`errors.deadletterqueue.group.enable`): so nobody writes to a topic by having their records rejected. One that is
not there is created if the cluster allows it. The partition is that of the record, modulo their number.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from headrace.cluster.image import Image, Topic
from headrace.coordinators.peers import Ask
from headrace.errors import ErrorCode, HeadraceError
from headrace.partitions.partitions import Partitions
from headrace.ports.clock import Clock
from headrace.settings.values import BrokerSettings, read_topic_overrides
from headrace.wire.api import PRODUCE
from headrace.wire.message import Message

log = logging.getLogger(__name__)

PRODUCE_VERSION: Final = 13
ALL_IN_SYNC: Final = -1
TIMEOUT_MS: Final = 10_000
UNDER_WAY_MAX: Final = 32
"""Batches of dead letters of all share partitions of this broker, from reading their records to the answer."""
BATCH_BYTES: Final = 512 << 10
"""Of the letters of one batch, unless one alone is larger."""
ENABLED: Final = "errors.deadletterqueue.group.enable"

Reasoned = Callable[[str], None]
"""Hears why something cannot be, or nothing if it can."""
CreateTopic = Callable[[str, Reasoned], None]
DrawProducerId = Callable[[Callable[[int | None], None]], None]
Built = Callable[[bytearray | HeadraceError], None]
Compute = Callable[[Callable[[], bytearray], Built], None]
"""Do work that may take long somewhere else; the answer is heard on the loop."""
Answered = Callable[[int, str], None]
"""Hears Kafka's code, and what there is to say about it."""


class DeadLetterTopics:
    def __init__(
        self,
        clock: Clock,
        partitions: Partitions,
        image: Callable[[], Image],
        settings: Callable[[], BrokerSettings],
        ask: Ask,
        create: CreateTopic,
        draw_producer_id: DrawProducerId,
        compute: Compute,
    ) -> None:
        self.draw_producer_id = draw_producer_id
        self.compute = compute
        self._clock = clock
        self._partitions = partitions
        self._image = image
        self._settings = settings
        self._ask = ask
        self._create = create
        self._under_way = 0
        self._waiting: deque[Callable[[], None]] = deque()

    # How many at a time.

    def when_free(self, call: Callable[[], None]) -> None:
        """Run it soon, when not too many are under way; it calls `ended` when it is done."""
        self._waiting.append(call)
        self._clock.call_soon(self._go_on)

    def ended(self) -> None:
        self._under_way -= 1
        if self._waiting:
            self._clock.call_soon(self._go_on)

    def _go_on(self) -> None:
        while self._waiting and self._under_way < UNDER_WAY_MAX:
            self._under_way += 1
            self._waiting.popleft()()

    # The topic.

    def prepare(self, name: str, done: Reasoned) -> None:
        """Hear whether the topic can be written to; it is created first if it may be."""
        topic = self._image().topics.get(name)
        reason = self._fault(name, topic)
        if reason or topic is not None:
            done(reason)
        else:
            self._create(name, done)

    def _fault(self, name: str, topic: Topic | None) -> str:
        settings = self._settings()
        prefix = settings["errors.deadletterqueue.topic.name.prefix"]
        if name.startswith("__") or (topic is not None and topic.internal):
            return f"{name!r} is a topic of the brokers"
        if not name.startswith(prefix):
            return f"{name!r} does not begin with {prefix!r} (errors.deadletterqueue.topic.name.prefix)"
        if topic is None:
            can_be = settings["errors.deadletterqueue.auto.create.topics.enable"]
            return "" if can_be else f"there is no topic {name!r}: create it with {ENABLED}=true"
        return "" if self._setting(topic, ENABLED) else f"topic {name!r} takes none: set {ENABLED}=true"

    def _setting(self, topic: Topic, name: str) -> object:
        own = read_topic_overrides({name: topic.overrides[name]} if name in topic.overrides else {})
        return own[name] if name in own else self._settings().topic_defaults()[name]

    def batch_bytes(self, name: str) -> int:
        """How large a batch may be."""
        topic = self._image().topics.get(name)
        most = BATCH_BYTES if topic is None else self._setting(topic, "max.message.bytes")
        assert isinstance(most, int)
        return min(BATCH_BYTES, most)

    # The batch.

    def send(self, name: str, source_partition: int, batch: bytearray, done: Answered) -> None:
        """Have it appended; `done` hears once, later. After an error it may be there or not."""
        topic = self._image().topics.get(name)
        if topic is None:
            done(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name!r} any more")
            return
        index = source_partition % len(topic.partitions)
        partition = self._partitions.find(name, index)
        if partition is None:
            self._send_to_leader(topic, index, batch, done)
            return

        def submitted(error: HeadraceError | None, _base_offset: int) -> None:
            done(ErrorCode.NONE if error is None else error.kafka_code, str(error or ""))

        self._partitions.submit(partition, batch, ALL_IN_SYNC, TIMEOUT_MS, submitted, recompress=True)
        self._clock.call_soon(self._partitions.end_turn)

    def _send_to_leader(self, topic: Topic, index: int, batch: bytearray, done: Answered) -> None:
        image = self._image()
        leader = topic.partitions[index].leader
        if leader not in image.brokers or leader == self._partitions.broker:
            done(ErrorCode.LEADER_NOT_AVAILABLE, f"{topic.name}-{index} has no leader now")
            return

        def answered(answer: Message | HeadraceError) -> None:
            if isinstance(answer, HeadraceError):
                done(ErrorCode.NETWORK_EXCEPTION, str(answer))
                return
            rows = [row for found in answer.responses for row in found.partition_responses]
            if len(rows) != 1:
                done(ErrorCode.UNKNOWN_SERVER_ERROR, f"broker {leader} answered for {len(rows)} partitions")
            else:
                done(rows[0].error_code, rows[0].error_message or "")

        message = Message(
            transactional_id=None,
            acks=ALL_IN_SYNC,
            timeout_ms=TIMEOUT_MS,
            topic_data=[
                Message(topic_id=topic.id, partition_data=[Message(index=index, records=bytes(batch))]),
            ],
        )
        self._ask(leader, PRODUCE, PRODUCE_VERSION, message, answered, 2 * TIMEOUT_MS, again=False)
