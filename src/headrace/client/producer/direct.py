"""The way of a record that is waited for, where nothing else is going on: written, and its answer read, by its sender.

The caller has the lock when it writes the request, gives it up while it sleeps, and has it again when it reads the
answer. If nobody else took it meanwhile, and the answer says that the record is written, then nobody can know that the
batch was ever in flight: the lane counts it, and that is all. No timer is set, nobody else is woken.

In every other case the batch becomes one like any other, in the state that it is in:

    something is in the way before it is written       ->  it waits in its lane
    anybody else takes the lock before the answer      ->  who does so first makes it one in flight (`_show`)
    a signal, DOZE_S without an answer, another answer ->  the same, by the caller itself

So the rules for order, repeats and fates are the lane's alone, and an interrupt leaves the batch to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from headrace.client.connection.broker_connection import BrokerConnection, Written
from headrace.client.connection.metadata import MetadataSnapshot
from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.client.errors import BrokerUnreachable
from headrace.client.producer.accumulator import PartitionBuffer, ProducerBatch
from headrace.client.producer.request import Acknowledged, Attempt, ProduceRequest, ProduceTemplate, template_of
from headrace.client.producer.sender import Sender
from headrace.ports.disk import Buffer
from headrace.records.builder import Delivery, Report
from headrace.wire import api as apis

COPIED_BYTES: Final = 64 << 10
"""Larger batches are not joined with the rest of their request."""

SPARE_BYTES: Final = 4096


class Route(NamedTuple):
    """How a partition's batches get to its leader, as long as the metadata and the connection are the same."""

    snapshot: MetadataSnapshot
    leader: int
    connection: BrokerConnection
    opened_count: int
    template: ProduceTemplate
    frame: Callable[[int, Buffer], bytes]


class Direct:
    def __init__(self, sender: Sender, reactor: ThreadReactor) -> None:
        self._sender = sender
        self._reactor = reactor
        self._pool = sender.pool
        self._metadata = sender.pool.metadata
        self._timeout_ms = int(sender.options.request_timeout_ms)

    def deliver(self, pending: ProducerBatch) -> Report:
        """Send what `Router.send_lone` gave, and wait for it."""
        batch, reactor = pending.batch, self._reactor
        reactor.check_outside()
        reactor.lock.__enter__()
        try:
            if self._sender.refusal is not None:
                raise self._sender.refusal.with_traceback(None)
            if not self._left(pending):
                reactor.running = False
                if pending.buffer.open_batch is not None:
                    pending.buffer.accumulator.close(pending.buffer)
                self._enter(pending)
                self._sender.make_ready(pending.buffer)
        finally:
            reactor.running = False
            reactor.leave()
        report = Delivery(batch.sent, 0, batch.first_ms).result()
        if pending.position < 0 and batch.size <= SPARE_BYTES and not pending.buffer.spares:
            batch.reuse()
            pending.buffer.spares.append(pending)
        return report

    def _left(self, pending: ProducerBatch) -> bool:
        """Whether the batch has left, and is in flight or done; if not, nothing was changed."""
        reactor, buffer, sent = self._reactor, pending.buffer, pending.batch.sent
        route = buffer.route
        if (
            route is None
            or route.snapshot is not self._metadata.snapshot
            or route.opened_count != route.connection.opened_count
        ):
            route = buffer.route = self._route(buffer)
        if route is None or buffer.batch is not None or not reactor.is_quiet or self._pool.failing():
            return False
        # From here on nothing may be given the same stamp, not even by code that interrupts this.
        reactor.running = True
        stamp = buffer.lane.stamp_alone(route.leader)
        if stamp is None:
            return False
        try:
            data = pending.batch.seal(*stamp)
        except Exception:  # noqa: BLE001 - met again, and told, where batches are packed
            return False
        if len(data) > COPIED_BYTES:
            return False
        asked_at = reactor.now()
        connection, template = route.connection, route.template
        written = connection.send_alone(template.version, route.frame, data)
        if written is None:
            return False
        # While the broker is at work.
        buffer.accumulator.move_on(buffer)
        show = partial(self._show, pending, route, written, asked_at)
        if not written.is_complete:
            show()
        elif reactor.doze(written.fd, lambda: sent.done, show):
            answer = connection.read_alone(written, template.read)
            if answer is not None:
                self._count(pending, route, answer, asked_at)
            else:
                show()
                connection.catch_up()
        return True

    def _route(self, buffer: PartitionBuffer) -> Route | None:
        metadata = self._metadata
        leader, topic = metadata.leader(buffer.topic, buffer.partition), metadata.topic(buffer.topic)
        if leader is None or topic is None:
            return None
        try:
            connection = self._pool.broker(leader)
        except BrokerUnreachable:
            return None
        if not connection.is_open:
            return None
        template = template_of(buffer, connection.version(apis.PRODUCE), topic.topic_id, self._timeout_ms)
        frame = partial(template.frame, connection.framer.head_end(apis.PRODUCE, template.version))
        return Route(metadata.snapshot, leader, connection, connection.opened_count, template, frame)

    def _enter(self, pending: ProducerBatch) -> None:
        """Put the batch into its lane."""
        buffer = pending.buffer
        self._sender.quota.take(pending.batch)
        buffer.accumulator.open(buffer, pending)
        buffer.accumulator.close(buffer)

    def _show(self, pending: ProducerBatch, route: Route, written: Written, asked_at: float) -> None:
        """Make the batch one that is in flight, for everyone to see."""
        buffer = pending.buffer
        # One that was opened meanwhile, by code that interrupts this, comes after it.
        opened, batch, due = buffer.open_batch, buffer.batch, buffer.due
        self._enter(pending)
        buffer.open_batch, buffer.batch, buffer.due = opened, batch, due
        sent = buffer.lane.next(asked_at, route.leader)
        assert sent is pending
        request = ProduceRequest()
        request.add(Attempt(buffer, pending, pending.attempt, pending.sign()))
        self._sender.send(route.leader, buffer.accumulator.acks, request, written)

    def _count(self, pending: ProducerBatch, route: Route, answer: Acknowledged, asked_at: float) -> None:
        sender, count, now = self._sender, self._sender.count, self._reactor.now()
        pending.buffer.lane.went_alone(1, now)
        pending.batch.sent.finish(answer.base_offset, answer.append_ms)
        count.requests += 1
        count.direct += 1
        count.batches += 1
        count.delivered += 1
        count.bytes += pending.batch.record_bytes
        if sender.options.avoid_slow:
            sender.latency.took(route.leader, (now - asked_at) * 1000, now)
