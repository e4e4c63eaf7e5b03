"""Share partitions whose dead letters go to a topic on another broker, which can refuse them, be away, and take them
without saying so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headrace.cluster.image import Broker, Image, PartitionState, Topic
from headrace.errors import ErrorCode, HeadraceError, PeerUnreachable
from headrace.partitions.partition import Partition
from headrace.queues.dead_letter_topics import ENABLED, DeadLetterTopics
from headrace.queues.dead_letters import GROUP, OFFSET, PARTITION, TOPIC
from headrace.queues.share_partitions import SharePartitions
from headrace.records import kernel
from headrace.records.batch import BatchHeader, batches
from headrace.records.record import Record
from headrace.settings.values import load, log_settings
from headrace.wire.codec import decode_request, encode_request
from headrace.wire.message import Message
from partitions.led import BROKER, Led, topic_id
from queues.scene import Scene

LETTERS = "dlq.orders"
FAR = 2
COMMON = {TOPIC: b"orders", PARTITION: b"0", GROUP: b"workers"}


class LetterScene(Scene):
    """`near`: the topic is led by the same broker."""

    def __init__(self, layout: str = "", *, near: bool = False, creates: bool = True, **config: object) -> None:
        self.far = Led(layout)
        self.near = near
        self.settings = load(environment={}).values
        self.image = Image("", brokers={FAR: Broker(FAR, {}, "", 0)})
        self.away = False
        """Requests are not answered by anything but an error."""
        self.lost_answers = 0
        """So many requests to come are done, and answered with an error."""
        self.asked: list[Message] = []
        self.created: list[str] = []
        self.drawn = 100
        self.letters: Partition | None = None
        super().__init__(layout, **{"dead_letter_topic": LETTERS, **config})  # type: ignore[arg-type]
        if creates:
            self.create_letters()

    def _share_partitions(self) -> SharePartitions:
        led = self.led
        topics = DeadLetterTopics(
            self.clock,
            led.partitions,
            lambda: self.image,
            lambda: replace(load(environment={}), values=self.settings),
            self._ask,
            self._create,
            self._draw,
            lambda work, done: self.clock.call_soon(lambda: done(work())),
        )
        return SharePartitions(led.partitions, led.disk, self.persister, lambda _: self.config, topics, self._most)

    def create_letters(self, *, enabled: bool = True, **overrides: object) -> Partition:
        leader, its = (BROKER, self.led) if self.near else (FAR, self.far)
        self.letters = its.lead(LETTERS, **overrides)  # type: ignore[arg-type]
        given = {name.replace("_", "."): str(value) for name, value in overrides.items()}
        states = (PartitionState(0, leader, 0, (leader,), (leader,)),)
        topic = Topic(LETTERS, topic_id(LETTERS), states, {ENABLED: str(enabled).lower(), **given})
        self.image = replace(self.image, topics={LETTERS: topic}, topics_by_id={topic.id: topic})
        return self.letters

    def alter_letters(self, **overrides: object) -> None:
        assert self.letters is not None
        topic = self.image.topics[LETTERS]
        given = {name.replace("_", "."): str(value) for name, value in overrides.items()}
        self.letters.log.settings = log_settings({}, given)
        topic = replace(topic, overrides={**topic.overrides, **given})
        self.image = replace(self.image, topics={LETTERS: topic})

    def _create(self, name: str, done: Callable[[str], None]) -> None:
        self.created.append(name)
        self.create_letters()
        done("")

    def _draw(self, done: Callable[[int | None], None]) -> None:
        self.drawn += 1
        done(self.drawn)

    def _ask(
        self,
        broker: int,
        api_key: int,
        version: int,
        message: Message,
        reply: Callable[[Message | HeadraceError], None],
        timeout_ms: int,
        *,
        again: bool,
    ) -> None:
        assert broker == FAR
        assert (again, timeout_ms) == (False, 20_000)
        body = memoryview(encode_request(api_key, version, message))
        message = decode_request(api_key, version, body)
        self.asked.append(message)
        if self.away:
            self.clock.call_soon(lambda: reply(PeerUnreachable("away")))
            return
        ((row,),) = [topic.partition_data for topic in message.topic_data]
        assert self.letters is not None
        outcome: list[tuple[HeadraceError | None, int]] = []
        self.far.partitions.submit(
            self.letters, bytearray(row.records), message.acks, 1000, lambda *each: outcome.append(each)
        )
        self.far.partitions.end_turn()
        ((error, _),) = outcome
        code = ErrorCode.NONE if error is None else error.kafka_code
        part = Message(index=row.index, error_code=code, error_message=None if error is None else str(error))
        answer: Message | HeadraceError = Message(responses=[Message(partition_responses=[part])])
        if self.lost_answers:
            self.lost_answers -= 1
            answer = PeerUnreachable("lost")
        self.clock.call_soon(lambda: reply(answer))

    # What is there.

    def letter_batches(self) -> list[tuple[BatchHeader, list[Record]]]:
        if self.letters is None:
            return []
        found = self.letters.read(self.letters.log.start_offset, 1 << 24, warm=True)
        raw = b"".join(piece.read() for piece in found.slices)
        return [(header, kernel.records(view)) for header, view in batches(memoryview(raw))]

    def written(self) -> list[Record]:
        return [record for _, records in self.letter_batches() for record in records]

    def offsets(self) -> list[int]:
        """Of the records that have letters, in the order of those."""
        return [int(dict(record.headers)[OFFSET] or b"") for record in self.written()]
