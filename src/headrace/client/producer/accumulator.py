"""Records gathered into batches: one buffer for each partition, one accumulator for each acks and for ordered records.

    Accumulator          owner of a router (`records.router`), which puts a record into the open batch of its partition
                         and comes here only when it cannot: an unknown topic, a full batch, a full queue
    PartitionBuffer      one partition: its open batch, and its lane, in which batches that are closed wait and travel
    ProducerBatch        one batch, from its first record to its fate
    IncompleteBatches    all batches of a producer whose fate is not known, with their linger and delivery timeouts
    BufferMemory         how much may wait for its acknowledgement

All of it is changed with the reactor's lock held; the router alone puts records into open batches without.
"""

from __future__ import annotations

import math
import random
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from headrace.client.connection.connections import ConnectionPool
from headrace.client.connection.metadata import Topic
from headrace.client.connection.reactor import Reactor, Timer
from headrace.client.errors import QueueFull, UnknownTopic
from headrace.client.producer.lane import Lane, LaneBatch
from headrace.client.producer.options import check_acks
from headrace.client.producer.sticky_partitioner import next_partition
from headrace.errors import HeadraceError, RequestTimedOut
from headrace.records import batch as batches
from headrace.records import kernel
from headrace.records.batch import HEADER_BYTES, TRANSACTIONAL
from headrace.records.builder import Delivery, OpenBatch, Report, SentBatch, as_bytes
from headrace.records.partitioner import partition_for_key
from headrace.records.record import GivenHeaders
from headrace.records.router import PartitionSlot, Quota, Router, TopicSlots

if TYPE_CHECKING:
    from headrace.client.producer.direct import Route
    from headrace.client.producer.request import ProduceTemplate
    from headrace.client.producer.sender import Sender

ENLARGED_WITHIN_S: Final = 1.0
FIRST_BYTES: Final = 4096
NARROW_FOR_S: Final = 60.0
UNPACKED_BYTES: Final = 1 << 31
"""Of a batch that was packed here: no bound but the format's."""

_IDENTITY_AT: Final = 43
_IDENTITY: Final = struct.Struct(">qhi")


class Need(Enum):
    """What somebody waits for before a record can be put into a batch."""

    TOPIC = "a topic"
    ROOM = "room in the queue"


class Driver(Protocol):
    """How those who use a producer wait: on threads whoever waits drives the connections, on asyncio the loop does."""

    router_encodes: bool
    """A send is made once, so its router calls the encoder. Where it is made again after a wait, who makes it does."""

    def until(self, need: Need, done: Callable[[], bool], deadline: float) -> bool:
        """Wait until `done()`; False at the deadline. Where nobody may wait, it raises."""
        ...

    def turn(self) -> None:
        """Let what is ready leave, if the caller is the one to do it."""
        ...

    def changed(self) -> None:
        """What somebody waits for may have come."""
        ...

    def room(self) -> None:
        """There may be room in the queue, outside of any turn."""
        ...

    def wait(self, delivery: Delivery, deadline: float | None) -> None: ...

    def awaited(self, delivery: Delivery) -> Awaitable[Report]: ...


class ProduceResult(SentBatch):
    """What became of a batch, and the way back to it until that is known."""

    pending: ProducerBatch | None


