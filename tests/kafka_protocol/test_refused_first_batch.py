"""A producer's first batch that is refused for the broker's own reasons is not overtaken by what is sent behind it.

Through the Kafka front end: whatever the reason, the log hears of it, even if there is no log here yet.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.partition_keys import PREFIX, PartitionKeys
from headrace.cluster.image import Image, PartitionState, Topic
from headrace.cluster.leadership import Leadership
from headrace.errors import ErrorCode, StorageFailed
from headrace.kafka.connection import Connection
from headrace.kafka.dispatch import FRAME_HANDLERS, HANDLERS
from headrace.kafka.fetch_sessions import FetchSessions
from headrace.kafka.share_sessions import ShareSessions
from headrace.metrics import Metrics
from headrace.partitions import early_refusals
from headrace.records import kernel
from headrace.records.record import NewRecord
from headrace.settings.values import load, log_settings
from headrace.storage.log import Log, TopicPartition
from headrace.storage.producers import Load, ProducerTable
from headrace.wire import api as apis
from headrace.wire.codec import decode_response, encode_request, read_response_header, write_request
from headrace.wire.message import Message
from kafka_protocol.raw import batch_of
from kafka_protocol.test_request_boundary import Wire
from partitions.led import BROKER, Led, topic_id, values
from proving import proves

BY_NAME, BY_ID = 12, 13
OTHER = BROKER + 1
PRODUCER = 9
OUT_OF_ORDER, TOO_LARGE, CORRUPT, UNKNOWN_TOPIC_ID = 45, 10, 2, 100


class Front:
    """A connection to a broker with one partition, whose role the test gives."""

    def __init__(self, layout: str, version: int = BY_NAME) -> None:
        self.led = Led(layout)
        self.topic = "orders"
        self.version = version
        services: Any = SimpleNamespace(
            clock=self.led.clock,
            disk=self.led.disk,
            partitions=self.led.partitions,
            metrics=Metrics(),
            settings=load(environment={}),
            connections={},
            view=SimpleNamespace(image=Image(PREFIX)),
            broker_id=BROKER,
            fetch_sessions=FetchSessions(0, self.led.clock.now, bytes),
            share_sessions=ShareSessions(lambda: 0, lambda _key: None),
        )
        keys: Any = PartitionKeys()
        self.keys: PartitionKeys = keys
        services.leadership = Leadership(keys, services.view, keys.spawn)
        self.services = services
        self.wire = Wire()
        self._numbers = itertools.count(1)
        self.connection = Connection(services, "default", HANDLERS, FRAME_HANDLERS)
        self.connection.opened(self.wire)

    def knows_topic(self, leader: int = OTHER, *, internal: bool = False) -> None:
        state = PartitionState(0, leader, 1, (leader,), (BROKER, OTHER))
        topic = Topic(self.topic, topic_id(self.topic), (state,), internal=internal)
        self.services.view.image = Image(PREFIX, topics={self.topic: topic}, topics_by_id={topic.id: topic})

    def log(self, **overrides: object) -> Log:
        given = {name.replace("_", "."): str(value) for name, value in overrides.items()}
        return self.led.store.create(TopicPartition(self.topic, 0), topic_id(self.topic), log_settings({}, given))

    def lead(self, log: Log, epoch: int = 2) -> None:
        self.knows_topic(BROKER)
        self.keys.put(self.topic, topic_id(self.topic), BROKER, epoch)
        self.led.partitions.lead(log, epoch, {BROKER: ""}, revision=epoch)

    def produce(self, sequence: int, count: int = 1, *, epoch: int = 0, producer: int = PRODUCER) -> int:
        self.ask(sequence, count, epoch=epoch, producer=producer)
        return self.answer()

    def ask(self, sequence: int, count: int = 1, *, epoch: int = 0, producer: int = PRODUCER) -> None:
        """Produce, and leave the answer for later."""
        records: list[NewRecord] = [(1_750_000_000_000, None, b"%d" % (sequence + nth), []) for nth in range(count)]
        made = kernel.build(records, producer_id=producer, producer_epoch=epoch, base_sequence=sequence)
        self._request(bytes(made))

    def send(self, batch: bytes) -> int:
        self._request(batch)
        return self.answer()

    def _request(self, batch: bytes) -> None:
        which: dict[str, object] = {"name": self.topic} if self.version < BY_ID else {"topic_id": topic_id(self.topic)}
        part = Message(index=0, records=batch)
        body = Message(
            transactional_id=None, acks=-1, timeout_ms=1000, topic_data=[Message(partition_data=[part], **which)]
        )
        request = encode_request(apis.PRODUCE, self.version, body)
        sent = bytearray(write_request(apis.PRODUCE, self.version, next(self._numbers), "c", request))
        assert self.connection.received(memoryview(sent)) == len(sent)
        self.led.clock.run_soon()

    def answer(self) -> int:
        """The code of the one answer that was sent."""
        answer, self.wire.sent = memoryview(self.wire.sent)[4:], b""
        _, at = read_response_header(apis.PRODUCE, self.version, answer)
        (row,) = decode_response(apis.PRODUCE, self.version, answer, at).responses[0].partition_responses
        code: int = row.error_code
        return code

    def held(self) -> list[bytes | None]:
        partition = self.led.partitions.find(self.topic, 0)
        assert partition is not None
        return values(partition.read(0, 1000))


@pytest.fixture(params=[("partitioned", BY_NAME), ("shared", BY_NAME), ("partitioned", BY_ID), ("shared", BY_ID)])
def front(request: pytest.FixtureRequest) -> Front:
    return Front(*request.param)


def comes_first(front: Front) -> None:
    """The batch with sequence 0 was refused: it comes first, however soon the next one is here."""
    assert front.produce(1) == OUT_OF_ORDER
    assert [front.produce(sequence) for sequence in (0, 1)] == [ErrorCode.NONE, ErrorCode.NONE]
    assert front.held() == [b"0", b"1"]


@proves("J10")
def test_refused_by_a_replica_that_has_not_heard_yet_that_it_leads(front: Front) -> None:
    log = front.log()
    front.knows_topic()
    front.led.partitions.follow(log, 1, OTHER)
    assert front.produce(0) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    front.lead(log)
    comes_first(front)


@proves("J10")
def test_refused_by_a_broker_that_has_not_heard_yet_that_it_has_a_replica(front: Front) -> None:
    front.knows_topic()
    assert front.produce(0) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    front.lead(front.log())
    comes_first(front)


@proves("J10")
def test_refused_by_a_broker_that_has_not_heard_of_the_topic_yet(front: Front) -> None:
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if front.version < BY_ID else UNKNOWN_TOPIC_ID
    assert [front.produce(sequence) for sequence in (0, 1)] == [unknown, unknown]
    front.lead(front.log())
    comes_first(front)


@proves("J10")
def test_refused_while_the_producers_of_the_log_cannot_be_read(front: Front) -> None:
    """For want of descriptors, say: the next try may succeed."""
    log = front.log()
    front.lead(log)
    assert isinstance(log.producers, ProducerTable)
    begin_load = log.producers._begin_load

    def fails(past_damage: bool) -> Load:
        raise StorageFailed("too many open files")

    log.producers._begin_load = fails
    assert front.produce(0) == ErrorCode.KAFKA_STORAGE_ERROR
    log.producers._begin_load = begin_load
    comes_first(front)


@proves("J10")
def test_refused_for_its_size_it_comes_again_in_parts(front: Front) -> None:
    front.lead(front.log(max_message_bytes=110))
    assert front.produce(0, count=10) == TOO_LARGE
    assert front.produce(10) == OUT_OF_ORDER
    assert [front.produce(first, count=5) for first in (0, 5)] == [ErrorCode.NONE, ErrorCode.NONE]
    assert front.produce(10) == ErrorCode.NONE


def test_a_single_record_that_is_too_large_never_comes_again_and_holds_up_nothing(front: Front) -> None:
    front.lead(front.log(max_message_bytes=100))
    large = kernel.build([(0, None, b"x" * 100, [])], producer_id=PRODUCER, producer_epoch=0, base_sequence=0)
    assert front.send(bytes(large)) == TOO_LARGE
    assert front.produce(1) == ErrorCode.NONE


def test_what_is_wrong_itself_holds_up_nothing(front: Front) -> None:
    front.lead(front.log())
    wrong = bytearray(kernel.build([(0, None, b"x", [])], producer_id=PRODUCER, producer_epoch=0, base_sequence=0))
    wrong[-1] ^= 1
    assert front.send(bytes(wrong)) == CORRUPT
    assert front.produce(1) == ErrorCode.NONE


def test_a_producer_that_goes_on_elsewhere_is_taken_when_the_partition_comes_here(front: Front) -> None:
    """Its batches come with the copy of the log, or it is so long ago that nothing can be on its way any more."""
    front.knows_topic()
    assert front.produce(0) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    log = front.log()
    partition = front.led.partitions.follow(log, 1, OTHER)
    copied = memoryview(kernel.build([(0, None, b"0", [])], producer_id=PRODUCER, producer_epoch=0, base_sequence=0))
    log.append_copied(copied)
    front.led.partitions.touch(partition)
    front.led.partitions.end_turn()
    front.lead(log)
    assert front.produce(1) == ErrorCode.NONE


def test_early_refusals_are_forgotten_after_a_while(front: Front) -> None:
    front.knows_topic()
    assert front.produce(0) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    front.led.clock.advance(early_refusals.EARLY_SECONDS + 1)
    front.lead(front.log())
    assert front.produce(7) == ErrorCode.NONE


def test_only_so_many_early_refusals_are_remembered(front: Front) -> None:
    front.knows_topic()
    for producer in range(early_refusals.EARLY_MAX + 1):
        assert front.produce(0, producer=producer) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    front.lead(front.log())
    assert front.produce(1, producer=0) == ErrorCode.NONE, "the oldest is forgotten"
    assert front.produce(1, producer=1) == OUT_OF_ORDER


def test_nobody_produces_to_an_internal_topic(front: Front) -> None:
    front.topic = "__own"
    front.lead(front.log())
    front.knows_topic(BROKER, internal=True)
    assert front.send(batch_of([b"value"])) == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert front.held() == []
