"""A simulated producer: idempotent, acks=-1, with several requests under way on each connection.

A request has at most one batch for each partition that its broker leads. What was not answered, or refused for now, is
sent again until it is answered, to whoever leads by then, each partition's batches in the order of their sequences.
Clients differ in how they do that: Java's sends what failed one batch at a time, the next when that is answered;
librdkafka sends all of it at once again, in order.

A batch that is out of order though everything before it was acknowledged when it was sent tells that the log has lost
something. Where the topic's level allows that, Java's client goes on in the next epoch, librdkafka ends with a fatal
error and its program goes on with a new producer. They also do where logs may forget a producer: a replica that a move
has made knows only of batches that were not deleted, here as in Kafka.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from headrace.errors import ErrorCode
from headrace.records import kernel
from headrace.records.record import NewRecord
from headrace.simulator.connection import Client, Clients
from headrace.simulator.contents import content_of, key_of
from headrace.simulator.history import Batch, Violation
from headrace.simulator.leaders import Leaders
from headrace.simulator.machine import Machine
from headrace.storage.log import TopicPartition
from headrace.wire import api
from headrace.wire.message import Message

JAVA: Final = "java"
LIBRDKAFKA: Final = "librdkafka"
BROKER_TIMEOUT_MS: Final = 1000
ALL_IN_SYNC: Final = -1
NEW_SHARE: Final = 0.1
"""Of batches that find nothing on its way, those before which the program is started again, with a new id."""

SEQUENCE_FAULTS: Final = frozenset(
    {ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.UNKNOWN_PRODUCER_ID}
)
RETRIABLE: Final = frozenset(
    {
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.KAFKA_STORAGE_ERROR,
    }
)


@dataclass(slots=True, eq=False)
class Sending:
    """One batch until it is acknowledged."""

    batch: Batch
    records: list[NewRecord]
    built: bytes = b""
    sequence: int = 0
    tries: int = 0
    first_sent_at: float = 0.0
    under_way: bool = False
    broker: int = -1
    """That it was sent to the last time."""
    was_first: bool = False
    """Whether all before it were acknowledged when it was sent the last time."""


@dataclass(slots=True, eq=False)
class Lane:
    """One partition's batches that are not acknowledged, in the order of their sequences."""

    where: TopicPartition
    forgettable: bool = False
    """Whether a log may come to lead that does not know of what the one before has answered for."""
    producer_id: int = -1
    epoch: int = 0
    next_sequence: int = 0
    waiting: list[Sending] = field(default_factory=list)
    known: bool = False
    """Whether the log has answered for one of its batches."""
    begins_anew: bool = False
    not_before: float = 0.0

    def next(self, broker: int, now: float, *, one_by_one: bool, connected: bool) -> Sending | None:
        """What may be sent to that broker now. A log that has not heard of a producer takes any sequence, here as in
        Kafka: as long as it may not be known, nothing is sent to a second broker while the first has not answered, nor
        on a second connection while what was lost with the first is not told.
        """
        if self.begins_anew or now < self.not_before:
            return None
        for place, sending in enumerate(self.waiting):
            if sending.under_way:
                if (self.forgettable or not self.known) and (sending.broker != broker or not connected):
                    return None
                continue
            return None if place and sending.tries and one_by_one else sending
        return None

    def add(self, sending: Sending) -> None:
        self.waiting.append(sending)
        self._build(sending)

    def begin_anew(self, producer_id: int, epoch: int) -> None:
        """Number again all that is not acknowledged, under another id or epoch."""
        self.producer_id, self.epoch, self.next_sequence = producer_id, epoch, 0
        self.known = self.begins_anew = False
        for sending in self.waiting:
            sending.tries = 0
            self._build(sending)

    def _build(self, sending: Sending) -> None:
        sending.sequence = self.next_sequence
        self.next_sequence += len(sending.records)
        sending.built = bytes(
            kernel.build(
                sending.records,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                base_sequence=sending.sequence,
            )
        )


Parcel = list[tuple[Lane, Sending]]