class ProducerBatch(LaneBatch):
    """One batch. It is open, then in its partition's lane, then settled.

    One that is split is settled when all its parts are; they have its number and its deadline.
    """

    __slots__ = (
        "_signed_as",
        "batch",
        "buffer",
        "counted",
        "data",
        "due_at",
        "lent",
        "number",
        "orders",
        "root",
        "settled",
        "unsettled_parts",
    )

    def __init__(self, buffer: PartitionBuffer, room_bytes: int, first_bytes: int = FIRST_BYTES) -> None:
        super().__init__(0, 0.0)
        sent = ProduceResult(buffer.topic, buffer.partition, buffer.accumulator.sender)
        sent.pending = self
        self.batch: OpenBatch = OpenBatch(sent, buffer.accumulator.codec_id, room_bytes, first_bytes)
        """The records, in the format of the log."""
        self.counted = self.batch
        """The batch whose records count in the queue until this one is settled."""
        self.buffer = buffer
        """Of the partition that it goes to; another one's if it is moved."""
        self.number = 0
        """Batches are numbered in the order in which they were opened."""
        self.due_at = 0.0
        """When its linger is over."""
        self.settled = False
        """Its fate is known, and whoever waits for it hears it."""
        self.root: ProducerBatch | None = None
        """The batch that this one is a part of, directly or not."""
        self.unsettled_parts = 1
        """Of a root."""
        self.lent = False
        """An attempt was given up while a connection may still be writing these bytes."""
        self.orders: list[tuple[bytes, Delivery]] = []
        """Of ordered records: the order key and the delivery of each."""
        self.data = bytearray()
        """The batch as it leaves; empty until it first does."""
        self._signed_as: tuple[int, int, int] | None = None

    def sign(self) -> bytearray:
        """The bytes of the batch under the producer id, epoch and sequence that its lane gave it."""
        assert not self.settled
        stamp = (self.producer_id, self.epoch, self.sequence)
        if stamp == self._signed_as:
            return self.data
        self._signed_as = stamp
        if not self.data:
            self.data = self.batch.seal(*stamp, self.buffer.accumulator.attributes)
            return self.data
        if self.lent:
            self.data = bytearray(self.data)
            self.lent = False
        _IDENTITY.pack_into(self.data, _IDENTITY_AT, *stamp)
        batches.sign(self.data)
        return self.data

    def let_go(self) -> None:
        """It is settled: who keeps a delivery keeps none of the bytes."""
        assert isinstance(self.batch.sent, ProduceResult)
        self.batch.sent.pending = None
        self.data = bytearray()

    def split(self, data: bytes, room_bytes: int) -> list[ProducerBatch]:
        """Parts in the place of this batch, which left as `data`: each of at most so many bytes, or of one record.

        Who waits for a record of it waits for the part that the record is in.
        """
        parts: list[ProducerBatch] = []
        for _, timestamp_ms, key, value, headers in kernel.records(data, UNPACKED_BYTES):
            if not parts or parts[-1].batch.append(timestamp_ms, key, value, headers) < 0:
                parts.append(ProducerBatch(self.buffer, room_bytes))
                parts[-1].batch.append(timestamp_ms, key, value, headers)
        root = self.root or self
        root.unsettled_parts += len(parts) - 1
        firsts = []
        first = 0
        for part in parts:
            part.root = root
            part.number, part.due_at, part.deadline = self.number, self.due_at, self.deadline
            part.count = part.batch.count
            part.batch.pinned = self.batch.pinned
            firsts.append((first, part.batch.sent))
            first += part.count
        sent = self.batch.sent
        sent.split(firsts)
        orders, self.orders = self.orders, []
        at = {part.batch.sent: part for part in parts}
        for order_key, delivery in orders:
            now_in, place = sent.part(delivery.place)
            delivery.move(now_in, place)
            at[now_in].orders.append((order_key, delivery))
        self.settled = self is not root
        self.let_go()
        return parts

    def take_out(self, order_keys: set[bytes]) -> tuple[SentBatch, int]:
        """Build it anew without the records of these order keys; gives what they belong to now, and how many they are.

        Nothing of it has left under any sequence.
        """
        assert not self.stamped
        buffer, sender = self.buffer, self.buffer.accumulator.sender
        kept = [pair for pair in self.orders if pair[0] not in order_keys]
        removed = [delivery for order_key, delivery in self.orders if order_key in order_keys]
        records = kernel.records(self.batch.seal())
        sent = ProduceResult(buffer.topic, buffer.partition, sender)
        sent.pending = self
        batch = OpenBatch(sent, sender.options.codec_id, sender.options.batch_bytes)
        for _, delivery in kept:
            _, timestamp_ms, key, value, headers = records[delivery.place]
            delivery.move(sent, batch.append(timestamp_ms, key, value, headers))
        apart = SentBatch(buffer.topic, buffer.partition, sender)
        for place, delivery in enumerate(removed):
            delivery.move(apart, place)
        self.batch, self.orders, self.data, self._signed_as = batch, kept, bytearray(), None
        self.count = batch.count
        return apart, len(removed)


