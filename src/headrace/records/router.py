# cython: boundscheck=False, wraparound=False, cdivision=True
"""From (topic, key, partition) to the open batch, and the record into it: the hot path of sending.

    Router(owner, lock, quota, acks=-1, max_record_bytes=1_048_576, encoder=None)
        .topics: dict[str, TopicSlots]     .closed: HeadraceError | None (raised by every send once set)
        .send_async(topic, value, *, key=None, headers=None, partition=None, timestamp_ms=None, acks=None,
                    callback=None) -> Delivery
        .send_lone(topic, value, key, headers, partition, timestamp_ms) -> Delivery | Lone
            As `send_async`, but where no batch is open for the partition, the record gets one for itself, which no
            slot has and the quota does not count.
    Quota(max_bytes, max_records)      .bytes  .records  .take(batch)  .give_back(batch); one for a whole producer
    TopicSlots(topic, slots: list[PartitionSlot])   .slots  .sticky: the slot where records without key and partition go
    PartitionSlot(topic, partition)    .batch: OpenBatch | None. May be subclassed: the sender's state goes there.

What `owner` (the sender) provides; all of it is called without `lock`, and may raise instead:

    find(topic, partition)           the topic is unknown, or has no such partition (-1: none was named): make
                                     `router.topics` know it, then return, and the record is tried again
    roll_batch(slot, batch)          `slot.batch` was `batch` (None, or one without room): with the lock, and only if it
                                     still is, set `slot.batch` to a new one if there was none, else take it away and
                                     move `sticky` on if the slot is that one. Then return, and the record is tried
                                     again
    when_full(topic, bytes) -> Delivery | None   the quota is used up: None to try again, or a delivery that has failed
    lone(slot, bytes) -> Lone        something with a `batch` that is empty and nobody else's, and has room for so much
    router(acks) -> Router           for a send that asks for other acks than this router's

`Router.send_async` can be the producer's own method (`self.send_async = router.send_async`), which saves a call. A
record counts in the quota from when it is put into a batch until the sender gives that batch back.

The way of a record takes no lock where this is compiled: nothing on it runs Python code, so no other thread comes in
between. Uncompiled, it holds `lock`. Whoever changes slots holds `lock` in both.

The same file runs as Python and, with the C types of `router.pxd`, compiled: `compiled` tells which one runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from headrace.errors import BatchTooLarge, HeadraceError, InvalidRecord
from headrace.records.builder import Delivery, OpenBatch, as_bytes, encoded_headers
from headrace.records.record import GivenHeaders

try:
    import cython
except ImportError:
    from headrace.records import cython_stub as cython

if not cython.compiled:  # else they are constants and inlined functions, as the .pxd says
    from headrace.records.partitioner import murmur2

compiled: Final = not __file__.endswith((".py", ".pyc"))

RECORD_OVERHEAD_BYTES: Final = 32
"""As much as the numbers of a record can take beside key, value and headers; never less."""


class Owner(Protocol):
    """The sender that slots belong to; see the module."""

    def find(self, topic: str, partition: int) -> None: ...
    def roll_batch(self, slot: PartitionSlot, batch: OpenBatch | None) -> None: ...
    def when_full(self, topic: str, needed_bytes: int) -> Delivery | None: ...
    def lone(self, slot: Any, needed_bytes: int) -> Any: ...
    def router(self, acks: int) -> Router: ...


def now_ms() -> int:
    if cython.compiled:
        clock_gettime(CLOCK_REALTIME, cython.address(moment))  # type: ignore[name-defined] # noqa: F821
        return moment.tv_sec * 1000 + moment.tv_nsec // 1_000_000  # type: ignore[name-defined,no-any-return] # noqa: F821
    return time.time_ns() // 1_000_000


def as_int64(given: Any, what: str, topic: str) -> int:
    """A number of a record, as far as the format reaches."""
    try:
        number: int = given
        if not cython.compiled and not -(2**63) <= number < 2**63:
            raise OverflowError
    except OverflowError:
        raise InvalidRecord(f"a record for {topic} has {what}={given}, out of range") from None
    return number


class Quota:
    """How much may wait for its acknowledgement, over all routers of a producer."""

    def __init__(self, max_bytes: int, max_records: int) -> None:
        self.max_bytes = max_bytes
        self.max_records = max_records
        self.bytes = 0
        self.records = 0

    def take(self, batch: OpenBatch) -> None:
        """A batch whose records `send_async` has not counted."""
        self.bytes += batch.record_bytes
        self.records += batch.count

    def give_back(self, batch: OpenBatch) -> None:
        """The batch is done."""
        self.bytes -= batch.record_bytes
        self.records -= batch.count


class PartitionSlot:
    """The records that go to one partition; `batch` is the one that takes them now."""

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.batch: OpenBatch | None = None


class TopicSlots:
    """The slots of a topic, by partition."""

    def __init__(self, topic: str, slots: list[Any]) -> None:
        self.topic = topic
        self.slots = slots
        self.sticky: PartitionSlot = slots[0]


class Router:
    """From (topic, key, partition) to the open batch, and the record into it."""

    def __init__(
        self,
        owner: Owner,
        lock: AbstractContextManager[Any],
        quota: Quota,
        acks: int = -1,
        max_record_bytes: int = 1 << 20,
        encoder: Callable[[Any], bytes | str | None] | None = None,
    ) -> None:
        self.owner = owner
        self.lock = lock
        self.quota = quota
        self.acks = acks
        self.max_record_bytes = max_record_bytes
        self.encoder = encoder
        self.topics: dict[str, TopicSlots] = {}
        self.closed: HeadraceError | None = None

    def send_async(
        self,
        topic: str,
        value: Any,
        *,
        key: bytes | str | None = None,
        headers: GivenHeaders | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        acks: int | None = None,
        callback: Callable[[Delivery], object] | None = None,
    ) -> Delivery:
        """Put a record into the batch of its partition; it leaves when the batch is full or its interval is over.

        The record goes to `partition`, else to the partition of its key's hash, else where the topic's next batch goes.
        """
        if acks is not None and acks != self.acks:
            return self.owner.router(acks).send_async(
                topic,
                value,
                key=key,
                headers=headers,
                partition=partition,
                timestamp_ms=timestamp_ms,
                callback=callback,
            )
        delivery: Delivery = self.send(topic, value, key, headers, partition, timestamp_ms, callback, False)
        return delivery

    def send_lone(
        self,
        topic: str,
        value: Any,
        key: bytes | str | None,
        headers: GivenHeaders | None,
        partition: int | None,
        timestamp_ms: int | None,
    ) -> Any:
        """Put a record into the batch of its partition if there is one; otherwise make one of this record alone."""
        return self.send(topic, value, key, headers, partition, timestamp_ms, None, True)

    def send(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: GivenHeaders | None,
        partition: int | None,
        timestamp_ms: int | None,
        callback: Callable[[Delivery], object] | None,
        lone: bool,
    ) -> Any:
        if self.encoder is not None:
            value = self.encoder(value)
        if value is not None and type(value) is not bytes:
            value = as_bytes(value, "value")
        if key is not None and type(key) is not bytes:
            key = as_bytes(key, "key")
        tail = encoded_headers(headers) if headers else None
        at_ms = now_ms() if timestamp_ms is None else as_int64(timestamp_ms, "timestamp_ms", topic)
        chosen = -1 if partition is None else as_int64(partition, "partition", topic)
        if chosen < 0 and partition is not None:
            raise InvalidRecord(f"a record for {topic} names partition {partition}: the first one is 0")
        size = RECORD_OVERHEAD_BYTES
        if key is not None:
            size += len(key)
        if value is not None:
            size += len(value)
        if tail is not None:
            size += len(tail)
        if size > self.max_record_bytes:
            raise BatchTooLarge(
                f"a record of {size} bytes for {topic}: at most {self.max_record_bytes} are sent; raise "
                "max_record_bytes here and max.message.bytes of the topic, or send less"
            )
        while True:
            if cython.compiled:
                found = self.put(topic, key, value, tail, chosen, at_ms, size)
            else:
                with self.lock:
                    found = self.put(topic, key, value, tail, chosen, at_ms, size)
            if type(found) is Delivery:
                if callback is not None:
                    found.add_callback(callback)
                return found
            if found is None:
                self.owner.find(topic, chosen)
            elif found is self.quota:
                refused = self.owner.when_full(topic, size)
                if refused is not None:
                    if callback is not None:
                        refused.add_callback(callback)
                    return refused
            elif lone and found.batch is None:
                single = self.owner.lone(found, size)
                batch = single.batch
                batch.put(at_ms, key, value, tail)
                batch.pinned = chosen >= 0 or key is not None
                return single
            else:
                self.owner.roll_batch(found, found.batch)

    def put(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        tail: bytes | None,
        partition: int,
        at_ms: int,
        size: int,
    ) -> Any:
        """The delivery, or what is in its way: the slot, the quota, or None for a partition that is not known."""
        if self.closed is not None:
            # Here, where no other thread comes in between: what is in a batch by then is sent by a close.
            raise self.closed.with_traceback(None)
        slots = self.topics.get(topic)
        if slots is None:
            return None
        quota = self.quota
        if quota.records > 0 and (quota.records >= quota.max_records or quota.bytes + size > quota.max_bytes):
            return quota
        count = len(slots.slots)
        if partition >= count or count == 0:
            return None
        if partition >= 0:
            slot = slots.slots[partition]
        elif key is not None:
            partition = (murmur2(key, 0, len(key)) & 0x7FFFFFFF) % count
            slot = slots.slots[partition]
        else:
            slot = slots.sticky
        batch = slot.batch
        if batch is None:
            return slot
        before = batch.size
        place = batch.put(at_ms, key, value, tail)
        if place < 0:
            return slot
        quota.bytes += batch.size - before
        quota.records += 1
        if partition >= 0:
            batch.pinned = True
        delivery: Delivery = Delivery.__new__(Delivery)
        delivery.sent = batch.sent
        delivery.place = place
        delivery.timestamp_ms = at_ms
        return delivery
