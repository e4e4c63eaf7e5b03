"""The first batch of a transaction in a partition waits for the word of its coordinator, and nothing overtakes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.partition_keys import PREFIX, PartitionKeys
from headrace.cluster.image import Broker, Endpoint, Image, PartitionState, Topic
from headrace.cluster.leadership import Leadership
from headrace.cluster.names import TRANSACTIONS_TOPIC
from headrace.errors import ErrorCode, HeadraceError, PeerUnreachable
from headrace.kafka import first_writes
from headrace.kafka.connection import Connection
from headrace.kafka.dispatch import FRAME_HANDLERS, HANDLERS
from headrace.kafka.first_writes import FirstWrites, Support, Transaction
from headrace.metrics import Metrics
from headrace.partitions.partition import Partition
from headrace.records import kernel
from headrace.records.batch import TRANSACTIONAL
from headrace.settings.values import load, log_settings
from headrace.storage.log import TopicPartition
from headrace.transactions.coordinator import TransactionCoordinator
from headrace.wire import api as apis
from headrace.wire.codec import (
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    read_response_header,
    write_request,
)
from headrace.wire.message import Message
from kafka_protocol.test_request_boundary import Wire
from partitions.led import BROKER, Led, topic_id
from proving import proves
from transactions.scene import Scene as Coordinating

COORDINATOR = BROKER + 1
PRODUCER, EPOCH = 9, 3
VERIFIED, ABORTABLE, ADDED = 10, 11, 12
"""Versions of Produce: before TRANSACTION_ABORTABLE, with it, and those that leave additions to the broker."""
Reply = Callable[[Message | HeadraceError], None]


class Front:
    """A connection to a broker that leads two partitions of a topic; another one leads the transactional id."""

    def __init__(self, *, coordinator: TransactionCoordinator | None = None, **overrides: str) -> None:
        self.led = Led("partitioned")
        self.clock = self.led.clock
        given = {name.replace("_", "."): value for name, value in overrides.items()}
        for index in range(2):
            where = TopicPartition("orders", index)
            log = self.led.store.create(where, topic_id("orders"), log_settings({}, given))
            self.led.partitions.lead(log, 1, {BROKER: ""}, revision=1)
        self.image = self.image_of(COORDINATOR)
        self.asked: list[tuple[int, Message, Reply]] = []
        services: Any = SimpleNamespace(
            clock=self.clock,
            disk=self.led.disk,
            partitions=self.led.partitions,
            metrics=Metrics(),
            settings=load(environment={}),
            connections={},
            view=SimpleNamespace(image=self.image),
            broker_id=BROKER,
        )
        keys: Any = PartitionKeys()
        services.leadership = Leadership(keys, services.view, keys.spawn)
        self.transactions = Coordinating().coordinator if coordinator is None else coordinator
        services.first_writes = self.first_writes = FirstWrites(
            self.clock, self.led.partitions, lambda: self.image, self.transactions, self.ask
        )
        self.services = services
        self.wire = Wire()
        self._numbers = itertools.count(1)
        self.connection = Connection(services, "default", HANDLERS, FRAME_HANDLERS)
        self.connection.opened(self.wire)

    def image_of(self, leader: int) -> Image:
        def topic(name: str, count: int, led: int, *, internal: bool = False) -> Topic:
            states = tuple(PartitionState(index, led, 1, (led,), (led,)) for index in range(count))
            return Topic(name, topic_id(name), states, internal=internal)

        topics = {"orders": topic("orders", 2, BROKER)}
        topics[TRANSACTIONS_TOPIC] = topic(TRANSACTIONS_TOPIC, 1, leader, internal=True)
        brokers = {one: Broker(one, {"default": Endpoint("h", one)}, "a", 0) for one in (BROKER, COORDINATOR)}
        by_id = {one.id: one for one in topics.values()}
        return Image(PREFIX, brokers=brokers, topics=topics, topics_by_id=by_id)

    def ask(
        self, broker: int, api_key: int, version: int, message: Message, reply: Reply, timeout_ms: int, *, again: bool
    ) -> None:
        assert (api_key, again) == (apis.ADD_PARTITIONS_TO_TXN, False)
        body = decode_request(api_key, version, memoryview(encode_request(api_key, version, message)))
        self.asked.append((broker, body, reply))

    def coordinator_says(self, code: int | HeadraceError = ErrorCode.NONE) -> None:
        _, body, reply = self.asked.pop(0)
        if isinstance(code, HeadraceError):
            reply(code)
        else:
            answer = Message(
                throttle_time_ms=0,
                error_code=ErrorCode.NONE,
                results_by_transaction=[
                    Message(
                        transactional_id=one.transactional_id,
                        topic_results=[
                            Message(
                                name=topic.name,
                                results_by_partition=[
                                    Message(partition_index=index, partition_error_code=code)
                                    for index in topic.partitions
                                ],
                            )
                            for topic in one.topics
                        ],
                    )
                    for one in body.transactions
                ],
            )
            version = first_writes.VERSION
            encoded = encode_response(apis.ADD_PARTITIONS_TO_TXN, version, answer)
            reply(decode_response(apis.ADD_PARTITIONS_TO_TXN, version, memoryview(encoded)))
        self.clock.run_soon()

    def batch(self, sequence: int, epoch: int = EPOCH, producer: int = PRODUCER, value: bytes = b"v") -> bytes:
        built, _ = kernel.build_with_header(
            [(1_750_000_000_000, None, value, ())], TRANSACTIONAL, producer=(producer, epoch, sequence)
        )
        return bytes(built)

    def produce(
        self, *batches: tuple[int, bytes], version: int = ADDED, name: str | None = "tx", acks: int = -1
    ) -> None:
        """One request with a batch for each of these partitions."""
        parts = [Message(index=index, records=batch) for index, batch in batches]
        body = Message(
            transactional_id=name, acks=acks, timeout_ms=3000, topic_data=[Message(name="orders", partition_data=parts)]
        )
        self.version = version
        request = encode_request(apis.PRODUCE, version, body)
        sent = bytearray(write_request(apis.PRODUCE, version, next(self._numbers), "c", request))
        assert self.connection.received(memoryview(sent)) == len(sent)
        sent[:] = bytes(len(sent))  # what was received is not there any more after the turn
        self.clock.run_soon()

    def codes(self) -> list[int]:
        """Of all rows of all answers since the last look."""
        found: list[int] = []
        sent, self.wire.sent = memoryview(self.wire.sent), b""
        while sent:
            size = int.from_bytes(sent[:4], "big")
            frame = sent[4 : 4 + size]
            _, at = read_response_header(apis.PRODUCE, self.version, frame)
            for topic in decode_response(apis.PRODUCE, self.version, frame, at).responses:
                found += [row.error_code for row in topic.partition_responses]
            sent = sent[4 + size :]
        return found

    def partition(self, index: int = 0) -> Partition:
        return self.led.partitions.get("orders", index)


@proves("T1")
@pytest.mark.parametrize("version", [VERIFIED, ABORTABLE, ADDED])
def test_a_first_write_is_taken_when_the_coordinator_says_that_its_transaction_goes_on(version: int) -> None:
    front = Front()
    front.produce((0, front.batch(0)), version=version)
    assert front.codes() == []
    ((broker, message, _),) = front.asked
    (question,) = message.transactions
    assert broker == COORDINATOR
    assert (question.transactional_id, question.producer_id, question.producer_epoch) == ("tx", PRODUCER, EPOCH)
    assert question.verify_only == (version < ADDED)
    front.coordinator_says()
    assert front.codes() == [ErrorCode.NONE]
    front.produce((0, front.batch(1)), version=version)
    assert front.codes() == [ErrorCode.NONE]
    assert not front.asked
    assert front.partition().high_watermark == 2


def test_all_partitions_of_a_request_are_one_question_and_so_are_all_producers_of_a_turn() -> None:
    front = Front()
    front.clock.run_soon()
    front.produce((0, front.batch(0)), (1, front.batch(0)))
    ((_, message, _),) = front.asked
    assert [(topic.name, list(topic.partitions)) for topic in message.transactions[0].topics] == [("orders", [0, 1])]
    front.coordinator_says()
    assert front.codes() == [ErrorCode.NONE] * 2


@proves("T1")
def test_what_comes_behind_a_first_write_waits_for_it_and_keeps_its_order() -> None:
    front = Front()
    for sequence in range(4):
        front.produce((0, front.batch(sequence, value=b"%d" % sequence)))
    front.produce((0, front.batch(0, producer=PRODUCER + 1)), name="other")
    assert front.codes() == []
    assert len(front.asked) == 2
    front.coordinator_says()
    assert front.codes() == [ErrorCode.NONE] * 4
    front.coordinator_says()
    assert front.codes() == [ErrorCode.NONE]
    assert front.partition().high_watermark == 5


@pytest.mark.parametrize(
    ("said", "version", "heard"),
    [
        (ErrorCode.INVALID_TXN_STATE, VERIFIED, ErrorCode.INVALID_TXN_STATE),
        (ErrorCode.TRANSACTION_ABORTABLE, VERIFIED, ErrorCode.INVALID_TXN_STATE),
        (ErrorCode.TRANSACTION_ABORTABLE, ABORTABLE, ErrorCode.TRANSACTION_ABORTABLE),
        (ErrorCode.INVALID_TXN_STATE, ADDED, ErrorCode.TRANSACTION_ABORTABLE),
        (ErrorCode.PRODUCER_FENCED, ADDED, ErrorCode.INVALID_PRODUCER_EPOCH),
        (ErrorCode.INVALID_PRODUCER_EPOCH, VERIFIED, ErrorCode.INVALID_PRODUCER_EPOCH),
        (ErrorCode.INVALID_PRODUCER_ID_MAPPING, ADDED, ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        (ErrorCode.CONCURRENT_TRANSACTIONS, ADDED, ErrorCode.CONCURRENT_TRANSACTIONS),
        (ErrorCode.CONCURRENT_TRANSACTIONS, ABORTABLE, ErrorCode.NOT_ENOUGH_REPLICAS),
        (ErrorCode.NOT_COORDINATOR, ADDED, ErrorCode.NOT_ENOUGH_REPLICAS),
        (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, VERIFIED, ErrorCode.NOT_ENOUGH_REPLICAS),
        (PeerUnreachable("away"), ADDED, ErrorCode.NOT_ENOUGH_REPLICAS),
    ],
)
def test_what_the_coordinator_says_is_told_by_the_codes_that_the_version_knows(
    said: int | HeadraceError, version: int, heard: int
) -> None:
    front = Front()
    front.produce((0, front.batch(0)), version=version)
    front.produce((0, front.batch(1)), version=version)
    front.coordinator_says(said)
    assert front.codes() == [heard] * 2
    assert front.partition().log.end_offset == 0
    front.produce((0, front.batch(0)), version=version)
    front.coordinator_says()
    assert front.codes() == [ErrorCode.NONE]


def test_a_write_is_answered_though_its_partition_changed_its_role_before_anybody_was_asked() -> None:
    """And the producer has sent it to the new one in the same turn."""
    front = Front()
    was_led = front.partition()
    heard: list[HeadraceError | None] = []
    transaction = Transaction("tx", PRODUCER, EPOCH, Support.ADDED)
    front.first_writes.hold(was_led, transaction, 10, heard.append)
    is_led = front.led.partitions.lead(was_led.log, 2, {BROKER: ""}, revision=2)
    front.first_writes.hold(is_led, transaction, 10, heard.append)
    front.clock.run_soon()
    front.coordinator_says()
    assert len(heard) == 2
    assert (front.first_writes.waiting, front.first_writes.held_bytes) == ({}, 0)


def test_a_coordinator_that_is_not_there_can_be_asked_later() -> None:
    front = Front()
    front.image = front.image_of(-1)
    front.produce((0, front.batch(0)))
    assert front.codes() == [ErrorCode.NOT_ENOUGH_REPLICAS]


@proves("T2")
@pytest.mark.parametrize(
    ("version", "at_once", "code"),
    [
        (VERIFIED, ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.INVALID_TXN_STATE),
        (ADDED, ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.TRANSACTION_ABORTABLE),
    ],
)
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_marker_that_comes_before_the_coordinators_word_has_it_asked_again(
    version: int, at_once: int, code: int, goes_on: bool
) -> None:
    """It may be that of the transaction before, whose end was waited for, or that of this one, which is then over."""
    front = Front()
    front.produce((0, front.batch(0)), version=version)
    front.partition().append_marker(PRODUCER, EPOCH, 1, committed=False, number=1, transaction_version=1)
    front.led.partitions.touch(front.partition())
    front.led.partitions.end_turn()
    front.coordinator_says()
    assert front.codes() == [at_once]
    assert front.partition().last_stable_offset == front.partition().high_watermark == 1
    front.produce((0, front.batch(0)), version=version)
    front.coordinator_says(ErrorCode.NONE if goes_on else ErrorCode.TRANSACTION_ABORTABLE)
    assert front.codes() == [ErrorCode.NONE if goes_on else code]
    assert front.partition().last_stable_offset == 1
    assert front.partition().high_watermark == 1 + goes_on


def test_who_leads_no_more_when_the_coordinator_answers_says_so() -> None:
    front = Front()
    front.produce((0, front.batch(0)))
    front.led.partitions.follow(front.partition().log, 2, COORDINATOR)
    front.coordinator_says()
    assert front.codes() == [ErrorCode.NOT_LEADER_OR_FOLLOWER]


def test_a_request_that_waits_too_long_is_told_so_and_what_comes_again_is_a_duplicate() -> None:
    front = Front()
    front.produce((0, front.batch(0)))
    front.clock.advance(3.1)
    assert front.codes() == [ErrorCode.REQUEST_TIMED_OUT]
    front.produce((0, front.batch(0)))
    front.coordinator_says()
    assert front.codes() == [ErrorCode.NONE]
    assert front.partition().high_watermark == 1


def test_a_transactional_batch_without_a_transactional_id_is_refused() -> None:
    front = Front()
    front.produce((0, front.batch(0)), name=None)
    assert front.codes() == [ErrorCode.INVALID_TXN_STATE]
    assert not front.asked
    front.produce((0, front.batch(0)))
    front.coordinator_says()
    assert front.codes() == [ErrorCode.NONE]
    front.produce((0, front.batch(1)), name=None)  # though the transaction is open now
    front.produce((0, front.batch(1)), (1, front.batch(0)), name=None)
    assert front.codes() == [ErrorCode.INVALID_TXN_STATE] * 3
    assert front.partition().log.end_offset == 1


def test_a_plain_batch_of_a_transactional_producer_is_taken_at_once() -> None:
    front = Front()
    front.produce((0, bytes(kernel.build([(0, None, b"v", ())]))))
    assert front.codes() == [ErrorCode.NONE]
    assert not front.asked


def test_bytes_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front()
    size = len(front.batch(0))
    monkeypatch.setattr(first_writes, "HELD_BYTES", size)
    monkeypatch.setattr(first_writes, "HELD_MOST_BYTES", 2 * size)
    front.produce((0, front.batch(0)))
    front.produce((0, front.batch(1)), (1, front.batch(0)))
    assert front.first_writes.is_full
    assert front.codes() == []
    front.coordinator_says()
    assert front.codes() == [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.NOT_ENOUGH_REPLICAS]
    assert front.first_writes.held_bytes == 0
    assert front.first_writes.waiting == {}


def test_a_connection_that_sent_too_much_is_read_again_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front()
    monkeypatch.setattr(first_writes, "HELD_BYTES", 1)
    front.produce((0, front.batch(0)))
    body = Message(transactional_id="tx", acks=-1, timeout_ms=3000, topic_data=[])
    frame = write_request(apis.PRODUCE, ADDED, 99, "c", encode_request(apis.PRODUCE, ADDED, body))
    assert front.connection.received(memoryview(frame)) == 0
    assert front.wire.paused
    front.coordinator_says()
    assert not front.wire.paused


def test_a_batch_that_is_stored_in_another_codec_is_verified_before(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(compression_type="lz4")
    submitted: list[Any] = []
    recompression: Any = SimpleNamespace(
        is_full=False, submit=lambda _partition, records, _acks, done: submitted.append((bytes(records), done))
    )
    front.led.partitions.recompression = recompression
    front.produce((0, front.batch(0)))
    front.produce((0, front.batch(1)))
    assert not submitted
    front.coordinator_says()
    assert [records for records, _ in submitted] == [front.batch(0), front.batch(1)]


def test_acks_0_waits_too_and_is_never_answered() -> None:
    front = Front()
    front.produce((0, front.batch(0)), acks=0)
    front.coordinator_says()
    assert front.wire.sent == b""
    assert front.partition().high_watermark == 1


@proves("T1")
def test_a_coordinator_on_this_broker_is_asked_without_a_request() -> None:
    coordinating = Coordinating()
    front = Front(coordinator=coordinating.coordinator)
    where = TopicPartition(TRANSACTIONS_TOPIC, 0)
    log = front.led.store.create(where, topic_id(TRANSACTIONS_TOPIC), log_settings({}, {}))
    front.led.partitions.lead(log, 1, {BROKER: ""}, revision=1)
    producer = coordinating.init().reply
    batch = front.batch(0, producer.epoch, producer.producer_id)
    front.produce((0, batch), name="pay-1", version=ABORTABLE)
    assert front.codes() == [ErrorCode.TRANSACTION_ABORTABLE]
    front.produce((0, batch), name="pay-1")
    assert front.codes() == [ErrorCode.NONE]
    assert not front.asked
    described = coordinating.coordinator.describe("pay-1")
    assert described.partitions == (("orders", 0),)