class PartitionBuffer(PartitionSlot):
    """The records of one partition under one acks: in an open batch first, then in batches that wait and travel."""

    def __init__(self, accumulator: Accumulator, topic: str, partition: int) -> None:
        # `topic`, `partition` and `batch`, the open batch as the router sees it, are the router's.
        super().__init__(topic, partition)
        options = accumulator.options
        self.accumulator: Accumulator = accumulator
        self.lane: Lane[ProducerBatch] = Lane(
            topic,
            partition,
            accumulator.acks,
            accumulator.idempotent,
            1 if accumulator.ordered else options.in_flight,
            accumulator.attributes != 0,
        )
        """Batches that are closed, in order: which may leave, under which sequence, and what an answer means."""
        self.open_batch: ProducerBatch | None = None
        """The open batch; its `batch` is that of the router. None between two, and while nobody sends."""
        self.due = False
        """The open batch is to leave as soon as the lane lets it: its linger is over, or it is flushed."""
        self.looked_at = 0.0
        """When the sender looks at this partition again, after a backoff or for want of a leader."""
        self.moved_at: float | None = None
        """Since when batches are in flight to a broker that is not the leader any more."""
        self.room_bytes = options.batch_bytes
        """How large a batch may become."""
        self.narrow_until = 0.0
        """Until then `room_bytes` is smaller than asked for, because larger batches were refused; 0 if it is not."""
        self.template: ProduceTemplate | None = None
        """The request of the last batch that left alone; the next one differs in its records only."""
        self.route: Route | None = None
        """The way to the leader of the last record that was waited for (see `direct`)."""
        self.spares: list[ProducerBatch] = []
        """Batches of one record that were never in the lane, to be used again."""

    def room(self, now: float) -> int:
        """How large a batch may become that is opened now."""
        if self.narrow_until and self.narrow_until <= now:
            self.room_bytes, self.narrow_until = self.accumulator.options.batch_bytes, 0.0
        return self.room_bytes

    def narrow(self, refused: ProducerBatch, now: float) -> int:
        """A batch was refused for its size: for a while none becomes larger than half of it. Gives that size.

        So a topic whose max.message.bytes was lowered does not refuse every batch first.
        """
        half = (HEADER_BYTES + refused.batch.record_bytes) // 2
        self.room_bytes, self.narrow_until = min(half, self.room(now)), now + NARROW_FOR_S
        return self.room_bytes

    @property
    def label(self) -> str:
        return f"{self.topic}-{self.partition}"


class IncompleteBatches:
    """All batches of a producer from their first record until they are settled, in order, with one timer for each end.

    `on_due` hears of every open batch whose linger is over, `on_expired` of every one that is not settled within the
    delivery timeout. Both times are the same for all batches, so the oldest is always the first. A batch is taken out
    when it is closed, or settled, whatever is before it: one that is stuck keeps no other in memory.
    """

    def __init__(
        self,
        reactor: Reactor,
        linger_s: float,
        delivery_timeout_s: float,
        on_due: Callable[[ProducerBatch], None],
        on_expired: Callable[[ProducerBatch], None],
    ) -> None:
        self._reactor = reactor
        self._linger_s = linger_s
        self._delivery_timeout_s = delivery_timeout_s
        self._on_due = on_due
        self._on_expired = on_expired
        self.unsettled: dict[int, ProducerBatch] = {}
        """By number, the oldest first."""
        self.last_number = 0
        """All batches that there are now have numbers up to this one."""
        self._open: dict[int, ProducerBatch] = {}
        self._linger: Timer | None = None
        self._expiry: Timer | None = None

    def add(self, pending: ProducerBatch, now: float) -> None:
        self.last_number = number = self.last_number + 1
        pending.number, pending.due_at, pending.deadline = number, now + self._linger_s, now + self._delivery_timeout_s
        self._open[number] = pending
        self.unsettled[number] = pending
        if self._linger is None:
            self._linger = self._reactor.call_at(pending.due_at, self._lingered)
        if self._expiry is None:
            self._expiry = self._reactor.call_at(pending.deadline, self._expired)

    def closed(self, pending: ProducerBatch) -> None:
        self._open.pop(pending.number, None)

    def settled(self, pending: ProducerBatch) -> None:
        del self.unsettled[pending.number]

    def are_settled(self, up_to: int) -> bool:
        return next(iter(self.unsettled), up_to + 1) > up_to

    def end(self) -> None:
        for timer in (self._linger, self._expiry):
            if timer is not None:
                timer.cancel()

    def _lingered(self) -> None:
        now = self._reactor.now()
        while (first := next(iter(self._open.values()), None)) is not None and first.due_at <= now:
            del self._open[first.number]
            self._on_due(first)
        self._linger = None if first is None else self._reactor.call_at(first.due_at, self._lingered)

    def _expired(self) -> None:
        now = self._reactor.now()
        while (first := next(iter(self.unsettled.values()), None)) is not None and first.deadline <= now:
            self._on_expired(first)
        self._expiry = None if first is None else self._reactor.call_at(first.deadline, self._expired)