class Producer:
    """One producer of all partitions of a topic."""

    def __init__(
        self,
        clients: Clients,
        topic: str,
        partitions: int,
        number: int,
        in_flight: int,
        kind: str,
        pause_seconds: float,
        *,
        keyed: bool = False,
        forgettable: bool = False,
    ) -> None:
        self._clients = clients
        self._topic = topic
        self._number = number
        self._in_flight = in_flight
        self._kind = kind
        self._keyed = keyed
        self._pause_seconds = pause_seconds
        self._random = random.Random(clients.random.random())
        self._client = Client(clients, f"producer {number}")
        self._leaders = Leaders(clients, self._client, (topic,), self._random, self._pump)
        self._lanes = [Lane(TopicPartition(topic, index), forgettable) for index in range(partitions)]
        self._under_way: dict[int, int] = {}
        """Requests by broker."""
        self._made = 0
        self._stopped = False
        self._draw_id()

    @property
    def done(self) -> bool:
        return self._stopped and not self.waiting

    @property
    def waiting(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes)

    def stop(self) -> None:
        """Make no new batches."""
        self._stopped = True

    def make(self) -> None:
        """One more batch."""
        lane = self._random.choice(self._lanes)
        if self._stopped or lane.producer_id < 0 or len(lane.waiting) >= 2 * self._in_flight:
            return
        if lane.known and not lane.waiting and self._random.random() < NEW_SHARE:
            lane.begins_anew = True
            self._draw_id(lane)
        count = self._random.choice((1, 1, 2, 5))
        batch = (self._number, self._made)
        self._made += 1
        now_ms = self._clients.clock.wall_ms()
        records: list[NewRecord] = [
            (
                now_ms,
                key_of(batch, nth) if self._keyed else None,
                content_of(batch, nth, self._random.randrange(120)),
                [],
            )
            for nth in range(count)
        ]
        lane.add(Sending(batch, records))
        self._pump()

    # Ids.

    def _draw_id(self, took: Lane | None = None) -> None:
        """A producer id from some broker, for all lanes or one that begins anew."""

        def answered(answer: Message | None) -> None:
            if answer is None or answer.error_code:
                self._later(lambda: self._draw_id(took))
                return
            for lane in self._lanes if took is None else [took]:
                lane.begin_anew(answer.producer_id, answer.producer_epoch)
            self._pump()

        message = Message(transactional_id=None, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1)
        self._client.call(self._clients.some_broker(self._random), api.INIT_PRODUCER_ID, message, answered)

    def _later(self, call: Callable[[], None]) -> None:
        self._clients.clock.call_later(self._pause_seconds * self._random.uniform(0.5, 1.5), call)

    # Sending.

    def _pump(self) -> None:
        """Send what may be sent."""
        now = self._clients.clock.now()
        by_broker: dict[int, list[Lane]] = {}
        for lane in self._lanes:
            leader = self._leaders.leader(lane.where)
            if leader is not None and lane.waiting:
                by_broker.setdefault(leader, []).append(lane)
        one_by_one = self._kind == JAVA
        for broker, lanes in by_broker.items():
            while self._under_way.get(broker, 0) < self._in_flight:
                connected = self._client.is_connected(broker)
                found = ((lane, lane.next(broker, now, one_by_one=one_by_one, connected=connected)) for lane in lanes)
                parcel = [(lane, sending) for lane, sending in found if sending is not None]
                if not parcel:
                    break
                self._send(broker, parcel)

    def _send(self, broker: int, parcel: Parcel) -> None:
        self._under_way[broker] = self._under_way.get(broker, 0) + 1
        for lane, sending in parcel:
            sending.under_way = True
            sending.broker = broker
            sending.first_sent_at = sending.first_sent_at or self._clients.clock.now()
            sending.tries += 1
            sending.was_first = lane.waiting[0] is sending
        rows = [Message(index=lane.where.partition, records=sending.built) for lane, sending in parcel]
        message = Message(
            transactional_id=None,
            acks=ALL_IN_SYNC,
            timeout_ms=BROKER_TIMEOUT_MS,
            topic_data=[Message(name=self._topic, partition_data=rows)],
        )
        self._client.call(
            broker,
            api.PRODUCE,
            message,
            lambda answer: self._answered(broker, parcel, answer),
            decided=lambda answer, machine: self._decided(parcel, answer, machine),
        )

    def _decided(self, parcel: Parcel, answer: Message, machine: Machine) -> None:
        """A broker has answered: what it acknowledges is safe at that offset."""
        for (lane, sending), row in zip(parcel, _rows(answer), strict=True):
            if not row.error_code:
                epoch = self._clients.epoch(machine, lane.where)
                count, at_ms = len(sending.records), sending.records[0][0]
                synced = self._clients.is_synced(machine, lane.where, sending.first_sent_at)
                self._clients.history.acknowledged(
                    lane.where, sending.batch, count, row.base_offset, epoch, machine.life, at_ms, synced=synced
                )

    def _answered(self, broker: int, parcel: Parcel, answer: Message | None) -> None:
        self._under_way[broker] -= 1
        rows = [None] * len(parcel) if answer is None else _rows(answer)
        for (lane, sending), row in zip(parcel, rows, strict=True):
            sending.under_way = False
            if row is not None and self._is_done(lane, sending, row.error_code):
                lane.waiting.remove(sending)
                lane.known = True
            else:
                self._hold(lane)
                if row is not None:
                    self._refused(lane, sending, row.error_code)
            self._renumber(lane)
        self._pump()

    def _hold(self, lane: Lane) -> None:
        """Something of it failed: look who leads, and wait a little."""
        clock = self._clients.clock
        lane.not_before = clock.now() + self._pause_seconds * self._random.uniform(0.5, 1.5)
        clock.call_at(lane.not_before, self._pump)
        self._leaders.refresh()

    def _is_done(self, lane: Lane, sending: Sending, code: int) -> bool:
        if code != ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            return code == ErrorCode.NONE
        if sending.tries == 1 and not self._clients.history.may_lose(lane.where):
            raise Violation(f"{lane.where}: batch {sending.batch} was sent once and is told to be a duplicate")
        return True

    def _refused(self, lane: Lane, sending: Sending, code: int) -> None:
        """If it is out of order: is that because one before it failed, or is there a gap?"""
        if code not in SEQUENCE_FAULTS and code not in RETRIABLE:
            raise Violation(f"{lane.where}: batch {sending.batch} is refused for good: {code}")
        if code not in SEQUENCE_FAULTS or not sending.was_first:
            return
        history = self._clients.history
        if not (lane.forgettable or history.may_lose(lane.where) or history.may_repeat(lane.where)):
            raise Violation(
                f"{lane.where}: batch {sending.batch} with sequence {sending.sequence} is told {code}, "
                "though all before it were acknowledged"
            )
        lane.begins_anew = True

    def _renumber(self, lane: Lane) -> None:
        """Once nothing of it is under way."""
        if not lane.begins_anew or any(sending.under_way for sending in lane.waiting):
            return
        if self._kind == JAVA:
            lane.begin_anew(lane.producer_id, lane.epoch + 1)
        else:
            self._draw_id(lane)


def _rows(answer: Message) -> list[Message]:
    return list(answer.responses[0].partition_responses)
