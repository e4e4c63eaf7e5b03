"""Records in the order of a key: none overtakes one before it, not even one that failed.

The order key alone chooses the partition, by the number of partitions that the topic had when it was first used, so a
key stays where it is when the topic grows. One batch of a partition is out at a time. When it fails, the records of its
keys that wait behind it fail as well: they are taken out of their batches, which are built anew from the others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.client.producer.desk import Desk, NoRoom
from headrace.client.producer.errors import NotDelivered
from headrace.client.producer.track import Load, Sent
from headrace.errors import HeadraceError
from headrace.records import kernel
from headrace.records.builder import Delivery, OpenBatch, SentBatch
from headrace.records.partitioner import partition_for_key
from headrace.records.record import Header

if TYPE_CHECKING:
    from headrace.client.producer.sender import Sender


class Ordered:
    """Takes records with an order key."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._partition_counts: dict[str, int] = {}

    def send(
        self,
        topic: str,
        value: Any,
        order_key: bytes,
        *,
        key: bytes | None,
        headers: Sequence[Header] | None,
        timestamp_ms: int | None,
        acks: int,
        callback: Callable[[Delivery], object] | None,
    ) -> Delivery:
        desk = self._sender.desk(acks, ordered=True)
        if topic not in desk.router_here.topics:
            desk.find(topic, -1)
        while True:
            with self._sender.reactor.lock:
                partition = partition_for_key(order_key, self._partition_count(desk, topic))
                desk.may_wait = False
                try:
                    delivery = desk.router_here.send_async(
                        topic,
                        value,
                        key=key,
                        headers=headers,
                        partition=partition,
                        timestamp_ms=timestamp_ms,
                        callback=callback,
                    )
                    sent = delivery.sent
                    assert isinstance(sent, Sent)
                    assert sent.load is not None
                    sent.load.orders.append((order_key, delivery))
                    return delivery
                except NoRoom as full:
                    needed_bytes = full.needed_bytes
                finally:
                    desk.may_wait = True
            refused = desk.when_full(topic, needed_bytes)
            if refused is not None:
                if callback is not None:
                    refused.add_callback(callback)
                return refused

    def _partition_count(self, desk: Desk, topic: str) -> int:
        """As many as there were at first, but when the topic was made anew with fewer."""
        count = len(desk.tracks(topic))
        kept = self._partition_counts.setdefault(topic, count)
        if kept > count:
            kept = self._partition_counts[topic] = count
        return kept


def hold_back(sender: Sender, failed: Load, reason: HeadraceError) -> None:
    """Fail what waits behind a batch that failed, record by record, for the keys that it held."""
    keys = {order_key for order_key, _ in failed.orders}
    track = failed.track
    error = NotDelivered(
        f"records for {track.label} were not sent: an earlier one of the same order key failed ({reason})", reason
    )
    if track.load is not None:
        sender.seal(track)
        sender.make_ready(track)
    for parcel in list(track.lane.waiting):
        load = parcel.content
        if not isinstance(load, Load) or load.settled or all(order_key not in keys for order_key, _ in load.orders):
            continue
        if parcel.stamped:
            # Part of a batch that may be written as it was: none of its records can be told to be not.
            parcel.reason = error
            sender.settle(track.lane.withdraw(partial(operator.is_, parcel)))
        else:
            _take_out(sender, load, keys, error)


def _take_out(sender: Sender, load: Load, keys: set[bytes], error: NotDelivered) -> None:
    track = load.track
    kept = [pair for pair in load.orders if pair[0] not in keys]
    dropped = SentBatch(track.topic, track.partition, sender)
    held_back = [delivery for order_key, delivery in load.orders if order_key in keys]
    records = kernel.records(load.batch.seal())
    options = sender.options
    sent = Sent(track.topic, track.partition, sender)
    sent.load = load
    batch = OpenBatch(sent, options.codec_id, options.batch_bytes)
    for _, delivery in kept:
        _, timestamp_ms, key, value, headers = records[delivery.place]
        delivery.move(sent, batch.append(timestamp_ms, key, value, headers))
    for place, delivery in enumerate(held_back):
        delivery.move(dropped, place)
    sender.count.failed += len(held_back)
    load.rebuild(batch, kept)
    if not kept:
        track.lane.withdraw(lambda parcel: parcel is load.parcel)
        sender.forget(load)
    sender.fail(dropped, error)