class BufferMemory:
    """When a settled batch ceases to count in the queue: at once, or, where it has callbacks, when they have run.

    So callbacks that are slower than the brokers fill the queue, and not the memory. A callback that itself sends into
    a full queue would wait for what only it can bring about: for its thread, batches whose callbacks have not run do
    not count.
    """

    def __init__(self, reactor: Reactor, driver: Driver, quota: Quota) -> None:
        self._reactor = reactor
        self._driver = driver
        self._quota = quota
        self._uncalled: dict[int, OpenBatch] = {}
        """Settled batches that count until their callbacks have run."""
        self._callback_thread: int | None = None
        """The thread in which callbacks run now."""
        self._callback_waits = False
        """A callback waits for room."""

    def has_room(self, needed_bytes: int) -> bool:
        quota = self._quota
        return not quota.records or (
            quota.records < quota.max_records and quota.bytes + needed_bytes <= quota.max_bytes
        )

    @property
    def uncalled_records(self) -> int:
        """Records whose fate is known and that count until their callbacks have run."""
        with self._reactor.lock:
            return sum(counted.count for counted in self._uncalled.values())

    def settle(self, sent: SentBatch, counted: OpenBatch, has_callbacks: bool) -> None:
        """Give back what a batch counts. With the lock."""
        if has_callbacks and not self._callback_waits:
            self._uncalled[id(counted)] = counted
        else:
            self._quota.give_back(counted)
        if has_callbacks:
            self._reactor.run_callback(partial(self.run_callbacks, sent, counted))

    def free_for_callback(self) -> bool:
        """Where callbacks run: count no batch that waits for its callbacks any more. True if there was any."""
        if self._callback_thread != threading.get_ident():
            return False
        with self._reactor.lock:
            uncalled, self._uncalled = self._uncalled, {}
            for counted in uncalled.values():
                self._quota.give_back(counted)
        return bool(uncalled)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for room."""
        in_callback = self._callback_thread == threading.get_ident()
        if in_callback:
            self._callback_waits = True
        try:
            yield
        finally:
            if in_callback:
                self._callback_waits = False

    def run_callbacks(self, sent: SentBatch, counted: OpenBatch | None = None) -> None:
        """Run the callbacks of a batch. Without the lock."""
        outer, self._callback_thread = self._callback_thread, threading.get_ident()
        try:
            sent.run_callbacks()
        finally:
            self._callback_thread = outer
            with self._reactor.lock:
                if counted is not None and self._uncalled.pop(id(counted), None) is not None:
                    self._quota.give_back(counted)
            self._driver.room()


def not_heard_of(pool: ConnectionPool, topic: str, within_s: float) -> HeadraceError:
    """Why a record's topic was waited for in vain."""
    return pool.first_contact.error() or RequestTimedOut(
        f"nothing was heard of topic {topic!r} within {within_s:g} s: are the brokers running?"
    )


class NoRoom(Exception):
    """The queue is full, and this is no place to wait."""

    def __init__(self, needed_bytes: int) -> None:
        super().__init__()
        self.needed_bytes = needed_bytes


class _TopicLookup:
    """What is heard of a topic; several may wait for it."""

    def __init__(self, sender: Sender) -> None:
        self.since = sender.reactor.now()
        self.heard: Topic | HeadraceError | None = None
        self._sender = sender

    def hear(self, heard: Topic | HeadraceError) -> None:
        self.heard = heard
        self._sender.driver.changed()


class Accumulator:
    """The buffers of one acks: ordered records have buffers of their own, as each acks has.

    `may_wait` is False while its owner holds the lock: what would wait raises NoRoom then.
    """

    def __init__(self, sender: Sender, acks: int, ordered: bool) -> None:
        options = sender.options
        self.sender = sender
        self.options = options
        self.acks = acks
        self.ordered = ordered
        self.idempotent = options.is_idempotent(acks)
        self.codec_id = options.codec_id
        self.attributes = TRANSACTIONAL if options.transactional_id is not None else 0
        """Of its batches, beside the codec."""
        # The encoder is the user's code: it runs once for a record, and never with the lock held.
        encoder = options.encoder if sender.driver.router_encodes and not ordered else None
        self.own_router = Router(self, sender.reactor.lock, sender.quota, acks, options.max_record_bytes, encoder)
        self.may_wait = True
        self.producer_ids = sender.producer_ids(self._on_producer_id)
        self._topic_ids: dict[str, bytes] = {}
        self._lookups: dict[str, _TopicLookup] = {}
        self._partition_wanted: dict[tuple[str, int], float] = {}

    def buffers(self, topic: str) -> list[PartitionBuffer]:
        slots = self.own_router.topics.get(topic)
        return [] if slots is None else slots.slots

    def append_ordered(
        self,
        topic: str,
        value: bytes | str | None,
        order_key: bytes | str,
        *,
        key: bytes | str | None,
        headers: GivenHeaders | None,
        timestamp_ms: int | None,
        callback: Callable[[Delivery], object] | None,
    ) -> Delivery:
        """Put a record into the batch of its order key, which none overtakes, not even when one before it failed.

        The order key alone chooses the partition, by the number of partitions that the topic had when it was first
        used, so a key stays where it is when the topic grows. One batch of a partition is out at a time. The value
        is encoded already.
        """
        if type(order_key) is not bytes:
            order_key = as_bytes(order_key, "order key")
        if topic not in self.own_router.topics:
            self.find(topic, -1)
        while True:
            with self.sender.reactor.lock:
                partition = partition_for_key(order_key, self._ordered_partitions(topic))
                self.may_wait = False
                try:
                    delivery = self.own_router.send_async(
                        topic,
                        value,
                        key=key,
                        headers=headers,
                        partition=partition,
                        timestamp_ms=timestamp_ms,
                        callback=callback,
                    )
                    sent = delivery.sent
                    assert isinstance(sent, ProduceResult)
                    assert sent.pending is not None
                    sent.pending.orders.append((order_key, delivery))
                    return delivery
                except NoRoom as full:
                    needed_bytes = full.needed_bytes
                finally:
                    self.may_wait = True
            refused = self.when_full(topic, needed_bytes)
            if refused is not None:
                if callback is not None:
                    refused.add_callback(callback)
                return refused

    def _ordered_partitions(self, topic: str) -> int:
        """As many as there were at first, but when the topic was made anew with fewer."""
        count, kept_counts = len(self.buffers(topic)), self.sender.ordered_partitions
        kept = kept_counts.setdefault(topic, count)
        if kept > count:
            kept = kept_counts[topic] = count
        return kept

    # What a router asks of its owner.

    def router(self, acks: int) -> Router:
        check_acks(acks)
        return self.sender.accumulator(acks, self.ordered).own_router

    def find(self, topic: str, partition: int) -> None:
        """Wait until the topic is known, and has the partition."""
        refusal = self.own_router.closed
        if refusal is not None:
            raise refusal.with_traceback(None)
        sender, metadata = self.sender, self.sender.pool.metadata
        if topic not in self.own_router.topics:
            self._look_up(topic)
        if partition < len(self.buffers(topic)):
            return
        with sender.reactor.lock:
            asked_at = self._partition_wanted.setdefault((topic, partition), sender.reactor.now())
            metadata.stale(topic)
        there = sender.driver.until(
            Need.TOPIC, lambda: partition < len(self.buffers(topic)), asked_at + ENLARGED_WITHIN_S
        )
        self._partition_wanted.pop((topic, partition), None)
        if not there:
            raise UnknownTopic(topic, partition, len(self.buffers(topic)))

    def roll_batch(self, buffer: PartitionSlot, batch: OpenBatch | None) -> None:
        assert isinstance(buffer, PartitionBuffer)
        sender = self.sender
        with sender.reactor.lock:
            if buffer.batch is not batch or self.own_router.closed is not None:
                return
            if batch is None:
                self.open(buffer)
                return
            self.close(buffer)
            sender.make_ready(buffer)
        sender.driver.turn()

    def lone(self, buffer: PartitionBuffer, needed_bytes: int) -> ProducerBatch:
        try:
            return buffer.spares.pop()
        except IndexError:
            return ProducerBatch(buffer, self.options.batch_bytes, HEADER_BYTES + needed_bytes)

    def when_full(self, topic: str, needed_bytes: int) -> Delivery | None:
        """None when there is room again; otherwise the delivery of a record that was dropped."""
        sender, policy_ms = self.sender, self.options.when_full
        if sender.memory.free_for_callback():
            return None
        if not self.may_wait:
            raise NoRoom(needed_bytes)
        if policy_ms != 0:
            with sender.reactor.lock:
                sender.begin_flush()
            deadline = math.inf if policy_ms < 0 else sender.reactor.now() + policy_ms / 1000
            with sender.memory.waiting():
                if sender.driver.until(Need.ROOM, lambda: sender.memory.has_room(needed_bytes), deadline):
                    return None
        return self.drop(topic)

    def drop(self, topic: str) -> Delivery:
        """The delivery of a record for which there is no room."""
        sender, policy_ms = self.sender, self.options.when_full
        quota = sender.quota
        sender.count.dropped += 1
        waited = f" for {policy_ms:g} ms" if policy_ms > 0 else ""
        sent = SentBatch(topic, -1, sender)
        sent.fail(
            QueueFull(
                f"a record for {topic} was dropped: {quota.records} records, {quota.bytes} bytes wait for their "
                f"acknowledgement{waited}; raise queue_bytes or queue_records, send slower, or set when_full=-1"
            )
        )
        return Delivery(sent, 0, time.time_ns() // 1_000_000)

    # Batches.

    def open(self, buffer: PartitionBuffer, pending: ProducerBatch | None = None) -> None:
        """Give a partition a batch to put records into."""
        now = self.sender.reactor.now()
        pending = pending or ProducerBatch(buffer, buffer.room(now))
        buffer.open_batch, buffer.batch, buffer.due = pending, pending.batch, False
        self.sender.incomplete.add(pending, now)

    def close(self, buffer: PartitionBuffer) -> None:
        """Close a partition's open batch: it waits in its lane from now on."""
        pending = buffer.open_batch
        assert pending is not None
        buffer.open_batch, buffer.batch, buffer.due = None, None, False
        self.sender.incomplete.closed(pending)
        self.move_on(buffer)
        batch = pending.batch
        if not batch.count:
            self.sender.complete(pending)
            return
        pending.count, pending.movable = batch.count, not batch.pinned and not self.ordered
        buffer.lane.add(pending)

    # Topics and partitions.

    def update_topic(self, topic: Topic) -> None:
        """The topic as it is now: buffers for partitions that are new, none for those that are gone."""
        count = len(topic.partitions)
        slots = self.own_router.topics.get(topic.name)
        if slots is None:
            slots = TopicSlots(topic.name, [PartitionBuffer(self, topic.name, index) for index in range(count)])
            self._topic_ids[topic.name] = topic.topic_id
            self._stick_to_next(slots, random.randrange(count))
            self.own_router.topics[topic.name] = slots
            return
        for index in range(len(slots.slots), count):
            slots.slots.append(PartitionBuffer(self, topic.name, index))
        if self._topic_ids[topic.name] != topic.topic_id:
            self._topic_ids[topic.name] = topic.topic_id
            for buffer in slots.slots:
                buffer.lane.doubt()
            del slots.slots[count:]
            self._stick_to_next(slots, 0)

    def move_on(self, buffer: PartitionBuffer) -> None:
        """A batch of the partition leaves: records without a key go to another one now."""
        slots = self.own_router.topics.get(buffer.topic)
        if slots is not None and slots.sticky is buffer:
            self._stick_to_next(slots, buffer.partition)

    def _stick_to_next(self, slots: TopicSlots, current: int) -> None:
        """Let records without a key go to the next good partition (see `sticky_partitioner`)."""
        count = len(slots.slots)
        if count > 1:
            metadata, avoided = self.sender.pool.metadata, self.sender.avoided()
            following = (current + 1) % count
            if avoided or metadata.leader(slots.topic, following) is None:
                following = next_partition(current, count, partial(metadata.leader, slots.topic), avoided)
            slots.sticky = slots.slots[following]
        elif count:
            slots.sticky = slots.slots[0]

    def _look_up(self, topic: str) -> None:
        sender, within_s = self.sender, self.options.delivery_timeout_ms / 1000
        with sender.reactor.lock:
            lookup = self._lookups.get(topic)
            if lookup is None:
                lookup = self._lookups[topic] = _TopicLookup(sender)
                sender.pool.metadata.want(topic, create=True, on_known=lookup.hear, within_s=within_s)
        known = sender.driver.until(Need.TOPIC, lambda: lookup.heard is not None, lookup.since + within_s)
        with sender.reactor.lock:
            self._lookups.pop(topic, None)
            if not known or lookup.heard is None:
                raise not_heard_of(sender.pool, topic, within_s)
            if isinstance(lookup.heard, HeadraceError):
                raise lookup.heard
            self.update_topic(lookup.heard)

    def _on_producer_id(self) -> None:
        """A producer id has come, or it is time to ask again."""
        for topic in self.own_router.topics:
            for buffer in self.buffers(topic):
                if buffer.lane.wants_producer_id and buffer.lane.waiting:
                    self.sender.make_ready(buffer)
